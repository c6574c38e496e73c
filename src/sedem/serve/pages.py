"""The server's page: its files, and a policy that lets a browser run nothing else."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from functools import cache
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, Response

FOLDER = Path(__file__).parent / "page"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""Media type of a file of the page, by its ending."""
LOGIN = "login.html"
_STYLE = re.compile(r"<style>(.*?)</style>", re.DOTALL)
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src {style}; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)

router = APIRouter(include_in_schema=False)


def headers(style: str = "'self'") -> dict[str, str]:
    """Return the security headers of every response that a browser shows.

    Args:
        style: the only source of styles that the policy allows.
    """
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


def login_response(message: str | None = None, status: int = 401) -> HTMLResponse:
    """Return the form that asks for a key; it is self-contained: nothing else is served yet.

    Args:
        message: why the last key was refused.
        status: HTTP status.
    """
    text = files()[LOGIN][0].decode()
    [style] = _STYLE.findall(text)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return HTMLResponse(
        text.replace("{message}", html.escape(message or "")),
        status,
        {**headers(f"'sha256-{digest}'"), "Cache-Control": "no-store"},
    )


@router.get("/")
def index(request: Request) -> Response:
    """The page."""
    return _file("index.html", request)


@router.get("/favicon.ico")
def icon(request: Request) -> Response:
    """The icon, where browsers look for one by themselves."""
    return _file("icon.svg", request)


@router.get("/page/{name}")
def part(name: str, request: Request) -> Response:
    """A script, the styles or the icon of the page; a name is never part of a path."""
    return _file(name, request)


def _file(name: str, request: Request) -> Response:
    """Return a file, or 304 if the browser has it; browsers ask every time, so none is stale."""
    known = files().get(name)
    if known is None or name == LOGIN:
        return Response("The page has no such file.", 404, headers(), "text/plain")
    content, tag = known
    caching = {**headers(), "ETag": tag, "Cache-Control": "no-cache"}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=caching)
    return Response(content, headers=caching, media_type=TYPES[Path(name).suffix])
