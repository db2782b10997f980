"""A chat template has a process of its own, which ends when it takes too long."""

from __future__ import annotations

import asyncio
from typing import Any

import attrs
import pytest

from arb_ternary_chat.model import Model
from arb_ternary_serve.problems import RequestProblem
from arb_ternary_serve.template_process import TemplateProcess
from arb_ternary_text.data.tokenizers import LanguageTokenizer

TURNS = [{"role": "user", "content": "hi </s> ä\ud7ff"}]
#: Compares lists that hold each other more often than any computer can count; the sandbox counts
#: the steps of a template, and this is one.
ENDLESS = (
    "{% set ns = namespace(x=[1], y=[1]) %}{% for _ in range(60) %}{% set ns.x = [ns.x, ns.x] %}"
    "{% set ns.y = [ns.y, ns.y] %}{% endfor %}{% if messages[0].content == 'end' %}ended"
    "{% elif ns.x == ns.y %}equal{% endif %}"
)


def with_template(model: Model, template: str) -> LanguageTokenizer:
    tokenizer = model.tokenizer
    assert isinstance(tokenizer, LanguageTokenizer)
    return attrs.evolve(tokenizer, special=attrs.evolve(tokenizer.special, chat_template=template))


def rendered(tokenizer: Any, *conversations: Any, seconds: float = 10) -> list[Any]:
    """Return what becomes of conversations: a text, or the message of an error."""

    async def all_of_them() -> list[Any]:
        process = TemplateProcess(tokenizer, seconds)
        results: list[Any] = []
        for messages in conversations:
            try:
                results.append(await process.render(messages))
            except RequestProblem as problem:
                results.append(problem.message)
        await process.stop()
        return results

    return asyncio.run(all_of_them())


def test_a_text_is_that_of_the_template(chat_model: Model) -> None:
    (text,) = rendered(chat_model.tokenizer, TURNS)
    assert text == chat_model.template.render(TURNS, add_generation_prompt=True)
    assert text.letters


def test_a_template_without_an_end_is_ended(chat_model: Model) -> None:
    tokenizer = with_template(chat_model, ENDLESS)
    end = [{"role": "user", "content": "end"}]
    first, second, third = rendered(tokenizer, end, TURNS, end, seconds=2)
    assert first.text == third.text == "ended"
    assert second == "the chat template of the model did not end within 2 seconds"


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{{ raise_exception('users only') }}", "refuses the conversation: users only"),
        ("{% if %}", "the chat template, line 1"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_a_fault_is_told(chat_model: Model, template: str, sentence: str) -> None:
    (message,) = rendered(with_template(chat_model, template), TURNS)
    assert sentence in message
