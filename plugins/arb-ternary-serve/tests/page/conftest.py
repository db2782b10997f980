"""A headless Chromium, and a server that answers as a test says."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import uvicorn
from attrs import Factory, define
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from arb_ternary_serve.page import page_routes

#: Chromium looks for updates and hints of its maker unless it is told not to.
FLAGS = ["--disable-background-networking", "--disable-component-update", "--disable-sync"]


@define
class StandIn:
    """A server with the shape of the real one.

    Attributes:
        models: what ``/v1/models`` lists.
        pieces: the answer; the next one waits until `go` is set.
        cut: number of bytes that are sent together; lines and letters are cut.
        pause: seconds between them.
        finish_reason: why the answer ends; None = the connection ends without a reason.
        refusal: status, headers and error of the next answers instead.
        key: the key that requests have to bring.
        requests: path and body of each request for an answer.
        cancelled: set if a client went before the end of its answer.
    """

    models: list[dict[str, Any]] = Factory(lambda: [{"id": "tiny", "object": "model"}])
    pieces: list[str] = Factory(lambda: ["Hello", " there", "."])
    cut: int = 7
    pause: float = 0.0
    finish_reason: str | None = "stop"
    refusal: tuple[int, dict[str, str], dict[str, Any]] | None = None
    key: str | None = None
    requests: list[tuple[str, dict[str, Any]]] = Factory(list)
    go: threading.Event = Factory(threading.Event)
    cancelled: threading.Event = Factory(threading.Event)
    origin: str = ""

    def app(self) -> Starlette:
        answer = ["/v1/chat/completions", "/v1/completions"]
        return Starlette(
            routes=[
                *page_routes(),
                Route("/v1/models", self.list_models),
                *[Route(path, self.answer, methods=["POST"]) for path in answer],
            ]
        )

    def refuse(self, request: Request) -> Response | None:
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return JSONResponse({"error": {"message": "The key is wrong.", "code": None}}, 401)
        return None

    async def list_models(self, request: Request) -> Response:
        return self.refuse(request) or JSONResponse({"object": "list", "data": self.models})

    async def answer(self, request: Request) -> Response:
        self.requests.append((request.url.path, await request.json()))
        refused = self.refuse(request)
        if refused is not None:
            return refused
        if self.refusal is not None:
            status, headers, error = self.refusal
            return JSONResponse({"error": error}, status, headers)
        return StreamingResponse(self.stream(request.url.path), media_type="text/event-stream")

    async def stream(self, path: str) -> AsyncIterator[bytes]:
        try:
            for number, piece in enumerate(self.pieces):
                while number > 0 and not self.go.is_set():
                    await asyncio.sleep(0.005)
                choice = (
                    {"text": piece} if path == "/v1/completions" else {"delta": {"content": piece}}
                )
                async for cut in self.event({"choices": [{**choice, "finish_reason": None}]}):
                    yield cut
            if self.finish_reason is not None:
                ending = {"choices": [{"delta": {}, "finish_reason": self.finish_reason}]}
                async for cut in self.event(ending):
                    yield cut
                yield b"data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def event(self, content: dict[str, Any]) -> AsyncIterator[bytes]:
        data = f"data: {json.dumps(content, ensure_ascii=False)}\n\n".encode()
        for start in range(0, len(data), self.cut):
            yield data[start : start + self.cut]
            await asyncio.sleep(self.pause)


@pytest.fixture
def server() -> Iterator[StandIn]:
    stand_in = StandIn()
    stand_in.go.set()
    config = uvicorn.Config(
        stand_in.app(),
        port=0,
        log_level="warning",
        ws="none",
        lifespan="off",
        timeout_graceful_shutdown=1,
    )
    runner = uvicorn.Server(config)
    thread = threading.Thread(target=runner.run)
    thread.start()
    while not runner.started:
        thread.join(0.01)
    port = runner.servers[0].sockets[0].getsockname()[1]
    stand_in.origin = f"http://127.0.0.1:{port}"
    yield stand_in
    stand_in.go.set()
    runner.should_exit = True
    thread.join()


# Not for the session: Playwright keeps a loop running in the thread, so that tests of other modules
# could run none.
@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    names = ("chromium", "chromium-browser", "google-chrome")
    program = next(filter(None, map(shutil.which, names)), None)
    if program is None:
        pytest.skip(f"none of {', '.join(names)} is installed")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def seen() -> dict[str, list[str]]:
    """What the pages of a test wrote to the console, and the addresses that they asked for."""
    return {"console": [], "requests": []}


@pytest.fixture
def context(chromium: Any, seen: dict[str, list[str]]) -> Iterator[Any]:
    made = chromium.new_context(viewport={"width": 900, "height": 700})
    made.set_default_timeout(10_000)

    def watch(page: Any) -> None:
        page.on("console", lambda message: seen["console"].append(message.text))
        page.on("pageerror", lambda error: seen["console"].append(str(error)))
        page.on("request", lambda request: seen["requests"].append(request.url))

    made.on("page", watch)
    yield made
    made.close()


@pytest.fixture
def page(context: Any, server: StandIn, seen: dict[str, list[str]]) -> Iterator[Any]:
    """The page of the stand-in; at the end it has written nothing and asked nobody else."""
    opened = context.new_page()
    opened.goto(server.origin)
    yield opened
    assert seen["console"] == []
    own = (f"{server.origin}/", "data:")
    assert [url for url in seen["requests"] if not url.startswith(own)] == []
