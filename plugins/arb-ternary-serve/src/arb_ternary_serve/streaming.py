"""Send an answer while it is drawn, and end it if the client has left or takes too long."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, Final, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from arb_ternary_serve.problems import RequestProblem, timed_out

_Result = TypeVar("_Result")

#: Status in the log of a request whose client has left.
CLIENT_LEFT: Final = 499


async def before_disconnect(
    receive: Receive, work: Coroutine[Any, Any, _Result], seconds: float
) -> _Result:
    """Return the result of ``work``.

    Args:
        receive: tells whether the client has left; the body must have been read.
        work: is cancelled when the client leaves.
        seconds: longest time.

    Raises:
        RequestProblem: the client has left, or the time is over.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait(
            {working, watching}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
        )
        if working.done():
            return working.result()
        if watching.done():
            raise RequestProblem("the client has left", status=CLIENT_LEFT)
        raise timed_out(seconds)
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    message = await receive()
    while message["type"] != "http.disconnect":
        message = await receive()


class EventStream(Response):
    """Server-sent events, each a JSON object.

    Args:
        chunks: the objects.
        seconds: longest time in which they are sent.
        close: is called at the end, whatever it is.
    """

    def __init__(
        self,
        chunks: AsyncIterator[Mapping[str, Any]],
        seconds: float,
        close: Callable[[], object],
    ) -> None:
        super().__init__(
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )
        del self.headers["content-length"]
        self._chunks = chunks
        self._seconds = seconds
        self._close = close
        self._is_sending = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        try:
            await send(start)
            await before_disconnect(receive, self._send_all(send), self._seconds)
        except RequestProblem as problem:
            exchange = scope["state"]["exchange"]
            exchange.status = problem.status
            if problem.status == CLIENT_LEFT:
                return
            if self._is_sending:
                # The client does not read what it gets.
                scope["state"]["transport"].abort()
                await asyncio.sleep(0)  # the server notes that the connection is lost
                return
            await send(_body(_event(problem.body()), more=False))
        finally:
            self._close()

    async def _send_all(self, send: Send) -> None:
        async for chunk in self._chunks:
            await self._send(send, _body(_event(chunk), more=True))
        await self._send(send, _body(b"data: [DONE]\n\n", more=False))

    async def _send(self, send: Send, message: Mapping[str, Any]) -> None:
        self._is_sending = True
        await send(dict(message))
        self._is_sending = False


def _event(value: Mapping[str, Any]) -> bytes:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()


def _body(content: bytes, *, more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": content, "more_body": more}
