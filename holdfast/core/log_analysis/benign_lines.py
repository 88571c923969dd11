"""Recognizes harmless log lines about machines: counters at zero, limits and rules, and faults that are over."""

import re
from functools import lru_cache

# Classes whose word sends a machine away: about these it must be said that it happens, and that it happens now.
MACHINES = frozenset(
    "gpu_ecc_memory gpu_lost_bus gpu_driver_gsp_fault nvlink_nvswitch_error gpu_thermal_power host_hw_kernel_fault "
    "node_failure ib_rdma_error".split()
)
_WELL = re.compile(
    r"(?<!there are )\bno (?:error|throttl|issue|fault|failure|problem|action required)"
    r"|\bnot (?:throttl|active|detected|lost)"
    r"|\b(?:healthy|passed|recovered|cleared|corrected)\b|\b0 (?:error|failure)s?\b|(?:errors|failures)[:=] ?0\b",
    re.IGNORECASE,
)
_ACCEPTED = re.compile(
    r"\baccepting this\b|\bsafe(?:ly)? (?:to )?ignore|\bcan be (?:safely )?ignored\b|\bharmless\b", re.IGNORECASE
)
_ZERO = re.compile(
    r"(?:error|err|violation|failure|fault|dbe|retired|remap|slowdown|throttl|xid|down|discard|replay|lost|ecc|bit"
    r"|pending|blacklist|uncorrect|flap)[\w ()./-]{0,60}[:=|,] {0,3}"
    r"(?:0\b(?![.x\d])|none\b|no\b(?! \w)|n/a\b|false\b|not active\b|ok\b|pass\w*\b|\[\])"
    r"|\b(?:no|zero|without) (?:\w+ ){0,3}(?:xids?|sxids?|errors?|faults?|violations?|throttling)\b"
    r"|^DCGM_FI_\w+\{.{0,400}\} 0(?:\.0)?$",
    re.IGNORECASE,
)
_COUNTED = re.compile(
    r"(?:uncorrect\w*|double[ -]bit|dbe\w*|pending|fail\w*|violation\w*|occurred|slowdown|errors?|xid)\b"
    r"[\w ()./-]{0,30}[:=|] {0,3}(?:[1-9]|yes\b|true\b|active\b)",
    re.IGNORECASE,
)
_EVENT = re.compile(r"\bNVRM: |\bS?Xid \(PCI")  # the driver writes only of what happens
_BYGONE = re.compile(
    r"^(?:#+|//|--|;) |\b(?:yesterday|last (?:week|month|night)|\d+ (?:days?|weeks?|months?) ago"
    r"|previous (?:run|job|boot|allocation)|history"
    r"|(?:reset|repair|replacement|rma) (?:was )?(?:done|complete\w*|success\w*)"
    r"|already (?:reset|repaired|replaced|drained|evicted)|back in service|returned to service)\b",
    re.IGNORECASE,
)
_RULE = re.compile(
    r"\b(?:runbook\b|for example\b|e\.g\.|in case of\b|if you see\b|polic(?:y|ies):|rules?:|(?:watch|look)ing for\b"
    r"|(?:detection|monitoring|reporting|protection|checks?) (?:is |are )?(?:enabled|on|started|running|configured)\b"
    r"|monitoring for\b|excluded?(?: nodes?| hosts?)?:|avoiding nodes?\b|denylist\b|blocklist\b|blacklisted nodes?\b"
    r"|requested by\b|op=Exists\b|(?:planned|scheduled) (?:reboot|maintenance|shutdown)\b|for maintenance\b"
    r"|\bnot (?:in|part of) (?:this|the|our) job\b|is running\b|active \(running\)|state: (?:completed|active|up)\b)"
    r"|: running\b",
    re.IGNORECASE,
)
_LIMIT = re.compile(r"\b(?:threshold|limit|shutdown temp|slowdown temp)\w*\b", re.IGNORECASE)
_OVER = re.compile(
    r"\b(?:exceed|above|over\b|reach|cross|past|hit\b|beyond|trip|violat|below|under\b)\w*|VIOLATION|>", re.IGNORECASE
)
_GUESS = re.compile(
    r"\b(?:usually|often|probably|likely|possibly|typically|may be|might be|could be|can be)\b.{0,20}\b(?:caused|due)\b"
    r"|\bpossible (?:causes?|reasons?)\b|\bcan happen (?:if|when)\b",
    re.IGNORECASE,
)
# After these words a line lists what such failures may come from; what stands there has not been seen.
_LISTS = re.compile(
    r"\b(?:possible|potential|probable|common|usual) (?:root )?(?:causes?|reasons?)\b"
    r"|\b(?:this|it) (?:can|could|may|might) (?:also )?(?:happen|occur|be caused|be due)\b",
    re.IGNORECASE,
)
_MUTE = 1.0  # too light to be a cause or a hint


def discount_benign(weight: float, klass: str, text: str) -> float:
    """Return the weight of a line, reduced if the line says that all is well or that the fault is over."""
    if weight < 9 and _ACCEPTED.search(text):
        return min(weight, _MUTE)
    well = weight < 9 and _is_well(text)
    if klass in MACHINES and weight > _MUTE and not _EVENT.search(text) and (well or _is_bygone(text)):
        return _MUTE
    return min(weight - 3, 2.0) if well else weight


def is_guess(text: str) -> bool:
    """Return whether a line only lists usual causes of such failures; the program that wrote it has not checked."""
    return _GUESS.search(text) is not None


@lru_cache(maxsize=256)
def find_guesses(text: str) -> int:
    """Return where in a line the list of possible causes begins; the line's length if it has no such list."""
    found = _LISTS.search(text)
    return found.end() if found else len(text)


@lru_cache(maxsize=256)  # several rows ask about one line, and lines repeat
def _is_well(text: str) -> bool:
    return _WELL.search(text) is not None


@lru_cache(maxsize=256)
def _is_bygone(text: str) -> bool:
    if _BYGONE.search(text) or _RULE.search(text):
        return True
    if _LIMIT.search(text) and not _OVER.search(text):
        return True
    return bool(_ZERO.search(text)) and not _COUNTED.search(text)
