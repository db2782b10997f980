"""The routes of the server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final

from attrs import frozen
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from arb_ternary_serve.answers import Form, joined, make_form, usage
from arb_ternary_serve.gate import Exchange, Gate, GateRules, Log
from arb_ternary_serve.generation import Generation, read_prompts
from arb_ternary_serve.metrics import Metrics
from arb_ternary_serve.openapi import description
from arb_ternary_serve.page import page_routes
from arb_ternary_serve.problems import RequestProblem, problem_response
from arb_ternary_serve.protocol import Kind, Request, parse_request
from arb_ternary_serve.streaming import EventStream, before_disconnect
from arb_ternary_serve.text_stream import Part
from arb_ternary_serve.worker import ModelWorker

_ENDPOINTS: Final[Mapping[str, Kind]] = {
    "/v1/completions": "completion",
    "/v1/chat/completions": "chat",
}


@frozen
class Limits:
    """Limits of requests.

    Attributes:
        max_tokens: largest number of tokens of an answer.
        max_body: largest number of bytes of a body.
        seconds: longest time of an answer, once its prompts are read.
        read_seconds: longest time in which a client may send a request.
    """

    max_tokens: int = 4096
    max_body: int = 4 << 20
    seconds: float = 600.0
    read_seconds: float = 20.0


class Api:
    """Answers requests.

    Args:
        workers: the models; the first one answers requests that name none.
        limits: limits of requests.
        rules: who is answered.
        log: gets a record of each request.

    Attributes:
        gate: the application, with what every request passes before it.
    """

    def __init__(
        self, workers: Sequence[ModelWorker], limits: Limits, rules: GateRules, log: Log
    ) -> None:
        self._workers = {worker.name: worker for worker in workers}
        self._limits = limits
        self._created = int(time.time())
        self._metrics = Metrics(workers)
        page = page_routes()
        routes = [
            *(Route(path, self._answer, methods=["POST"]) for path in _ENDPOINTS),
            Route("/v1/models", self._list_models),
            Route("/v1/models/{name:path}", self._show_model),
            Route("/health", self._health),
            Route("/metrics", self._show_metrics),
            Route("/openapi.json", self._describe),
            *page,
        ]
        handlers = {RequestProblem: _show_problem, HTTPException: _show_http, Exception: _show_bug}
        self.gate = Gate(
            Starlette(routes=routes, exception_handlers=handlers),  # type: ignore[arg-type]
            rules,
            open_paths=frozenset({"/health", *(route.path for route in page)}),
            named_paths=frozenset(route.path for route in routes),
            metrics=self._metrics,
            log=log,
        )

    async def _answer(self, http: HttpRequest) -> Response:
        exchange: Exchange = http.state.exchange
        content = await self._read_body(http)
        kind = _ENDPOINTS[http.url.path]
        # Long texts take a while, so the loop goes on meanwhile.
        request = await asyncio.to_thread(parse_request, kind, content)
        worker = self._find(request.model)
        exchange.model = worker.name
        prompts = await read_prompts(request, worker)
        generation = Generation(request, prompts, worker, self._limits.max_tokens)
        exchange.prompt_tokens = generation.prompt_length
        form = make_form(request, worker.name, worker.token_names)
        seconds = self._limits.seconds

        def close() -> None:
            generation.cancel()
            exchange.drawn = generation.drawn

        if request.stream:
            chunks = self._chunks(request, generation, form, exchange)
            return EventStream(chunks, seconds, close)
        try:
            work = self._collect(generation, form, exchange)
            return await before_disconnect(http.receive, work, seconds)
        finally:
            close()

    async def _collect(self, generation: Generation, form: Form, exchange: Exchange) -> Response:
        answers: list[list[Part]] = [[] for _ in generation.answers]
        async for index, part in generation.parts():
            self._note_first(exchange)
            answers[index].append(part)
        used = usage(generation.prompt_length, generation.drawn)
        return JSONResponse(form.response(list(map(joined, answers)), used))

    async def _chunks(
        self, request: Request, generation: Generation, form: Form, exchange: Exchange
    ) -> AsyncIterator[dict[str, Any]]:
        for index in range(len(generation.answers)):
            for chunk in form.beginning(index):
                yield chunk
        async for index, part in generation.parts():
            self._note_first(exchange)
            yield form.chunk(index, part)
        if request.include_usage:
            yield form.usage_chunk(usage(generation.prompt_length, generation.drawn))

    def _note_first(self, exchange: Exchange) -> None:
        if exchange.first_token is None:
            exchange.first_token = time.monotonic() - exchange.started
            self._metrics.first_token.labels(exchange.model).observe(exchange.first_token)

    async def _read_body(self, http: HttpRequest) -> bytes:
        media_type = http.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json":
            # A page of another site could send other types without asking.
            raise RequestProblem(
                "the body must be JSON, with the header Content-Type: application/json",
                status=415,
            )
        declared = http.headers.get("content-length", "0")
        if len(declared) > 15 or int(declared) > self._limits.max_body:
            raise self._too_large()
        content = bytearray()
        try:
            async with asyncio.timeout(self._limits.read_seconds):
                async for piece in http.stream():
                    content += piece
                    if len(content) > self._limits.max_body:
                        raise self._too_large()
        except TimeoutError:
            raise RequestProblem(
                f"the body did not arrive within {self._limits.read_seconds:g} seconds",
                status=408,
                headers={"Connection": "close"},
            ) from None
        except ClientDisconnect:
            raise RequestProblem("the client has left", status=499) from None
        return bytes(content)

    def _too_large(self) -> RequestProblem:
        return RequestProblem(
            f"the body has more than {self._limits.max_body} bytes",
            status=413,
            headers={"Connection": "close"},
        )

    def _find(self, name: str | None) -> ModelWorker:
        if name is None:
            return next(iter(self._workers.values()))
        worker = self._workers.get(name)
        if worker is None:
            raise RequestProblem(
                f"model: there is no {name[:80]!r}; this server has {', '.join(self._workers)}",
                status=404,
                param="model",
                code="model_not_found",
            )
        return worker

    async def _list_models(self, _: HttpRequest) -> Response:
        models = [self._model(worker) for worker in self._workers.values()]
        return JSONResponse({"object": "list", "data": models})

    async def _show_model(self, http: HttpRequest) -> Response:
        return JSONResponse(self._model(self._find(http.path_params["name"])))

    def _model(self, worker: ModelWorker) -> dict[str, Any]:
        return {
            "id": worker.name,
            "object": "model",
            "created": self._created,
            "owned_by": "arb-ternary",
            "context_length": worker.model.context,
            "has_chat_template": worker.model.special.chat_template is not None,
        }

    async def _health(self, _: HttpRequest) -> Response:
        status = "stopping" if self.gate.stopping else "ok"
        return JSONResponse({"status": status}, 503 if self.gate.stopping else 200)

    async def _show_metrics(self, _: HttpRequest) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def _describe(self, _: HttpRequest) -> Response:
        return JSONResponse(description())


async def _show_problem(_: HttpRequest, problem: RequestProblem) -> Response:
    return problem_response(problem)


async def _show_http(http: HttpRequest, error: HTTPException) -> Response:
    what = {
        404: f"there is no {http.url.path[:80]!r}; /openapi.json lists what there is",
        405: f"{http.method} is not possible here",
    }.get(error.status_code, error.detail)
    return problem_response(RequestProblem(what, status=error.status_code, headers=error.headers))


async def _show_bug(_: HttpRequest, error: Exception) -> Response:
    del error  # its text is for the log alone
    return problem_response(
        RequestProblem("the server has made a mistake; its log says which", status=500)
    )
