"""Checks that every request passes, and the record that the server keeps of each."""

from __future__ import annotations

import hmac
import json
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from attrs import define, frozen
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from arb_ternary_serve.metrics import Metrics
from arb_ternary_serve.problems import RequestProblem, problem_response

Log = Callable[[Mapping[str, Any]], object]


@frozen
class GateRules:
    """Whom the server answers.

    Attributes:
        keys: a request needs one of them; none = none is needed.
        hosts: names of this machine that the header Host may have; None = any. It keeps pages of
            other sites away from a server that only this machine should reach.
    """

    keys: tuple[str, ...] = ()
    hosts: frozenset[str] | None = None


@define
class Exchange:
    """A request and what became of it.

    Attributes:
        id: a name for it.
        started: when it came, by the monotonic clock.
        endpoint: its path, if there is such a one.
        model: id of the model.
        prompt_tokens: tokens of its prompts.
        drawn: tokens that were drawn for it.
        first_token: seconds until the first one.
        status: the HTTP status; 499 = the client has left.
    """

    id: str
    started: float
    endpoint: str
    model: str | None = None
    prompt_tokens: int | None = None
    drawn: int | None = None
    first_token: float | None = None
    status: int | None = None

    def record(self) -> dict[str, Any]:
        """Return what is logged; contents are not."""
        first = self.first_token
        return {
            "time": _now(),
            "id": self.id,
            "endpoint": self.endpoint,
            "model": self.model,
            "status": self.status,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.drawn,
            "seconds_to_first_token": None if first is None else round(first, 4),
            "seconds": round(time.monotonic() - self.started, 4),
        }


class Gate:
    """Answers requests that may be answered, and notes them.

    Args:
        app: the application behind it.
        rules: whom it answers.
        open_paths: paths that need no key.
        named_paths: paths by their name in logs and metrics; all others are ``other``.
        metrics: counts the requests.
        log: gets a record of each request.

    Attributes:
        stopping: whether new requests are turned away.
    """

    def __init__(
        self,
        app: ASGIApp,
        rules: GateRules,
        *,
        open_paths: frozenset[str],
        named_paths: frozenset[str],
        metrics: Metrics,
        log: Log,
    ) -> None:
        self._app = app
        self._rules = rules
        self._open_paths = open_paths
        self._named_paths = named_paths
        self._metrics = metrics
        self._log = log
        self.stopping = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"]
        endpoint = path if path in self._named_paths else "other"
        if path.startswith("/v1/models/"):
            endpoint = "/v1/models/{name}"
        exchange = Exchange(f"req-{uuid.uuid4().hex}", time.monotonic(), endpoint)
        scope.setdefault("state", {})["exchange"] = exchange

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = exchange.status or message["status"]
                MutableHeaders(scope=message)["x-request-id"] = exchange.id
            await send(message)

        try:
            await self._respond(scope, receive, noted)
        finally:
            exchange.status = exchange.status or 500
            self._metrics.requests.labels(endpoint, str(exchange.status)).inc()
            self._log(exchange.record())

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check(scope)
        except RequestProblem as problem:
            await problem_response(problem)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        hosts = self._rules.hosts
        if hosts is not None and _host_name(headers.get("host", "")) not in hosts:
            raise RequestProblem(
                "the header Host does not name this machine. Use the address that the server "
                "prints when it starts.",
                status=403,
                code="wrong_host",
            )
        if scope["path"] not in self._open_paths:
            self._check_key(headers.get("authorization", ""))
        if self.stopping and scope["path"] not in self._open_paths:
            raise RequestProblem(
                "the server is about to stop",
                status=503,
                code="stopping",
                headers={"Retry-After": "10", "Connection": "close"},
            )

    def _check_key(self, authorization: str) -> None:
        if not self._rules.keys:
            return
        scheme, _, given = authorization.partition(" ")
        shown = given.strip().encode()
        # All are compared, so that the time says nothing.
        matches = [hmac.compare_digest(shown, key.encode()) for key in self._rules.keys]
        if scheme.lower() != "bearer" or not any(matches):
            raise RequestProblem(
                "a key is needed, in the header Authorization: Bearer KEY",
                status=401,
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )


def log_to_stderr(record: Mapping[str, Any]) -> None:
    """Write a record as a line of JSON."""
    print(json.dumps(record), file=sys.stderr, flush=True)


def _host_name(header: str) -> str:
    """Return the host of a header ``Host``, without its port."""
    if header.startswith("["):
        return header.partition("]")[0].lstrip("[").lower()
    return header.partition(":")[0].lower()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def log_failure(model: str, error: BaseException) -> None:
    """Write an exception of an engine as a line of JSON, with the places it came through."""
    places = [f"{place.name}:{place.lineno}" for place in traceback.extract_tb(error.__traceback__)]
    log_to_stderr(
        {
            "time": _now(),
            "model": model,
            "error": f"{type(error).__name__}: {error}",
            "places": places,
        }
    )
