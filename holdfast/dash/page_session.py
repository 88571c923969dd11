"""Who may see the page: whoever opens its address once with the code in it, and then shows the cookie he got."""

import hmac
import secrets

from aiohttp import web

_CODE_BYTES, _COOKIE_BYTES = 16, 32
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
NO_COOKIE = "open the address that holdfast dash has printed"


class PageSession:
    """One session of one browser on loopback."""

    def __init__(self, port: int) -> None:
        self._hosts = {f"127.0.0.1:{port}", f"localhost:{port}"}
        self._name = f"holdfast-{port}"  # cookies do not know ports
        self.code = secrets.token_urlsafe(_CODE_BYTES)
        self._is_used = False
        self._cookie = secrets.token_urlsafe(_COOKIE_BYTES)

    def refuse(self, request: web.Request) -> str:
        """Say why a request is refused; "" if it is not. A code is used up by the first who shows it."""
        if request.headers.get("Host", "") not in self._hosts:  # a page elsewhere may have a name that leads here
            return "call this page by the address that holdfast dash has printed"
        own = f"http://{request.headers['Host']}"
        if request.headers.get("Origin", own) != own or (request.method == "POST" and "Origin" not in request.headers):
            return "requests from other pages are refused"
        if hmac.compare_digest(request.cookies.get(self._name, "").encode(), self._cookie.encode()):
            return ""
        return NO_COOKIE

    def take_code(self, shown: str) -> bool:
        """Return whether this is the code, for the first time."""
        right = not self._is_used and hmac.compare_digest(shown.encode("utf-8", "replace"), self.code.encode())
        self._is_used |= right
        return right

    def set_cookie(self, answer: web.StreamResponse) -> None:
        answer.set_cookie(self._name, self._cookie, httponly=True, samesite="Strict", path="/")

    def is_host(self, request: web.Request) -> bool:
        return request.headers.get("Host", "") in self._hosts
