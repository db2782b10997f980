"""Chat templates: the text of a conversation, as transformers writes it (apply_chat_template)."""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import attrs

from arb_ternary.errors import DataError, EnvironmentProblem
from arb_ternary.plugins.discovery import install_command
from arb_ternary_text.data.file_tokenizers import FileTokenizer
from arb_ternary_text.data.tokenizers import Tokenizer, base_tokenizer, special_tokens, token_text

Message = Mapping[str, Any]

#: Characters and steps that a template may take: a constant, and more for each character that it is
#: given.
_WORK: Final = 5_000_000
_WORK_PER_CHARACTER: Final = 200
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


@attrs.frozen
class ChatTemplate:
    """A Jinja template that writes a conversation as text.

    Attributes:
        source: the template.
        variables: texts of special tokens by name, such as ``bos_token``.
        control_tokens: texts of the tokens that are no letters.
        name: what errors call the template.
        date: the time that ``strftime_now`` tells; None = now.
        work: characters and steps after which the template is stopped, besides 200 for each
            character of the conversation.
    """

    source: str = attrs.field(repr=lambda text: f"<{len(text)} characters>")
    variables: Mapping[str, str] = attrs.field(factory=dict)
    control_tokens: tuple[str, ...] = ()
    name: str = "the chat template"
    date: datetime | None = None
    work: int = _WORK
    _compiled: Any = attrs.field(init=False, repr=False, eq=False)

    @_compiled.default
    def _compile(self) -> tuple[Any, Any]:
        sandbox = _sandbox()
        environment = sandbox.TemplateEnvironment()
        with environment.limited(sandbox.Work(self.work + len(self.source))):
            try:
                return environment, environment.from_string(self.source)
            except Exception as error:
                raise self._fault(error) from error

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
        sandbox = _sandbox()
        environment, template = self._compiled
        characters = len(json.dumps(messages, default=str))
        work = sandbox.Work(self.work + _WORK_PER_CHARACTER * characters)
        spans = sandbox.Spans()
        pieces: list[str] = []
        with environment.limited(work, spans, self.date):
            try:
                for piece in template.generate(
                    **self.variables,
                    messages=messages,
                    tools=None,
                    documents=None,
                    add_generation_prompt=add_generation_prompt,
                ):
                    pieces.append(piece)
                    spans.length += len(piece)
                    work.check(spans.length)
            except Exception as error:
                raise self._fault(error) from error
        text = "".join(pieces)
        for start, end, written in spans.found:
            if text[start:end] != written:
                raise DataError(
                    f"{self.name}: {{% generation %}} lies within a macro, a call or a `set` "
                    f"block, so that the answers cannot be told from the rest",
                    "Move the block to the top level of the template, or remove it.",
                )
        return Rendered(text, tuple((start, end) for start, end, _ in spans.found))

    def _fault(self, error: Exception) -> DataError:
        """Return what a user reads of an error in the template, with its line."""
        line = getattr(error, "lineno", None)
        for frame in traceback.extract_tb(error.__traceback__):
            if frame.filename == "<template>":
                line = frame.lineno
        where = self.name if line is None else f"{self.name}, line {line}"
        if isinstance(error, _sandbox().RaisedError):
            return RefusedConversationError(f"{where} refuses the conversation: {error}")
        return DataError(f"{where}: {str(error) or type(error).__name__}")


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


def _sandbox() -> Any:
    """Return the module that needs jinja2."""
    try:
        from arb_ternary_text.chat import sandbox
    except ImportError as error:
        raise EnvironmentProblem(
            "chat templates need the package `jinja2`, which is not installed",
            install_command("arb-ternary-text[chat]"),
        ) from error
    return sandbox


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
