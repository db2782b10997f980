"""The client of OpenAI reads what the server writes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from arb_ternary_chat.model import Model

openai = pytest.importorskip("openai")
http = pytest.importorskip("httpx2")

TURNS = [{"role": "user", "content": "hi"}]
Running = Any


@pytest.fixture(scope="module")
def client(both: Running) -> Iterator[Any]:
    transport = http.HTTPTransport(uds=both.path)
    with openai.OpenAI(
        base_url="http://localhost/v1",
        api_key="none",
        http_client=http.Client(transport=transport, timeout=60),
        max_retries=0,
    ) as made:
        yield made


def test_answers(client: Any, chat_model: Model) -> None:
    expected = chat_model.generate(TURNS, temperature=0, max_new_tokens=12)
    options = {"model": "chat", "messages": TURNS, "temperature": 0, "max_completion_tokens": 12}
    whole = client.chat.completions.create(**options, logprobs=True, top_logprobs=3)
    assert whole.choices[0].message.content == expected
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
    assert len(whole.choices[0].logprobs.content[0].top_logprobs) == 3
    chunks = list(
        client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        )
    )
    deltas = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    assert "".join(filter(None, deltas)) == expected
    assert chunks[-1].usage == whole.usage


def test_completions_and_models(client: Any, pairs_model: Model) -> None:
    assert [model.id for model in client.models.list()] == ["chat", "pairs"]
    assert client.models.retrieve("pairs").id == "pairs"
    expected = [
        pairs_model.generate(prompt, temperature=0, max_new_tokens=9) for prompt in ("a", "the")
    ]
    options = {"model": "pairs", "prompt": ["a", "the"], "temperature": 0, "max_tokens": 9}
    answer = client.completions.create(**options)
    assert [choice.text for choice in answer.choices] == expected
    texts = ["", ""]
    for chunk in client.completions.create(**options, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == expected


def test_errors_are_those_of_the_client(client: Any) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="nobody", prompt="a")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="chat", messages=TURNS, top_p=7)
    assert wrong.value.param == "top_p"
