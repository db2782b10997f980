"""Listen, answer until a signal, and stop gracefully."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Final

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from arb_ternary.errors import EnvironmentProblem, UsageProblem
from arb_ternary_serve.app import Api
from arb_ternary_serve.worker import ModelWorker

#: Seconds that a connection may take to close, and that an engine may take for its last step.
_CLOSING: Final = 5
_BACKLOG: Final = 2048


class Protocol(H11Protocol):
    """HTTP on a connection whose client has to send a request in time, and to read answers."""

    read_seconds: float = 20.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._reading: asyncio.TimerHandle | None = None
        # The application may have to end a connection whose client reads nothing.
        self.app_state = {**self.app_state, "transport": transport}
        super().connection_made(transport)
        self._watch_request()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_request()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        super().connection_lost(exc)

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self.loop.call_later(_CLOSING, self.transport.abort)

    def _watch_request(self) -> None:
        """Let time run while headers are incomplete, or a body follows that nobody wants."""
        theirs = self.conn.their_state
        waits_for_next = self.timeout_keep_alive_task is not None
        begun = theirs is h11.IDLE and not waits_for_next
        unwanted = theirs is h11.SEND_BODY and self.conn.our_state is h11.DONE
        if not (begun or unwanted):
            self._stop_watching()
        elif self._reading is None:
            self._reading = self.loop.call_later(self.read_seconds, self._end_reading)

    def _stop_watching(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _end_reading(self) -> None:
        self._reading = None
        if self.transport.is_closing():
            return
        if self.conn.our_state is h11.IDLE:
            self.transport.write(b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\n\r\n")
        self.transport.close()


class Server(uvicorn.Server):
    """A server that ends running answers when it is asked to stop.

    Args:
        api: answers requests.
        workers: its models.
        read_seconds: longest time in which a client may send the headers of a request.

    Attributes:
        second_signal: the number of the signal that has stopped it at once; None = none has.
    """

    def __init__(self, api: Api, workers: Sequence[ModelWorker], read_seconds: float) -> None:
        protocol = type("TimedProtocol", (Protocol,), {"read_seconds": read_seconds})
        config = uvicorn.Config(
            api.gate,
            http=protocol,
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=_CLOSING,
        )
        super().__init__(config)
        self._gate = api.gate
        self._workers = workers
        self._stopping: asyncio.Task[None] | None = None
        self.second_signal: int | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer requests until the server is asked to stop."""
        self._loop = asyncio.get_running_loop()
        for worker in self._workers:
            worker.start(self._loop)
        try:
            await super().serve(sockets)
        finally:
            seconds = 0 if self.force_exit else _CLOSING
            for worker in self._workers:
                worker.stop(seconds)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop at a signal; at a second one at once."""
        self._loop.call_soon_threadsafe(self.stop, sig)

    def stop(self, number: int = signal.SIGTERM) -> None:
        """End running answers and turn new ones away; if called again, stop at once."""
        if self._stopping is not None:
            self.second_signal = number
            self.force_exit = True
            self.should_exit = True
            for connection in self.server_state.connections:
                connection.transport.abort()  # which ends what is answered there
            return
        self._gate.stopping = True
        self._stopping = asyncio.ensure_future(self._stop_when_idle())

    async def _stop_when_idle(self) -> None:
        while self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks)
        self.should_exit = True


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address; it does not listen yet.

    Raises:
        UsageProblem: there is no such address on this machine.
        EnvironmentProblem: somebody else has it.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise UsageProblem(f"--host: {host!r} is no address: {error.strerror}") from error
    family, kind, protocol, _, address = found[0]
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise _not_bound(host, port, error) from error
    return bound


def listen(bound: socket.socket) -> None:
    """Let a socket listen.

    Raises:
        EnvironmentProblem: somebody else listens there.
    """
    try:
        bound.listen(_BACKLOG)
    except OSError as error:
        host, port = bound.getsockname()[:2]
        raise _not_bound(host, port, error) from error


def _not_bound(host: str, port: int, error: OSError) -> EnvironmentProblem:
    owner = port_owner(port)
    by = "" if owner is None else f" by process {owner}"
    return EnvironmentProblem(
        f"{host} port {port}: {error.strerror}{by}",
        "Stop the other program, or choose another --port; 0 takes a free one.",
    )


def port_owner(port: int) -> str | None:
    """Return the number and the command of the process that listens on a port, on Linux."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                listens = fields[3] == "0A"
                if listens and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{fields[9]}]")
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        # Files of others cannot be read, and any may be closed meanwhile.
        with contextlib.suppress(OSError):
            if str(link.readlink()) in inodes:
                process = link.parents[1]
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ")
                return f"{process.name} ({command.decode(errors='replace').strip()[:200]})"
    return None
