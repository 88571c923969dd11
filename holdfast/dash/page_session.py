"""Access control of a job's page. The first browser that sends the code in the page's address gets a key, and sends the
key in a header. A cookie would not do: browsers also send cookies to other users' servers on this host."""

import secrets

from aiohttp import web

from holdfast.wire.credentials.job_secret_proof import is_equal

_CODE_BYTES, _KEY_BYTES = 16, 32
_KEY = "X-Holdfast-Page"  # the header; session.js sends it
ENTER = "/enter"  # where a code is exchanged for the key
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
USED_UP = "this address has been used; start holdfast dash again for a new one"
NO_KEY = "open the address that holdfast dash has printed"
_FOREIGN = "requests from other pages are refused"


class PageSession:
    """The code and the key by which one browser gets access to the page."""

    def __init__(self, port: int) -> None:
        self._hosts = {f"127.0.0.1:{port}", f"localhost:{port}"}
        self.code = secrets.token_urlsafe(_CODE_BYTES)
        self._is_used = False
        self._key = secrets.token_urlsafe(_KEY_BYTES)

    def refuse(self, request: web.Request) -> str:
        """Return why a request is refused; "" if it is not. The page's own files need no key."""
        if request.headers.get("Host", "") not in self._hosts:  # a page elsewhere may have a name that leads here
            return "call this page by the address that holdfast dash has printed"
        own = f"http://{request.headers['Host']}"
        if request.headers.get("Origin", own) != own or (request.method == "POST" and "Origin" not in request.headers):
            return _FOREIGN
        if request.path == "/":
            return ""  # any page may lead here; this one then fetches the rest
        if request.headers.get("Sec-Fetch-Site", "same-origin") != "same-origin":
            return _FOREIGN
        is_open = request.path == ENTER or request.path.startswith("/assets/")
        return "" if is_open or self.has_key(request) else NO_KEY

    def has_key(self, request: web.Request) -> bool:
        return is_equal(self._key, request.headers.get(_KEY, ""))

    def take_code(self, shown: str) -> str:
        """Return the key on the first call with the right code; "" for a wrong code or a later call."""
        if self._is_used or not is_equal(self.code, shown):
            return ""
        self._is_used = True
        return self._key
