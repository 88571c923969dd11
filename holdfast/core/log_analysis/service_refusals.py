"""Tells services that answer and refuse from services that fail or keep silent. Waiting does not help against a
refusal."""

import re

from holdfast.core.log_analysis.catalog_hits import CatalogHit

_SERVICES = frozenset({"object_store_error", "hub_network_error", "tracker_service_error"})
_MORE = 4  # further lines of an exception's message that may hold the answer
_CHARS = 2000
# How HTTP, gRPC and the stores' own protocols say no: who is it, not allowed, not there, not paid for.
_REFUSED = re.compile(
    r"""(?ix)
    \b(?:status|code|error|exception|response|returned|http(?:/\d\.?\d?)?)[^\w\n]{0,6}(?:code\W{1,3})?40[0-3]\b
  | \b40[0-4]\b[ :]{1,2}(?:client[ ]error|bad[ ]request|payment|not[ ]found|(?-i:GET|PUT|POST|HEAD|DELETE|PATCH)\b)
  | [(\[]40[0-4][)\]]
  | \b(?:un|not[ ])authori[sz]ed\b | \bunauthenticated\b | \bforbidden\b | \bgated[ ]?repo | RESOURCE_DOES_NOT_EXIST
  | \b(?:access|permission)[ _]?denied | \bno[ ](?:permission|right)s?[ ]to\b
  | \bnot[ ]have[ ](?:the[ ])?(?:(?:necessary[ ]|required[ ])?permission|access|[\w.]{1,60}[ ](?:access|permission))
  | \b(?:invalid|unknown|expired|wrong|incorrect|revoked)[ _]?
    (?:(?:api|access|security|auth|user|secret|jwt|provider)[ _]?)?(?:token|key|credential|signature|password|grant)
  | \b(?:token|key|credentials?|signature|password)\b.{0,60}
    \b(?:is[ ]invalid|expired|revoked|not[ ]valid|does[ ]not[ ](?:exist|match)|not[ ](?:set|configured|found|provided)
       |verification[ ]failed)
  | SignatureDoesNotMatch | (?:Authentication|Authorization)(?:Error|Failed|Failure|PermissionMismatch)
  | (?:No|Default|Partial)Credentials\w{0,20}Error | \b(?:locate|determine|find|load)\b.{0,20}\bcredentials
  | NoSuch(?:Key|Bucket|Upload|Container)\b | \b(?:Bucket|Blob|Container|Repository|Revision)NotFound
  | \b(?:key|blob|object|bucket|container|repository)[ ]does[ ]not[ ]exist
  | \b(?:storage|account|usage|seat)\b.{0,30}\b(?:quota|limit)\b.{0,30}\b(?:exceed|reach)
  | \b(?:billing|account|subscription)\b.{0,40}\b(?:disabled|suspended|delinquent|inactive|closed)\b
    """
)
_FAILS = re.compile(
    r"""(?ix)
    \b(?:408|425|429|5\d\d)\b[ ]?(?:client|server|error|service|internal|bad[ ]gateway|too[ ]many|[)\]]|$)
  | \bSlow[ ]?Down\b | throttl | rate[ ]limit | too[ ]many[ ]requests | timed?[ -]?out | unavailable | server[ ]?busy
  | internal[ ]?(?:server[ ]?)?error | connection[ ](?:refused|reset|aborted|error) | max[ ]retries
  | \bproxy | Tunnel[ ]connection
    """
)


def is_refusal(hit: CatalogHit) -> bool:
    """Return whether this hit quotes a service that answered "no", so that the next try gets the same answer."""
    if hit.klass not in _SERVICES:
        return False
    more = hit.raised.more[:_MORE] if hit.raised else ()
    text = "\n".join(said.text for said in (hit.said, *more))[:_CHARS]
    return _REFUSED.search(text) is not None and not _FAILS.search(text)
