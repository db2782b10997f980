"""The files of the page, without a browser."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Any

import pytest
from attrs import frozen
from starlette.applications import Starlette

from arb_ternary_serve.page import page_routes

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@frozen
class Answer:
    status: int
    headers: Mapping[str, str]
    content: bytes


def get(path: str) -> Answer:
    """Ask an application that has only these routes."""
    messages: list[Any] = []
    scope = {
        "type": "http",
        "method": "GET",
        "path": path,
        "query_string": b"",
        "headers": [],
    }

    async def send(message: Any) -> None:
        messages.append(message)

    asyncio.run(Starlette(routes=page_routes())(scope, None, send))  # type: ignore[arg-type]
    start, body = messages
    shown = {name.decode(): value.decode() for name, value in start["headers"]}
    return Answer(start["status"], shown, body["body"])


@pytest.mark.parametrize(
    ("path", "media_type"),
    [("/", "text/html"), ("/page.css", "text/css"), ("/page.js", "text/javascript")],
)
def test_files_come_with_their_type_and_policy(path: str, media_type: str) -> None:
    answer = get(path)
    assert answer.status == 200
    assert answer.headers["content-type"] == f"{media_type}; charset=utf-8"
    assert answer.headers["content-security-policy"] == POLICY
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["cache-control"] == "no-cache"


@pytest.mark.parametrize("path", ["/index.html", "/__init__.py", "/../engine.py", "/page"])
def test_nothing_else_is_served(path: str) -> None:
    assert get(path).status == 404


def test_the_page_names_no_other_host() -> None:
    for path in ("/", "/page.css", "/page.js"):
        text = get(path).content.decode().replace("http://www.w3.org/2000/svg", "")
        assert re.findall(r"(?:https?:)?//[a-z][\w.]*\.\w+", text) == []


def test_the_script_writes_no_html() -> None:
    script = get("/page.js").content.decode()
    written = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(")
    assert [name for name in written if name in script] == []
