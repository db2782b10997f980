"""A conversation with a model that keeps keys and values between turns."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from attrs import define, field

from arb_ternary.errors import UsageProblem
from arb_ternary_chat.model import Model
from arb_ternary_text.chat.template import Message
from arb_ternary_text.models.generate import CachedReader


@define
class Speed:
    """Counts and times of one answer, or of all answers.

    Attributes:
        read: tokens that were read and not drawn.
        drawn: tokens that were drawn.
        drawing: seconds from the first token of an answer to its last.
        gaps: tokens that were drawn after the first of their answer.
    """

    read: int = 0
    drawn: int = 0
    drawing: float = 0.0
    gaps: int = 0

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of drawing; None before the second token of an answer."""
        return self.gaps / self.drawing if self.drawing > 0 else None

    def add(self, other: Speed) -> None:
        """Add the counts and times of ``other``."""
        self.read += other.read
        self.drawn += other.drawn
        self.drawing += other.drawing
        self.gaps += other.gaps


@define(eq=False)
class Session:
    """A conversation.

    A model without a chat template continues plain text: what is said, and what it has written
    after that.

    Attributes:
        model: the model that answers.
        system: text of the system message; None = none.
        messages: the turns after the system message.
        text: for a model without a template, the text so far.
        sampling: arguments of ``Model.stream``.
        context: largest number of tokens of a conversation, answer included; None = no limit.
        speed: counts and times of all answers.
        last: counts and times of the last answer.
        dropped: turns of the beginning that no longer fit into the context.
    """

    model: Model
    system: str | None = None
    messages: list[Message] = field(factory=list)
    text: str = ""
    sampling: Mapping[str, Any] = field(factory=dict)
    context: int | None = None
    speed: Speed = field(factory=Speed)
    last: Speed = field(factory=Speed)
    dropped: int = 0
    _reader: CachedReader = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._reader = CachedReader(self.model.causal, self.model.device)
        own = self.model.context
        if own is not None:
            self.context = own if self.context is None else min(own, self.context)

    @property
    def has_template(self) -> bool:
        """Whether the model has turns; if not, it continues plain text."""
        return self.model.special.chat_template is not None

    def reset(self) -> None:
        """Forget all turns; the system message stays."""
        self.messages.clear()
        self.text = ""
        self.dropped = 0

    def say(self, said: str) -> Iterator[str]:
        """Yield the answer to ``said`` as it is drawn.

        The turn and as much of the answer as was drawn belong to the conversation afterwards, also
        if the caller stops early.

        Raises:
            UsageProblem: the turn alone does not fit into the context.
        """
        if self.has_template:
            self.messages.append({"role": "user", "content": said})
        else:
            self.text += said
        try:
            prompt, room = self._fitting_prompt()
        except BaseException:
            if self.has_template:
                self.messages.pop()
            else:
                self.text = self.text[: len(self.text) - len(said)]
            raise
        yield from self._answer(prompt, room)

    def conversation(self) -> list[Message]:
        """Return all messages, the system message first."""
        system: list[Message] = []
        if self.system is not None:
            system = [{"role": "system", "content": self.system}]
        return [*system, *self.messages]

    def _answer(self, prompt: str | list[Message], room: int) -> Iterator[str]:
        speed = Speed()
        ids = self.model.encode(prompt)
        times: list[float] = []

        def observe(_token: int) -> None:
            times.append(time.perf_counter())

        options = dict(self.sampling)
        options["max_new_tokens"] = min(options.get("max_new_tokens", room), room)
        pieces: list[str] = []
        before = len(self._reader.seen)
        try:
            stream = self.model.stream(prompt, reader=self._reader, observe=observe, **options)
            speed.read = len(ids) - min(before, len(self._reader.seen))
            for piece in stream:
                pieces.append(piece)
                yield piece
        finally:
            answer = "".join(pieces)
            if self.has_template:
                self.messages.append({"role": "assistant", "content": answer})
            else:
                self.text += answer
            speed.drawn = len(times)
            if times:
                speed.drawing = times[-1] - times[0]
                speed.gaps = len(times) - 1
            self.last = speed
            self.speed.add(speed)

    def _fitting_prompt(self) -> tuple[str | list[Message], int]:
        """Return what the model reads, and the number of tokens that fit after it.

        The oldest turns are left out until a quarter of the context is free for the answer.
        """
        limit = self.context
        if not self.has_template:
            room = 1 << 30 if limit is None else max(1, limit)
            return self.text, room
        turns = self.conversation()
        first = 0 if self.system is None else 1
        if limit is None:
            return turns, 1 << 30
        while True:
            kept = [*turns[:first], *turns[first + self.dropped :]]
            used = len(self.model.encode(kept))
            if used <= limit - limit // 4:
                return kept, limit - used
            if len(kept) - first <= 1:
                if used < limit:
                    return kept, limit - used
                raise UsageProblem(
                    f"the turn has {used} tokens with its template, and the context {limit}",
                    "Say it in fewer words.",
                )
            # A turn and its answer go together: templates want a user first.
            self.dropped += 2
