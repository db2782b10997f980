"""A fault of a chat template ends its request alone."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from arb_ternary_chat.model import Model
from arb_ternary_text.data.tokenizers import LanguageTokenizer

TURNS = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('users only') }}", "refuses the conversation: users only"),
        ("{% if %}", "the chat template, line 1"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_a_fault_is_the_clients_to_read(
    chat_model: Model, running: Any, worker_of: Any, template: str, message: str
) -> None:
    tokenizer = chat_model.tokenizer
    assert isinstance(tokenizer, LanguageTokenizer)
    special = attrs.evolve(tokenizer.special, chat_template=template)
    model = attrs.evolve(chat_model, tokenizer=attrs.evolve(tokenizer, special=special))
    failures: list[Any] = []
    worker = worker_of("chat", model, lambda *failure: failures.append(failure))
    with running([worker]) as server:
        problem = server.problem(400, "chat/completions", model="chat", messages=TURNS)
        assert message in problem["message"]
        assert problem["param"] == "messages"
        server.post("completions", model="chat", prompt="hi", max_tokens=1)
    assert not failures
