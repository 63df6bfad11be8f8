"""Access control of the page's server: only browsers on this machine, or requests with the token."""

from __future__ import annotations

import hmac
import ipaddress
from urllib.parse import urlencode, urlsplit

from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_SOCKET = "/_nicegui_ws/"  # the browser posts here if a proxy blocks websockets
_HEADERS = (
    # The page's scripts and styles are inline or come from this server. Nothing may be loaded from anywhere else.
    (
        b"content-security-policy",
        b"default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
)


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Guard:
    """ASGI middleware that checks every request and websocket before anything else sees it.

    Without a token, the Host header must name this machine. That stops DNS rebinding, where a foreign page's own host
    name is made to resolve to 127.0.0.1. Other origins are always refused, because a browser would send the cookie.
    """

    def __init__(self, app: ASGIApp, token: str | None, host: str, port: int) -> None:
        self.app = app
        self.token = token
        self.names = _LOCAL_NAMES | {host}
        self.cookie = f"dapo_view_{port}"  # browsers share cookies between the ports of a host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        answer = self.refusal(scope)
        if answer is None:
            await self.app(scope, receive, _with_headers(send))
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await answer(scope, receive, _with_headers(send))

    def refusal(self, scope: Scope) -> Response | None:
        """Return the response to send instead of the page, or None if the request is allowed."""
        request = HTTPConnection(scope)
        headers = request.headers
        if self.token is None and _name(headers.get("host", "")) not in self.names:
            return PlainTextResponse("open this page under a name of its own machine, such as 127.0.0.1", 403)
        if "origin" in headers and urlsplit(headers["origin"]).netloc != headers.get("host"):
            return PlainTextResponse("requests from other sites are refused", 403)
        if scope["type"] == "http" and not _is_reading(scope):
            return PlainTextResponse("this page is read-only", 405)
        if self.token is None or self._matches(request.cookies.get(self.cookie, "")):
            return None
        if scope["type"] == "http" and self._matches(request.query_params.get("token", "")):
            return self._welcome(request)
        return PlainTextResponse("open this page at the address that `dapo view` printed, which has the token", 403)

    def _welcome(self, request: HTTPConnection) -> Response:
        """Move the token from the URL, which ends up in histories and screenshots, into a cookie."""
        rest = urlencode([(key, value) for key, value in request.query_params.multi_items() if key != "token"])
        # Exactly one leading slash: two would name another host.
        path = "/" + request.scope["path"].lstrip("/\\")
        response = RedirectResponse(path + (f"?{rest}" if rest else ""), 303)
        response.set_cookie(self.cookie, self.token or "", httponly=True, samesite="strict")
        return response

    def _matches(self, given: str) -> bool:
        return self.token is not None and hmac.compare_digest(given.encode(), self.token.encode())


def _is_reading(scope: Scope) -> bool:
    return scope["method"] in ("GET", "HEAD") or (scope["method"] == "POST" and scope["path"].startswith(_SOCKET))


def _name(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *_HEADERS]
        await send(message)

    return sending
