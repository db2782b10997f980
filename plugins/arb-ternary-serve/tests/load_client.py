"""Send requests to a server all at once, in many manners: a program, since no test has a network.

It reads ``{"port": ..., "requests": [...]}`` from its input, and writes one line of JSON per
request as it ends: its index, the status, and what there is of the text or the error.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any

#: Longest wait of a client for the next byte, in seconds.
PATIENCE = 300
PATH = "/v1/completions"


def connect(port: int) -> socket.socket:
    connection = socket.socket()
    connection.settimeout(PATIENCE)
    connection.connect(("127.0.0.1", port))
    return connection


def status_of(connection: socket.socket) -> int:
    """Return the status of the response."""
    head = b""
    while b" " not in head or len(head) < 12:
        piece = connection.recv(4096)
        if not piece:
            raise ConnectionError("the server sent no status")
        head += piece
    return int(head.split()[1])


def post(port: int, body: bytes) -> tuple[HTTPConnection, HTTPResponse]:
    client = HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    client.request("POST", PATH, body, {"Content-Type": "application/json"})
    return client, client.getresponse()


def pieces_of(response: HTTPResponse, size: int, pause: float) -> Iterator[bytes]:
    while piece := response.read(size):
        yield piece
        time.sleep(pause)


def ask(port: int, body: dict[str, Any], size: int = 65536, pause: float = 0.0) -> dict[str, Any]:
    """Send a request and read the whole answer, ``size`` bytes at a time."""
    client, response = post(port, json.dumps(body).encode())
    content = b"".join(pieces_of(response, size, pause))
    client.close()
    answer: dict[str, Any] = {"status": response.status}
    if response.status != 200:
        wait = response.getheader("Retry-After")
        return answer | {"error": json.loads(content)["error"], "retry_after": wait}
    if not body["stream"]:
        return answer | {"text": json.loads(content)["choices"][0]["text"]}
    *events, done, end = content.decode().split("\n\n")
    assert (done, end) == ("data: [DONE]", ""), content[-200:]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    return answer | {"text": "".join(chunk["choices"][0]["text"] for chunk in chunks)}


def leave(port: int, body: dict[str, Any]) -> dict[str, Any]:
    """Close the connection at the first byte of the answer."""
    client, response = post(port, json.dumps(body).encode())
    response.read(1)
    response.close()
    client.close()
    return {"status": response.status}


def send_bytes(port: int, body: bytes) -> dict[str, Any]:
    """Send a body that is not what it should be."""
    client, response = post(port, body)
    client.close()
    return {"status": response.status}


def send_much(port: int) -> dict[str, Any]:
    """Send 100 MB, which the server may refuse before it has read them."""
    size = 100_000_000
    with connect(port) as connection:
        connection.sendall(head(size))
        with suppress(BrokenPipeError, ConnectionResetError):  # the response may come before
            for _ in range(size // 100_000):
                connection.sendall(b" " * 100_000)
        try:
            return {"status": status_of(connection)}
        except ConnectionError:
            return {"status": "closed"}


def send_slowly(port: int) -> dict[str, Any]:
    """Send a byte per second until the server has enough of it."""
    with connect(port) as connection:
        connection.settimeout(1)
        for byte in head(1000):
            connection.sendall(bytes([byte]))
            try:
                return {"status": status_of(connection)}
            except TimeoutError:
                continue
    return {"status": None}


def read_nothing(port: int, body: dict[str, Any], others: threading.Event) -> dict[str, Any]:
    """Ask for more than buffers hold, and read none of it while others are answered."""
    content = json.dumps({**body, "stream": True, "logprobs": 20, "n": 4}).encode()
    with connect(port) as connection:
        connection.sendall(head(len(content)) + content)
        others.wait(PATIENCE)
    return {"status": None}


def head(length: int) -> bytes:
    lines = [f"POST {PATH} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json"]
    return "\r\n".join([*lines, f"Content-Length: {length}", "", ""]).encode()


def get(port: int, path: str) -> dict[str, Any]:
    client = HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    client.request("GET", path)
    response = client.getresponse()
    return {"status": response.status, "text": response.read().decode()}


def carry_out(port: int, request: dict[str, Any], others: threading.Event) -> dict[str, Any]:
    body = request.get("body", {})
    match request["manner"]:
        case "whole":
            return ask(port, body)
        case "slow":
            return ask(port, body, 50, 0.002)
        case "leave":
            return leave(port, body)
        case "no JSON":
            return send_bytes(port, b"prompt=the cat")
        case "nested":
            return send_bytes(port, b'{"prompt": ' + b"[" * 200_000)
        case "100 MB":
            return send_much(port)
        case "byte per second":
            return send_slowly(port)
        case "reads nothing":
            return read_nothing(port, body, others)
        case "get":
            return get(port, request["path"])
        case unknown:
            raise ValueError(unknown)


def main() -> None:
    plan = json.load(sys.stdin)
    requests = plan["requests"]
    left = sum(request["manner"] != "reads nothing" for request in requests)
    lock = threading.Lock()
    others = threading.Event()
    together = threading.Barrier(len(requests))

    def run(index: int) -> None:
        nonlocal left
        together.wait()
        try:
            outcome = carry_out(plan["port"], requests[index], others)
        except (OSError, HTTPException, AssertionError, ValueError) as error:
            outcome = {"status": "failed", "error": repr(error)}
        with lock:
            print(json.dumps({"index": index, **outcome}), flush=True)
            left -= requests[index]["manner"] != "reads nothing"
            if not left:
                others.set()

    with ThreadPoolExecutor(len(requests)) as pool:
        list(pool.map(run, range(len(requests))))


if __name__ == "__main__":
    main()
