"""Chat templates: the text of a conversation, as transformers writes it (apply_chat_template)."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from importlib.util import find_spec
from typing import Any, Final

import attrs

from arb_ternary.errors import DataError, EnvironmentProblem
from arb_ternary.plugins.discovery import install_command
from arb_ternary_text.data.file_tokenizers import FileTokenizer
from arb_ternary_text.data.tokenizers import Tokenizer, base_tokenizer, special_tokens, token_text

Message = Mapping[str, Any]

#: Longest time in which a template is compiled, and writes a conversation.
_SECONDS: Final = 10.0
#: Names of a message's reasoning; templates read the first one, or ``thinking``.
_REASONING: Final = ("reasoning_content", "thinking", "reasoning")
#: First of the private characters that stand for the first letter of a typed control token.
_PRIVATE: Final = 0xF0000


class RefusedConversationError(DataError):
    """A template has called ``raise_exception``: it does not write such a conversation."""


@attrs.frozen
class Rendered:
    """A conversation as text.

    Attributes:
        text: what the template has written.
        generated: first character and end of each block ``{% generation %}``, in order.
        letters: first characters of control tokens that somebody typed into a message. They are
            text like any other.
    """

    text: str
    generated: tuple[tuple[int, int], ...] = ()
    letters: frozenset[int] = frozenset()


class TemplateProcess:
    """The process in which a template runs; after it has ended, a question begins another one.

    Args:
        setup: the first question.
        seconds: longest time for an answer.
    """

    def __init__(self, setup: Mapping[str, Any], seconds: float) -> None:
        self._setup = {**setup, "seconds": seconds}
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._end: weakref.finalize[Any, Any] | None = None

    def ask(self, question: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the answer to a question. None asks whether the template can be compiled.

        Raises:
            TimeoutError: the process took too long.
            RuntimeError: it has failed.
        """
        with self._lock:
            try:
                if self._process is None:
                    self._process = self._start()
                    answer = self._exchange(self._process, self._setup)
                    if question is None or "error" in answer:
                        return answer
                assert question is not None
                return self._exchange(self._process, question)
            except BaseException:
                # What the process would answer belongs to nobody.
                self.close()
                raise

    def close(self) -> None:
        """End the process."""
        self._process = None
        if self._end is not None:
            self._end()

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "arb_ternary_text.chat.sandbox"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="ascii",
            start_new_session=True,  # Ctrl-C in a terminal is for the command
        )
        self._end = weakref.finalize(self, _end_process, process)
        return process

    def _exchange(
        self, process: subprocess.Popen[str], question: Mapping[str, Any]
    ) -> dict[str, Any]:
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(question, default=str) + "\n")
            process.stdin.flush()
        line = process.stdout.readline()
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        if process.wait() == -signal.SIGALRM:
            raise TimeoutError
        raise RuntimeError


def _end_process(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


@attrs.frozen
class ChatTemplate:
    """A Jinja template that writes a conversation as text.

    Attributes:
        source: the template.
        variables: texts of special tokens by name, such as ``bos_token``.
        control_tokens: texts of the tokens that are no letters.
        name: what errors call the template.
        date: the time that ``strftime_now`` tells; None = now.
        seconds: longest time in which it is compiled, and writes a conversation.

    Raises:
        DataError: the template has a syntax error; the message has its line.
        EnvironmentProblem: jinja2 is not installed.
    """

    source: str = attrs.field(repr=lambda text: f"<{len(text)} characters>")
    variables: Mapping[str, str] = attrs.field(factory=dict)
    control_tokens: tuple[str, ...] = ()
    name: str = "the chat template"
    date: datetime | None = None
    seconds: float = _SECONDS
    _process: TemplateProcess = attrs.field(init=False, repr=False, eq=False)

    @_process.default
    def _compile(self) -> TemplateProcess:
        _require_jinja()
        date = None if self.date is None else self.date.isoformat()
        setup = {"source": self.source, "variables": self.variables, "date": date}
        process = TemplateProcess(setup, self.seconds)
        self._ask(process, None)
        return process

    @property
    def marks_answers(self) -> bool:
        """Whether the template says by ``{% generation %}`` what the assistant writes."""
        return re.search(r"\{%-?\s*generation\s*-?%\}", self.source) is not None

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = False
    ) -> Rendered:
        """Return the text of a conversation.

        Args:
            messages: each with ``role`` and ``content``, and whatever else the template reads.
            add_generation_prompt: whether the beginning of an answer follows.

        Raises:
            RefusedConversationError: the template does not write such a conversation.
            DataError: the template has a fault, or does too much; the message has its line.
            EnvironmentProblem: jinja2 is not installed.
        """
        given = [_with_reasoning(_without_none(message)) for message in messages]
        plain = self._render(given, add_generation_prompt)
        typed = _found_in(given, self.control_tokens)
        if not typed:
            return plain
        letters = self._typed_letters(given, typed, plain.text, add_generation_prompt)
        return attrs.evolve(plain, letters=letters)

    def _typed_letters(
        self, given: list[dict[str, Any]], typed: list[str], text: str, prompt: bool
    ) -> frozenset[int]:
        """Return where the text has control tokens that somebody typed.

        In a second rendering their first letters are private characters. A token for which that
        gives another text is read by the template itself, and stays what the template makes of it.
        """

        def places(tokens: list[str]) -> frozenset[int] | None:
            marks = _marks_for(given, tokens)
            marked = self._render([_replaced(each, marks) for each in given], prompt).text
            back = {ord(mark): token[0] for token, mark in marks.items()}
            if marked.translate(back) != text:
                return None
            return frozenset(place for place, each in enumerate(marked) if ord(each) in back)

        found = places(typed)
        if found is None:
            found = places([token for token in typed if places([token]) is not None])
        return found or frozenset()

    def _render(self, messages: list[dict[str, Any]], add_generation_prompt: bool) -> Rendered:
        question = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        answer = self._ask(self._process, question)
        return Rendered(answer["text"], tuple((start, end) for start, end in answer["generated"]))

    def _ask(self, process: TemplateProcess, question: Mapping[str, Any] | None) -> dict[str, Any]:
        try:
            answer = process.ask(question)
        except TimeoutError:
            raise DataError(
                f"{self.name} did not end within {self.seconds:g} seconds",
                "It may have an endless loop. Take another template.",
            ) from None
        except RuntimeError:
            raise DataError(f"the process of {self.name} has failed") from None
        if "error" not in answer:
            return answer
        line = answer.get("line")
        where = self.name if line is None else f"{self.name}, line {line}"
        if answer.get("refused"):
            raise RefusedConversationError(f"{where} refuses the conversation: {answer['error']}")
        raise DataError(f"{where}: {answer['error']}", answer.get("hint", ""))


