"""Clients that leave, that do not read, that wait too long; engines that fail; the end."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from arb_ternary_chat.model import Model
from arb_ternary_serve.app import Limits
from arb_ternary_serve.engine import Engine
from arb_ternary_serve.gate import Exchange
from arb_ternary_serve.sequence import Event
from arb_ternary_serve.streaming import EventStream

ENDLESS = {"prompt": "a", "max_tokens": 250, "temperature": 0}
Running = Any


class SlowEngine(Engine):
    """An engine that waits for a permission before each step."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.permitted = threading.Semaphore(0)
        self.steps = 0
        self.failure: Exception | None = None

    def step(self) -> list[Event]:
        self.permitted.acquire()
        self.steps += 1
        if self.failure is not None:
            raise self.failure
        return super().step()


@pytest.fixture
def slow(pairs_model: Model) -> tuple[list[SlowEngine], Callable[[], Engine]]:
    """Engines that were made, and a function that makes one."""
    made: list[SlowEngine] = []

    def make() -> Engine:
        made.append(SlowEngine(pairs_model.causal, max_sequences=4, cache_bytes=1 << 21))
        return made[-1]

    return made, make


def until(condition: Callable[[], bool]) -> None:
    """Wait until something holds."""
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.01)
    pytest.fail("it did not happen")


def send(running: Running, **body: Any) -> socket.socket:
    """Send a request, and read nothing."""
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n"
    connection: socket.socket = running.connect()
    connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + content)
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_sequence(
    slow: Any, running: Any, worker_of: Any, pairs_model: Model, stream: bool
) -> None:
    engines, make = slow
    with running([worker_of("pairs", pairs_model, print, make)]) as server:
        (engine,) = engines
        connection = send(server, **ENDLESS, n=3, stream=stream)
        engine.permitted.release(2)
        until(lambda: engine.load.running == 3)
        connection.close()
        until(lambda: bool(server.records))
        steps = engine.steps
        engine.permitted.release(2)
        until(lambda: engine.load.running == 0)
        assert engine.steps <= steps + 2
        engine.permitted.release(1000)
        assert server.records[-1]["status"] == 499
        assert engine.load.free_blocks == engine.load.blocks
        server.post("completions", prompt="a")


def test_an_engine_that_fails_is_replaced(
    slow: Any, running: Any, worker_of: Any, pairs_model: Model, chat_model: Model
) -> None:
    engines, make = slow
    reports: list[Any] = []
    workers = [
        worker_of("pairs", pairs_model, lambda *args: reports.append(args), make),
        worker_of("chat", chat_model, print),
    ]
    with running(workers) as server:
        failed = engines[0]
        expected = server.post("completions", model="chat", prompt="a", temperature=0)
        running_one = send(server, **ENDLESS)
        streaming = send(server, **ENDLESS, stream=True)
        until(lambda: server.workers["pairs"]._live == 2)
        failed.permitted.release(1)
        until(lambda: len(server.workers["pairs"]._tickets) == 2)
        failed.failure = RuntimeError("secret /path")
        failed.permitted.release(1)
        for connection in (running_one, streaming):
            with connection:
                answer = connection.recv(65536)
                while b"model_failed" not in answer:
                    more = connection.recv(65536)
                    assert more
                    answer += more
            assert b"the model failed" in answer
            assert b"secret" not in answer
        assert [(name, str(error)) for name, error in reports] == [("pairs", "secret /path")]
        engines[1].permitted.release(1000)
        again = server.post("completions", model="pairs", prompt="a", max_tokens=3, temperature=0)
        assert again["usage"]["completion_tokens"] == 3
        other = server.post("completions", model="chat", prompt="a", temperature=0)
        assert other["choices"] == expected["choices"]
        assert {record["status"] for record in server.records} == {200, 500}


def test_a_model_whose_engine_cannot_be_made_again_is_out_of_order(
    slow: Any, running: Any, worker_of: Any, pairs_model: Model
) -> None:
    engines, make = slow
    reports: list[Any] = []

    def make_once() -> Engine:
        if engines:
            raise MemoryError("no more")
        return make()

    worker = worker_of("pairs", pairs_model, lambda *args: reports.append(args), make_once)
    with running([worker]) as server:
        engines[0].failure = RuntimeError("failed")
        engines[0].permitted.release(1)
        assert server.problem(500, "completions", prompt="a")["code"] == "model_failed"
        assert server.problem(503, "completions", prompt="a")["code"] == "model_failed"
        assert server.client.get("/health").status_code == 200
        assert [str(error) for _, error in reports] == ["failed", "no more"]


