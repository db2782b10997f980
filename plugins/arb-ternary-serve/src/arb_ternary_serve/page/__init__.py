"""The page of a chat, made by hand: three files that ask for nothing from elsewhere."""

from __future__ import annotations

import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

__all__ = ["page_routes"]

_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # A browser may keep the files, and asks whether they are still those of this version.
    "Cache-Control": "no-cache",
}


def page_routes() -> list[Route]:
    """Return the routes of the page and of its two files, at the root of the server."""
    return [_route(path, name, media_type) for path, (name, media_type) in _FILES.items()]


def _route(path: str, name: str, media_type: str) -> Route:
    content = (Path(__file__).parent / name).read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**_HEADERS, "ETag": tag}

    async def answer(request: Request) -> Response:
        known = request.headers.get("If-None-Match", "")
        # Proxies that compress make the tag a weak one.
        if known.removeprefix("W/") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=media_type, headers=headers)

    return Route(path, answer)