def chat_template(
    tokenizer: Tokenizer, name: str = "the chat template", date: datetime | None = None
) -> ChatTemplate:
    """Return the chat template of a tokenizer.

    Args:
        tokenizer: a tokenizer that knows its special tokens and its template.
        name: what errors call the template.
        date: the time that ``strftime_now`` tells; None = now.

    Raises:
        DataError: there is no template, or it has a syntax error.
        EnvironmentProblem: jinja2 is not installed.
    """
    special = special_tokens(tokenizer)
    if special.chat_template is None:
        raise DataError(
            "the tokenizer has no chat_template, which writes conversations as text",
            "Give a file with a template (`template:`), or data of the key `text`.",
        )
    named = {
        "bos_token": special.bos,
        "eos_token": special.eos[0] if special.eos else None,
        "pad_token": special.pad,
        "unk_token": special.unk,
    }
    spelled = {name: token_text(tokenizer, token) for name, token in named.items()}
    base = base_tokenizer(tokenizer)
    control = tuple(base.control_tokens) if isinstance(base, FileTokenizer) else ()
    return ChatTemplate(
        special.chat_template,
        {key: text for key, text in spelled.items() if text is not None},
        tuple(token for token in control if token),
        name,
        date,
    )


def _require_jinja() -> None:
    if find_spec("jinja2") is None:
        raise EnvironmentProblem(
            "chat templates need the package `jinja2`, which is not installed",
            install_command("arb-ternary-text[chat]"),
        )


def _without_none(message: Message) -> dict[str, Any]:
    return {key: value for key, value in message.items() if value is not None}


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its reasoning under the names that templates read."""
    for name in _REASONING:
        if name in message:
            return {"thinking": message[name], **message, "reasoning_content": message[name]}
    return message


def _texts_in(value: Any) -> list[str]:
    """Return the texts of a message, except names of keys."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for item in value.values() for text in _texts_in(item)]
    if isinstance(value, list | tuple):
        return [text for item in value for text in _texts_in(item)]
    return []


def _found_in(messages: list[dict[str, Any]], tokens: Sequence[str]) -> list[str]:
    """Return the tokens that the messages spell."""
    texts = _texts_in(messages)
    return [token for token in tokens if any(token in text for text in texts)]


def _marks_for(messages: list[dict[str, Any]], tokens: list[str]) -> dict[str, str]:
    """Return a private character for each token, which no message uses."""
    used = set().union(*_texts_in(messages))
    characters = map(chr, range(_PRIVATE, _PRIVATE + 0xFFFE))
    free = (each for each in characters if each not in used)
    return {token: next(free) for token in tokens}


def _replaced(value: Any, marks: Mapping[str, str]) -> Any:
    """Return ``value`` with the first letters of tokens in its texts replaced by their marks."""
    if isinstance(value, str):
        return _pattern(tuple(marks)).sub(lambda match: marks[match[0]] + match[0][1:], value)
    if isinstance(value, Mapping):
        return {key: _replaced(item, marks) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replaced(item, marks) for item in value]
    return value


def _pattern(tokens: tuple[str, ...]) -> re.Pattern[str]:
    """Return what finds tokens in a text: the longest one that begins at a place."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
