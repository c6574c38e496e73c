"""Sign in to the page: a key is typed once, or is in the address that the server printed.

The browser then keeps it in a cookie that scripts cannot read and other sites cannot send.
"""

from __future__ import annotations

from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from sedem.serve.keys import KeyRing
from sedem.serve.pages import login_response

COOKIE = "sedem_key"
FORM_BYTES = 4096
"""Largest body of the login form; a key has at most 512 characters."""


def asks_for_page(request: Request) -> bool:
    """Return whether a browser requests the page."""
    accepts = request.headers.get("accept", "")
    return request.method == "GET" and request.url.path == "/" and "text/html" in accepts


def login_page(message: str | None = None) -> Response:
    """Return the login form, with status 401."""
    response = login_response(message)
    # With no referrer at all, browsers would send the form with the origin "null".
    response.headers["Referrer-Policy"] = "same-origin"
    return response


def welcome(request: Request, keys: KeyRing, secret: str) -> Response:
    """Store a key in the browser and go to the page, or show the form again."""
    if keys.find(secret) is None:
        return login_page("This key is not known.")
    response = RedirectResponse("/", status_code=303)
    response.headers["Cache-Control"] = "no-store"
    response.set_cookie(
        COOKIE,
        secret,
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
        path="/",
    )
    return response


def sign_out() -> Response:
    """Forget the key in the browser and go to the login form."""
    response = RedirectResponse("/", status_code=303)
    response.delete_cookie(COOKIE, path="/", httponly=True, samesite="strict")
    return response


async def login(request: Request, keys: KeyRing) -> Response:
    """Handle the login form."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > FORM_BYTES:
            return login_page("This is too long for a key.")
    fields = parse_qs(body.decode("latin-1"))
    secret = fields.get("key", [""])[0].strip()
    return welcome(request, keys, secret) if secret else login_page("Type a key.")
