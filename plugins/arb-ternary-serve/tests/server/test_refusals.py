"""Requests that are refused get a sentence, and nothing of them is computed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from arb_ternary_chat.model import Model
from arb_ternary_serve.app import Limits
from arb_ternary_serve.gate import GateRules

Running = Any
TURNS = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def strict(running: Any, worker_of: Any, chat_model: Model) -> Iterator[Running]:
    """A server with small limits, and a key."""
    worker = worker_of("chat", chat_model, print)
    limits = Limits(max_tokens=50, max_body=1000, read_seconds=0.3)
    with running([worker], limits, GateRules(("right", "also-right"), None)) as server:
        server.client.headers["Authorization"] = "Bearer right"
        yield server


@pytest.mark.parametrize(
    ("path", "body", "param", "sentence"),
    [
        ("completions", {}, "prompt", "is missing"),
        ("completions", {"prompt": ""}, None, "at least one token"),
        ("completions", {"prompt": []}, "prompt", "must be a text, a list of token ids"),
        ("completions", {"prompt": [1, "a"]}, "prompt", "must be a text, a list of token ids"),
        ("completions", {"prompt": [[1], []]}, "prompt", "must be a text, a list of token ids"),
        ("completions", {"prompt": [9999]}, None, "token ids must be from 0 to 260, not 9999"),
        ("completions", {"prompt": [9999], "echo": True}, None, "9999"),
        ("completions", {"prompt": "\ud800"}, "prompt", "must be a text"),
        ("completions", {"prompt": "a" * 400}, None, "the context 300"),
        ("completions", {"prompt": "a", "max_tokens": 400}, None, "the context 300"),
        ("completions", {"prompt": "a", "max_tokens": 5000}, "max_tokens", "the 4096 that this"),
        ("completions", {"prompt": "a", "max_tokens": -1}, "max_tokens", "at least 0, not -1"),
        ("completions", {"prompt": "a", "max_tokens": 1.5}, "max_tokens", "whole number, not a nu"),
        ("completions", {"prompt": "a", "max_tokens": True}, "max_tokens", "not true or false"),
        ("completions", {"prompt": "a", "n": 0}, "n", "at least 1, not 0"),
        ("completions", {"prompt": ["a", "b"], "n": 100}, "n", "more than the 128"),
        ("completions", {"prompt": "a", "temperature": -1}, "temperature", "at least 0, not -1"),
        ("completions", {"prompt": "a", "top_p": 0}, "top_p", "above 0, not 0"),
        ("completions", {"prompt": "a", "top_k": 0}, "top_k", "at least 1"),
        ("completions", {"prompt": "a", "seed": 1 << 63}, "seed", "at most"),
        ("completions", {"prompt": "a", "stop": ""}, "stop", "none of them empty"),
        ("completions", {"prompt": "a", "stop": list("abcde")}, "stop", "at most 4"),
        ("completions", {"prompt": "a", "logprobs": 21}, "logprobs", "at most 20"),
        ("completions", {"prompt": "a", "best_of": 2}, "best_of", "does not support"),
        ("completions", {"prompt": "a", "suffix": "b"}, "suffix", "does not support"),
        ("completions", {"prompt": "a", "temprature": 1}, "temprature", "Did you mean temperature"),
        ("completions", {"prompt": "a", "messages": []}, "messages", "is no field"),
        ("completions", {"prompt": "a", "frequency_penalty": 1}, "frequency_penalty", "support"),
        ("chat/completions", {"messages": []}, "messages", "must not be empty"),
        ("chat/completions", {"messages": ["hi"]}, "messages[0]", "must be an object, not a text"),
        ("chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content", "is missing"),
        (
            "chat/completions",
            {"messages": [{"role": "tool", "content": "x"}]},
            "messages[0].role",
            "must be one of",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content",
            "the model reads nothing else",
        ),
        ("chat/completions", {"messages": TURNS, "tools": [{}]}, "tools", "does not support"),
        (
            "chat/completions",
            {"messages": TURNS, "response_format": {"type": "json_object"}},
            "response_format",
            "does not support",
        ),
        ("chat/completions", {"messages": TURNS, "top_logprobs": 2}, "top_logprobs", "needs"),
        (
            "chat/completions",
            {"messages": TURNS, "model": "pairs"},
            "model",
            "no chat template, so it knows no turns",
        ),
    ],
)
def test_a_wrong_body_gets_a_sentence(
    both: Running, path: str, body: Any, param: str | None, sentence: str
) -> None:
    # httpx would refuse to write half of a surrogate pair, which JSON can.
    content = json.dumps({"model": "pairs", **body} if path == "completions" else body)
    headers = {"Content-Type": "application/json"}
    response = both.client.post(f"/v1/{path}", content=content, headers=headers)
    assert response.status_code == 400
    error = response.json()["error"]
    assert sentence in error["message"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert sorted(error) == ["code", "message", "param", "type"]


def test_fields_without_effect_are_accepted(both: Running) -> None:
    common = {"temperature": 0, "max_tokens": 4, "messages": TURNS}
    plain = both.post("chat/completions", **common)
    more = both.post(
        "chat/completions",
        **common,
        user="me",
        metadata={"a": {"b": 1}},
        store=True,
        tools=[],
        tool_choice="none",
        frequency_penalty=0,
        presence_penalty=None,
        logit_bias={},
        response_format={"type": "text"},
        n=None,
    )
    assert more["choices"] == plain["choices"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "the body is not JSON"),
        (b"{", "the body is not JSON"),
        (b"[]", "must be a JSON object"),
        (b'{"prompt": NaN}', "a number that JSON does not know"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (b'{"prompt": "a", "temperature": 1e999}', "must be finite"),
        (b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", "the body is not JSON"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"metadata": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001, "nested too deeply"),
    ],
)
def test_what_is_no_json_gets_a_sentence(both: Running, content: bytes, sentence: str) -> None:
    headers = {"Content-Type": "application/json"}
    response = both.client.post("/v1/completions", content=content, headers=headers)
    assert response.status_code == 400
    assert sentence in response.json()["error"]["message"]


def test_other_types_and_paths_and_methods_are_refused(both: Running) -> None:
    plain = both.client.post("/v1/completions", content=b'{"prompt": "a"}')
    assert plain.status_code == 415
    for method, path, status in (("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405)):
        response = both.client.request(method, path)
        assert response.status_code == status
        assert response.json()["error"]["type"] == "invalid_request_error"
    assert both.problem(404, "completions", model="nobody", prompt="a")["param"] == "model"
    assert "server" not in plain.headers


def test_a_key_is_needed_but_for_the_page_and_health(strict: Running) -> None:
    for given, status in (
        ("Bearer right", 200),
        ("bearer also-right", 200),
        ("Bearer wrong", 401),
        ("Basic right", 401),
        ("right", 401),
        ("Bearer \xe4", 401),
    ):
        headers = {"Authorization": given.encode("latin-1")}
        assert strict.client.get("/v1/models", headers=headers).status_code == status, given
    no_key = {"Authorization": ""}
    for path, status in (
        ("/health", 200),
        ("/", 200),
        ("/metrics", 401),
        ("/openapi.json", 401),
        ("/v1/nothing", 401),
        ("/nothing", 401),
    ):
        assert strict.client.get(path, headers=no_key).status_code == status, path
    refused = strict.client.post("/v1/completions", json={"prompt": "a"}, headers=no_key)
    assert refused.json()["error"]["code"] == "invalid_api_key"
    assert refused.headers["www-authenticate"] == "Bearer"


def test_only_names_of_this_machine_are_answered(
    running: Any, worker_of: Any, chat_model: Model
) -> None:
    rules = GateRules((), frozenset({"localhost", "::1"}))
    with running([worker_of("chat", chat_model, print)], rules=rules) as server:
        for host, status in (
            ("localhost", 200),
            ("LOCALHOST:8080", 200),
            ("[::1]:8080", 200),
            ("evil.example", 403),
            ("localhost.evil.example:8080", 403),
            ("", 403),
        ):
            found = server.client.get("/health", headers={"Host": host}).status_code
            assert found == status, host


def test_large_bodies_are_refused_before_they_are_read(strict: Running) -> None:
    text = "a" * 2000
    assert "1000 bytes" in strict.problem(413, "completions", prompt=text)["message"]

    def pieces() -> Iterator[bytes]:
        for _ in range(100):
            yield b" " * 100

    headers = {"Content-Type": "application/json"}
    chunked = strict.client.post("/v1/completions", content=pieces(), headers=headers)
    assert chunked.status_code == 413

    with strict.connect() as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer right\r\n"
        head += "Content-Type: application/json\r\nContent-Length: 100000000\r\n\r\n"
        connection.sendall(head.encode())
        answer = connection.recv(4096)
    assert answer.startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize("in_body", [False, True])
def test_a_client_that_sends_a_byte_at_a_time_is_sent_away(strict: Running, in_body: bool) -> None:
    text = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer right\r\n"
    body = b"Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
    with strict.connect() as connection:
        connection.sendall(text + body if in_body else text)
        connection.settimeout(0.05)
        answer = b""
        for _ in range(200):
            try:
                connection.sendall(b"x")
                answer = connection.recv(4096)
            except TimeoutError:
                continue
            except BrokenPipeError:
                answer = connection.recv(4096)
            break
    assert answer.startswith(b"HTTP/1.1 408")


def test_a_refused_body_does_not_keep_its_connection(strict: Running) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n"
    received = b""
    with strict.connect() as connection:
        connection.sendall(head)
        connection.settimeout(0.05)
        for _ in range(200):
            try:
                connection.sendall(b"x")
                piece = connection.recv(4096)
            except TimeoutError:
                continue
            except ConnectionError:
                break
            if not piece:
                break
            received += piece
        else:
            pytest.fail("the connection is still open")
    assert received.startswith(b"HTTP/1.1 401")
    assert received.count(b"HTTP/1.1") == 1


def test_a_connection_that_waits_for_its_next_request_is_kept(strict: Running) -> None:
    request = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with strict.connect() as connection:
        for _ in range(2):
            connection.sendall(request)
            answer = b""
            while not answer.endswith(b'{"status":"ok"}'):
                answer += connection.recv(4096)
            assert answer.startswith(b"HTTP/1.1 200")
            time.sleep(0.6)  # longer than the headers of a request may take


def test_errors_tell_no_paths(both: Running) -> None:
    for path in ("/v1/models/../../etc/passwd", "/%2e%2e/page.js", "/v1/models/x%00"):
        text = both.client.get(path).text
        assert "Traceback" not in text
        assert "/work" not in text
        assert ".py" not in text
