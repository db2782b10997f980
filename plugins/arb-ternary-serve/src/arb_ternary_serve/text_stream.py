"""The text of an answer as it is drawn: whole characters, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from arb_ternary_serve.sequence import Event, Finish, TokenLogprobs
from arb_ternary_text.data.tokenizers import Tokenizer
from arb_ternary_text.models.generate import StopText, TextStream


@frozen
class Token:
    """A token of an answer, or of a prompt.

    Attributes:
        token: its id.
        offset: number of characters of the text before it.
        logprobs: its log probability and those of the likeliest tokens, if they were asked for.
    """

    token: int
    offset: int
    logprobs: TokenLogprobs | None


@frozen
class Part:
    """The part of an answer that can be shown after an event.

    Attributes:
        text: more of the text.
        tokens: the tokens of that text.
        finish: why the answer has ended; None if it goes on.
    """

    text: str
    tokens: tuple[Token, ...]
    finish: Finish | None


class AnswerText:
    """Turns the events of a sequence into text.

    Text is held back while a character is not complete, or while it may be the beginning of a stop
    string; its tokens are held back with it.

    Args:
        tokenizer: decodes the ids.
        prompt: the ids before the answer.
        stops: texts that end the answer; they are left out.
        length: characters before the answer, which offsets count from.
        with_end: whether the end token that was drawn is a token of the answer, without text.

    Attributes:
        drawn: number of tokens that were drawn.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stops: Sequence[str],
        length: int = 0,
        with_end: bool = False,
    ) -> None:
        self._with_end = with_end
        self._stream = TextStream(tokenizer, prompt)
        self._stops = StopText(stops)
        self._written = length
        self._shown = length
        self._held: list[Token] = []
        self.drawn = 0

    def push(self, event: Event) -> Part:
        """Return what can be shown after an event."""
        piece = ""
        if event.token is not None:
            self.drawn += 1
            self._held.append(Token(event.token, self._written, event.logprobs))
            piece = self._stream.push(event.token)
        elif self._with_end and event.logprobs is not None:
            self._held.append(Token(event.logprobs.token, self._written, event.logprobs))
        finish = event.finished
        if finish is not None:
            piece += self._stream.end()
        self._written += len(piece)
        text = self._stops.push(piece)
        if self._stops.found:
            finish = "stop"
        elif finish is not None:
            text += self._stops.end()
        self._shown += len(text)
        ready = [each for each in self._held if each.offset < self._shown]
        if finish is not None and not self._stops.found:
            ready = self._held
        self._held = self._held[len(ready) :]
        return Part(text, tuple(ready), finish)


def prompt_tokens(
    tokenizer: Tokenizer, prompt: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> tuple[Token, ...]:
    """Return the tokens of a prompt; the first one has no probability."""
    stream = TextStream(tokenizer, ())
    tokens = []
    offset = 0
    known: list[TokenLogprobs | None] = [None, *logprobs]
    for token, each in zip(prompt, known, strict=True):
        tokens.append(Token(token, offset, each))
        offset += len(stream.push(token))
    return tuple(tokens)


class TokenNames(dict[int, str]):
    """Texts that stand for single tokens.

    A token that is part of a character, or of no character, has no text of its own and is called
    ``token_id:N``.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> str:
        # The second of two, because some decoders leave out a space that begins a text.
        first = self._tokenizer.decode([token])
        text = self._tokenizer.decode([token, token])[len(first) :]
        self[token] = text if text and "\ufffd" not in text else f"token_id:{token}"
        return self[token]
