"""The tokens of a conversation that are learned."""

from __future__ import annotations

from typing import Any

import pytest

from arb_ternary.errors import DataError
from arb_ternary_text.chat.answers import encode_conversation
from arb_ternary_text.chat.conversations import Conversation
from arb_ternary_text.chat.template import chat_template
from arb_ternary_text.data.tokenizers import ByteTokenizer

MESSAGES = (
    {"role": "system", "content": "S"},
    {"role": "user", "content": "ask"},
    {"role": "assistant", "content": "one"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "two"},
)
GENERATION = (
    "{% for m in messages %}{{ '<a>' + m.role[0] }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<b>' }}{% endgeneration %}{% else %}{{ m.content + '<b>' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<a>a{% endif %}"
)


def learned(
    tokenizer: Any, messages: Any = MESSAGES, given: int = 0, **options: Any
) -> list[tuple[Any, ...]]:
    """Return the runs of learned tokens."""
    conversation = Conversation(messages, "here", given)
    found = encode_conversation(tokenizer, chat_template(tokenizer), conversation, **options)
    runs: list[list[int]] = [[]]
    for token, is_learned in zip(found.ids, found.learned, strict=True):
        if is_learned:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [tuple(run) for run in runs if run]


def test_answers_and_their_ends_are_learned(tokenizer: Any, make_tokenizer: Any) -> None:
    assert learned(tokenizer) == [(*b"one", 257), (*b"two", 257)]
    marking = make_tokenizer(["<a>", "<b>"], eos=(257,), chat_template=GENERATION)
    assert learned(marking) == [(*b"one", 257), (*b"two", 257)]


def test_last_turn_given_messages_and_other_roles(tokenizer: Any, make_tokenizer: Any) -> None:
    marking = make_tokenizer(["<a>", "<b>"], eos=(257,), chat_template=GENERATION)
    for each in (tokenizer, marking):
        assert learned(each, turns="last") == [(*b"two", 257)]
        assert learned(each, given=4) == [(*b"two", 257)]
    changing = "{{ messages|length }}" + GENERATION
    marking = make_tokenizer(["<a>", "<b>"], eos=(257,), chat_template=changing)
    assert learned(marking, turns="last") == learned(marking, given=4) == [(*b"two", 257)]
    assert learned(tokenizer, roles=["system"]) == [(*b"system\nS", 257)]
    assert learned(tokenizer, roles=["user"], turns="last") == [(256, *b"user\nmore", 257)]


def test_plain_text_is_learned_from_its_second_token_on(make_tokenizer: Any) -> None:
    made = make_tokenizer(["<s>", "</s>"], bos=256, eos=(257,), adds_bos=True)
    found = encode_conversation(made, None, Conversation((), "here", text="a</s>"))
    assert found.ids == [256, *b"a</s>", 257]
    assert found.learned == [False] + [True] * 6
    bare = encode_conversation(ByteTokenizer(), None, Conversation((), "here", text="ab"))
    assert (bare.ids, bare.learned) == ([97, 98], [False, True])


def chatml(**changes: str) -> str:
    """Return a template of which parts are changed."""
    parts = {"begin": "<a>", "end": "<b>", "last": "", **changes}
    return (
        f"{{% for m in messages %}}{parts['begin']}{{{{ m.role }}}}:{{{{ m.content }}}}"
        f"{parts['end']}{{% endfor %}}{{% if add_generation_prompt %}}<a>assistant:{{% else %}}"
        f"{parts['last']}{{% endif %}}"
    )


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (chatml(end="{% if loop.last %}<b>{% endif %}"), "is not prefix-preserving"),
        (chatml(begin="{{ messages|length }}<a>"), "is not prefix-preserving"),
        (
            chatml(begin="{% if messages|length < 3 %}{{ raise_exception('few') }}{% endif %}<a>"),
            "is not prefix-preserving: it writes the first 2 messages",
        ),
        (chatml(end="."), "writes no end token after message 3 .assistant"),
        (
            chatml(end="{% if m.role == 'user' %}<b>{% endif %}"),
            "writes no end token after message 3",
        ),
        (GENERATION.replace(" + '<b>' }}{% endg", " }}{% endg"), "{% generation %} has no end"),
        (
            "{% macro f(m) %}"
            + GENERATION.replace("messages", "m")
            + "{% endmacro %}{{ f(messages) }}",
            "lies within a macro",
        ),
    ],
)
def test_template_whose_answers_cannot_be_told_is_refused(
    template: str, message: str, make_tokenizer: Any
) -> None:
    made = make_tokenizer(["<a>", "<b>"], eos=(257,), chat_template=template)
    with pytest.raises(DataError, match=message):
        learned(made)


def test_text_after_the_whole_conversation_does_no_harm(make_tokenizer: Any) -> None:
    made = make_tokenizer(["<a>", "<b>", "<c>"], eos=(257,), chat_template=chatml(last="<c>"))
    assert learned(made) == [(*b"one", 257), (*b"two", 257)]


def test_tokenizer_without_ends_or_control_tokens_is_refused(make_tokenizer: Any) -> None:
    with pytest.raises(DataError, match="the tokenizer has no end token"):
        learned(make_tokenizer(["<a>", "<b>"], chat_template=chatml()))
    template = chat_template(make_tokenizer(["<a>"], chat_template=chatml()))
    with pytest.raises(DataError, match="the tokenizer has no control tokens"):
        encode_conversation(ByteTokenizer(), template, Conversation(MESSAGES, "here"))
