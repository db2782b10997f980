"""The tokens of a conversation that a model learns: the assistant's, and those that end them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

import attrs

from arb_ternary.errors import DataError
from arb_ternary_text.chat.conversations import Conversation
from arb_ternary_text.chat.template import (
    ChatTemplate,
    Message,
    RefusedConversationError,
    Rendered,
)
from arb_ternary_text.data.file_tokenizers import FileTokenizer
from arb_ternary_text.data.tokenizers import (
    Tokenizer,
    base_tokenizer,
    encode_prompt,
    special_tokens,
)

#: Which of the assistant's turns are learned.
Turns = Literal["all", "last"]
#: First character and end of a part of a text.
Span = tuple[int, int]


@attrs.frozen
class EncodedConversation:
    """A conversation as tokens.

    Attributes:
        ids: token ids.
        learned: whether each is learned; never the first one, which nothing precedes.
    """

    ids: list[int]
    learned: list[bool]


def encode_conversation(
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    conversation: Conversation,
    *,
    turns: Turns = "all",
    roles: Collection[str] = ("assistant",),
) -> EncodedConversation:
    """Return the tokens of a conversation, and which of them are learned.

    All of a plain text is learned; it begins with BOS if the model adds it, and ends with EOS if
    there is one. Tokens of a message are learned with the token that ends it.

    Args:
        tokenizer: the tokenizer, of a file of the package ``tokenizers`` for messages.
        template: writes messages as text; a conversation that is a plain text needs none.
        conversation: the conversation.
        turns: which of the turns of ``roles`` are learned.
        roles: whose messages are learned.

    Raises:
        RefusedConversationError: the template does not write such a conversation.
        DataError: it cannot be told what the assistant writes, or the end token is not learned.
    """
    if conversation.text is not None:
        return _encode_text(tokenizer, conversation.text)
    if template is None:
        raise DataError("a conversation needs a chat template")
    rendered = template.render(conversation.messages)
    ids, offsets = encode_rendered(tokenizer, rendered)
    ends = special_tokens(tokenizer).eos
    if not ends:
        raise DataError(
            "the tokenizer has no end token, so that a model cannot learn to end its answers",
            "Take a tokenizer.json whose special tokens have `eos`.",
        )
    learned = _learned(template, conversation, rendered, ids, offsets, ends, turns, roles)
    learned[0] = False
    return EncodedConversation(ids, learned)


def encode_rendered(tokenizer: Tokenizer, rendered: Rendered) -> tuple[list[int], list[Span]]:
    """Return the ids of a rendered conversation, and the part of its text that each stands for.

    Letters that somebody typed are letters, also if they spell a control token.

    Raises:
        DataError: the tokenizer has no control tokens, or cannot encode the text.
    """
    base = base_tokenizer(tokenizer)
    if not isinstance(base, FileTokenizer):
        raise DataError(
            "the tokenizer has no control tokens, which conversations need",
            "Take the tokenizer.json of a model that can chat, or data of the key `text`.",
        )
    if rendered.letters:
        return base.encode_apart(rendered.text, rendered.letters)
    return base.encode_offsets(rendered.text)


def tokens_in(spans: Sequence[Span], offsets: Sequence[Span]) -> list[bool]:
    """Return which tokens lie in one of the spans, at least in part.

    Args:
        spans: parts of the text, in order.
        offsets: the part of the text that each token stands for, in order.
    """
    inside = [False] * len(offsets)
    number = 0
    for index, (start, end) in enumerate(offsets):
        while number < len(spans) and start >= spans[number][1]:
            number += 1
        if number == len(spans):
            break
        inside[index] = end > spans[number][0]
    return inside


def _encode_text(tokenizer: Tokenizer, text: str) -> EncodedConversation:
    ids = [*encode_prompt(tokenizer, text), *special_tokens(tokenizer).eos[:1]]
    return EncodedConversation(ids, [index > 0 for index in range(len(ids))])


def _learned(
    template: ChatTemplate,
    conversation: Conversation,
    rendered: Rendered,
    ids: list[int],
    offsets: list[Span],
    ends: Sequence[int],
    turns: Turns,
    roles: Collection[str],
) -> list[bool]:
    """Return which tokens of a conversation are learned."""
    messages = conversation.messages
    indices = [
        index
        for index, message in enumerate(messages)
        if message["role"] in roles and index >= conversation.given
    ]
    if turns == "last":
        indices = indices[-1:]
    if not indices:
        return [False] * len(ids)

    if template.marks_answers and set(roles) == {"assistant"}:
        spans: list[Span] = list(rendered.generated)
        answers = [
            index for index, message in enumerate(messages) if message["role"] == "assistant"
        ]
        if len(spans) == len(answers):
            pairs = zip(spans, answers, strict=True)
            spans = [span for span, index in pairs if index in indices]
        elif indices != answers:
            begin = _beginning(template, messages, indices[0], rendered.text)
            spans = [span for span in spans if span[1] > begin]
        learned = tokens_in(spans, offsets)
        in_last = tokens_in(spans[-1:], offsets)
        if not any(each and ids[index] in ends for index, each in enumerate(in_last)):
            raise DataError(
                f"{template.name}: {{% generation %}} has no end token, so that a model would not "
                f"learn to end its answers",
                "Move {% endgeneration %} behind the end token, or set eos of the tokenizer.",
            )
        return learned

    learned = [False] * len(ids)
    for index in indices:
        begin = _beginning(template, messages, index, rendered.text)
        inside = tokens_in([(begin, len(rendered.text))], offsets)
        places = [place for place, each in enumerate(inside) if each]
        last = next((place for place in places if ids[place] in ends), None)
        if last is None or not _ends_at(
            template, messages, index, rendered.text[: offsets[last][1]]
        ):
            raise DataError(
                f"{template.name} writes no end token after message {index + 1} "
                f"({messages[index]['role']}), so that a model would not learn to end it",
                "Take a template that ends messages by an end token, or set eos of the tokenizer.",
            )
        learned[places[0] : last + 1] = [True] * (last + 1 - places[0])
    return learned


def _beginning(template: ChatTemplate, messages: Sequence[Message], index: int, text: str) -> int:
    """Return the character of the whole text at which message ``index`` begins.

    What announces an answer is not part of it.
    """
    if index == 0:
        return 0
    prompt = messages[index]["role"] == "assistant"
    before = _render_first(template, messages, index, prompt=prompt)
    if not text.startswith(before):
        raise _not_prefix_preserving(template, index)
    return len(before)


def _ends_at(template: ChatTemplate, messages: Sequence[Message], index: int, ended: str) -> bool:
    """Return whether message ``index`` has ended with the text ``ended``, and not a later one."""
    if index + 1 == len(messages):
        return True
    alone = _render_first(template, messages, index + 1, prompt=False)
    if not alone.startswith(ended) and not ended.startswith(alone):
        raise _not_prefix_preserving(template, index + 1)
    return len(ended) <= len(alone)


def _render_first(
    template: ChatTemplate, messages: Sequence[Message], count: int, *, prompt: bool
) -> str:
    """Return the text of the first messages alone."""
    try:
        return template.render(messages[:count], add_generation_prompt=prompt).text
    except RefusedConversationError as error:
        raise _not_prefix_preserving(template, count) from error


def _not_prefix_preserving(template: ChatTemplate, count: int) -> DataError:
    return DataError(
        f"{template.name} is not prefix-preserving: it writes the first {count} messages of a "
        f"conversation differently if others follow, so that the answers cannot be told from the "
        f"rest",
        "Take a template that marks answers by {% generation %}; or learn only the last answer "
        "(turns: last).",
    )
