"""A process of its own writes conversations by the chat template of a model.

A template comes with a model file, so it is not trusted. Its sandbox counts most of its work, but a
single comparison of nested lists may still take for ever, and no thread can be ended. A process
can, and has a bound on its memory.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from arb_ternary.errors import ArbError
from arb_ternary_serve.problems import RequestProblem
from arb_ternary_text.chat.template import Message, Rendered, chat_template
from arb_ternary_text.data.tokenizers import Tokenizer, from_json

#: Longest time in which a template writes a conversation, and the process begins.
SECONDS: Final = 10.0
_START_SECONDS: Final = 120.0
#: Most memory of the process.
_MEMORY: Final = 4 << 30
#: Longest line between the processes: an escaped character takes up to twelve bytes.
_LINE: Final = 1 << 30


class TemplateProcess:
    """Writes conversations as text.

    Args:
        tokenizer: a tokenizer with a chat template.
        seconds: longest time for a conversation.
    """

    def __init__(self, tokenizer: Tokenizer, seconds: float = SECONDS) -> None:
        self._tokenizer = tokenizer
        self._seconds = seconds
        self._turn = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None

    async def render(self, messages: Sequence[Message]) -> Rendered:
        """Return the text of a conversation, up to the beginning of an answer.

        Raises:
            RequestProblem: the template refuses the conversation, has a fault, or takes too long.
        """
        async with self._turn:
            try:
                if self._process is None:
                    await self._start()
                answer = await self._ask(messages, self._seconds)
            except TimeoutError:
                await self.stop()
                raise RequestProblem(
                    f"the chat template of the model did not end within {self._seconds:g} seconds",
                    param="messages",
                ) from None
            except BaseException:
                # What it would answer belongs to nobody.
                await self.stop()
                raise
        if "error" in answer:
            raise RequestProblem(answer["error"], param="messages")
        return Rendered(answer["text"], letters=frozenset(answer["letters"]))

    async def stop(self) -> None:
        """End the process; the next conversation begins another one."""
        process = self._process
        self._process = None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.communicate()

    async def _start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            __name__,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_LINE,
            start_new_session=True,  # Ctrl-C in a terminal is for the server
        )
        await self._ask(self._tokenizer.to_json(), _START_SECONDS)

    async def _ask(self, question: Any, seconds: float) -> dict[str, Any]:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        async with asyncio.timeout(seconds):
            process.stdin.write(json.dumps(question).encode() + b"\n")
            await process.stdin.drain()
            line = await process.stdout.readline()
        if not line:
            raise RequestProblem("the chat template of the model has failed", param="messages")
        answer: dict[str, Any] = json.loads(line)
        return answer


def main() -> None:
    """Answer the lines of standard input: a tokenizer, then conversations."""
    _limit_memory()
    tokenizer = from_json(json.loads(sys.stdin.readline()))
    try:
        template = chat_template(tokenizer)
        problem = None
    except ArbError as error:
        problem = error
    _write({})
    for line in sys.stdin:
        if problem is not None:
            _write({"error": problem.what})
            continue
        try:
            rendered = template.render(json.loads(line), add_generation_prompt=True)
            _write({"text": rendered.text, "letters": sorted(rendered.letters)})
        except ArbError as error:
            _write({"error": error.what})


def _limit_memory() -> None:
    try:
        import resource
    except ImportError:  # not on Windows
        return
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))


def _write(answer: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