def test_a_sequence_that_an_engine_does_not_take_gets_an_error(
    slow: Any, running: Any, worker_of: Any, pairs_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> int:
        raise MemoryError

    engines, make = slow
    with running([worker_of("pairs", pairs_model, lambda *_: None, make)]) as server:
        engines[0].permitted.release(1000)
        with monkeypatch.context() as patch:
            patch.setattr(engines[0], "submit", refuse)
            assert server.problem(500, "completions", prompt="a")["code"] == "model_failed"
        server.post("completions", prompt="a", max_tokens=1)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_takes_too_long_is_ended(
    slow: Any, running: Any, worker_of: Any, pairs_model: Model, stream: bool
) -> None:
    engines, make = slow
    limits = Limits(seconds=0.3)
    with running([worker_of("pairs", pairs_model, print, make)], limits) as server:
        engines[0].permitted.release(3)
        response = server.client.post("/v1/completions", json={**ENDLESS, "stream": stream})
        assert response.status_code == (200 if stream else 504)
        last = response.text.strip().split("\n\n")[-1].removeprefix("data: ")
        assert json.loads(last)["error"]["code"] == "timeout"
        engines[0].permitted.release(1000)
        until(lambda: engines[0].load.running == 0)
        until(lambda: [each["status"] for each in server.records] == [504])


def test_a_client_that_reads_nothing_delays_nobody(
    running: Any, worker_of: Any, pairs_model: Model
) -> None:
    with running([worker_of("pairs", pairs_model, print)], Limits(seconds=2)) as server:
        with send(server, **ENDLESS, n=3, stream=True, logprobs=20):
            assert server.post("completions", prompt="a", max_tokens=2)
            until(lambda: len(server.records) == 2)
        assert server.workers["pairs"]._live == 0


def test_a_connection_is_ended_if_nothing_can_be_sent() -> None:
    aborted: list[bool] = []
    closed: list[bool] = []

    class Transport:
        def abort(self) -> None:
            aborted.append(True)

    async def chunks() -> AsyncIterator[dict[str, Any]]:
        while True:
            yield {"text": "a"}

    sent: list[Any] = []

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) == 4:
            await asyncio.Event().wait()

    exchange = Exchange("id", 0.0, "/")
    scope = {"state": {"exchange": exchange, "transport": Transport()}}
    stream = EventStream(chunks(), 0.05, lambda: closed.append(True))
    asyncio.run(stream(scope, receive, send))
    assert len(sent) == 4
    assert aborted == closed == [True]
    assert exchange.status == 504


def test_more_than_may_wait_are_told_to_come_later(
    slow: Any, running: Any, worker_of: Any, pairs_model: Model
) -> None:
    engines, make = slow
    worker = worker_of("pairs", pairs_model, print, make, max_sequences=4, max_waiting=1)
    with running([worker]) as server:
        # One request may exceed the limit, so that long lists can be answered at all.
        with send(server, prompt="a", n=5, max_tokens=2):
            until(lambda: worker._live == 5)
            busy = server.client.post("/v1/completions", json={"prompt": "a"})
            assert busy.status_code == 429
            assert int(busy.headers["retry-after"]) > 0
            assert busy.json()["error"]["type"] == "rate_limit_error"
            engines[0].permitted.release(1000)
            until(lambda: worker._live == 0)
        server.post("completions", prompt="a", max_tokens=1)


def test_a_record_has_numbers_and_no_contents(both: Running) -> None:
    before = len(both.records)
    both.post("completions", model="pairs", prompt="secret", max_tokens=3, temperature=0)
    until(lambda: len(both.records) > before)
    record = both.records[before]
    assert record["endpoint"] == "/v1/completions"
    assert record["model"] == "pairs"
    assert record["completion_tokens"] == 3
    assert 0 < record["seconds_to_first_token"] <= record["seconds"]
    assert "secret" not in json.dumps(record)


def test_metrics_count_requests_and_tokens(both: Running) -> None:
    def values() -> dict[str, float]:
        lines = both.client.get("/metrics").text.splitlines()
        return {
            line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
            for line in lines
            if not line.startswith("#")
        }

    before = values()
    both.post("completions", model="pairs", prompt="the cat", max_tokens=3, temperature=0)
    both.problem(400, "completions")
    after = values()
    for name, difference in {
        'arb_requests_total{endpoint="/v1/completions",status="200"}': 1,
        'arb_requests_total{endpoint="/v1/completions",status="400"}': 1,
        'arb_tokens_drawn_total{model="pairs"}': 3,
        'arb_time_to_first_token_seconds_count{model="pairs"}': 1,
    }.items():
        assert after[name] - before.get(name, 0) == difference, name
    assert after['arb_running{model="pairs"}'] == 0
    assert after['arb_free_blocks{model="pairs"}'] == after['arb_blocks{model="pairs"}']


def test_running_answers_end_and_new_ones_are_turned_away(
    slow: Any, running: Any, worker_of: Any, pairs_model: Model
) -> None:
    engines, make = slow
    with running([worker_of("pairs", pairs_model, print, make)]) as server:
        (engine,) = engines
        with send(server, prompt="a", max_tokens=5, temperature=0) as connection:
            engine.permitted.release(2)
            until(lambda: engine.load.running == 1)
            stopping = server.server.stop
            server.server._loop.call_soon_threadsafe(stopping)
            until(lambda: server.client.get("/health").status_code == 503)
            error = server.problem(503, "completions", prompt="a")
            assert error["code"] == "stopping"
            engine.permitted.release(1000)
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        until(lambda: server.server.should_exit)


def test_a_second_call_stops_at_once(
    slow: Any, running: Any, worker_of: Any, pairs_model: Model
) -> None:
    engines, make = slow
    with running([worker_of("pairs", pairs_model, print, make)]) as server:
        with send(server, prompt="a", max_tokens=5, temperature=0) as connection:
            until(lambda: bool(server.workers["pairs"]._tickets))
            for _ in range(2):
                server.server._loop.call_soon_threadsafe(server.server.stop, signal.SIGINT)
            answer = b""
            while piece := connection.recv(1000):
                answer += piece
            assert b"200 OK" not in answer
        assert server.server.second_signal == signal.SIGINT
        engines[0].permitted.release(1000)
