"""The server's page, a policy that lets a browser run nothing else, and the way to sign in.

A key is typed once, or is in the address that the server printed. The browser then keeps it in a
cookie that scripts cannot read and other sites cannot send.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from functools import cache
from pathlib import Path
from urllib.parse import parse_qs

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from sedem_serve.server.keys import KeyRing

FOLDER = Path(__file__).parent / "page"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""Media type of a file of the page, by its ending."""
OWN_PATHS = {"/": "index.html", "/favicon.ico": "icon.svg"}
"""Files of the page that have a path of their own."""
LOGIN = "login.html"
COOKIE = "sedem_key"
FORM_BYTES = 4096
"""Largest body of the login form; a key has at most 512 characters."""
_STYLE = re.compile(r"<style>(.*?)</style>", re.DOTALL)
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src {style}; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)

router = APIRouter(include_in_schema=False)


def headers(style: str = "'self'") -> dict[str, str]:
    """Return the security headers of every response that a browser shows."""
    return {
        "Content-Security-Policy": _POLICY.format(style=style),
        "X-Content-Type-Options": "nosniff",
        # With no referrer at all, browsers would send forms with the origin "null".
        "Referrer-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
    }


@cache
def files() -> dict[str, tuple[bytes, str]]:
    """Return the content and the entity tag of each file of the page, by its name."""
    contents = {path.name: path.read_bytes() for path in FOLDER.iterdir() if path.suffix in TYPES}
    return {
        name: (content, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
        for name, content in contents.items()
    }


def login_page(message: str = "") -> HTMLResponse:
    """Return the form that asks for a key, with status 401. It needs no other file."""
    text = files()[LOGIN][0].decode()
    [style] = _STYLE.findall(text)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return HTMLResponse(
        text.replace("{message}", html.escape(message)),
        401,
        {**headers(f"'sha256-{digest}'"), "Cache-Control": "no-store"},
    )


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


@router.get("/")
@router.get("/favicon.ico")
@router.get("/page/{name}")
def page(request: Request) -> Response:
    """Return a file of the page, or 304 if the browser has it; a name is never part of a path.

    Browsers ask every time, so none is stale, and they look for the icon by themselves.
    """
    name = OWN_PATHS.get(request.scope["path"]) or request.path_params["name"]
    known = files().get(name)
    if known is None or name == LOGIN:
        return Response("The page has no such file.", 404, headers(), "text/plain")
    content, tag = known
    caching = {**headers(), "ETag": tag, "Cache-Control": "no-cache"}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=caching)
    return Response(content, headers=caching, media_type=TYPES[Path(name).suffix])
