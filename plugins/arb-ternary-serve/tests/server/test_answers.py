"""Answers are those of the commands and of the model's logits, whole and in a stream."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from arb_ternary.cli.main import main
from arb_ternary_chat.model import Model
from arb_ternary_text.models.generate import CachedReader

#: A running server, of the file conftest.py.
Running = Any

PROMPT = "the cat"
TURNS = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi </s>"}]


def log_probabilities(model: Model, ids: list[int]) -> Any:
    """Return those of the tokens that follow each id, computed by numpy: float64 ``[S, V]``."""
    reader = CachedReader(model.causal, model.device)
    logits = reader.logits(ids).double().numpy()
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def test_a_completion_is_what_generate_prints(
    both: Running, pairs_run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for options, asked in (
        (["--temperature", "0"], {"temperature": 0}),
        (
            ["--seed", "7", "--top-k", "40", "--top-p", "0.9"],
            {"seed": 7, "top_k": 40, "top_p": 0.9},
        ),
    ):
        assert main(["generate", str(pairs_run), "--prompt", PROMPT, *options]) == 0
        printed = capsys.readouterr().out
        answer = both.post("completions", model="pairs", prompt=PROMPT, max_tokens=200, **asked)
        assert PROMPT + answer["choices"][0]["text"] + "\n" == printed


def test_an_answer_is_that_of_the_model(both: Running, chat_model: Model) -> None:
    expected = chat_model.generate(TURNS, temperature=0, max_new_tokens=40)
    parts = [{"role": "developer", "content": [{"type": "text", "text": "be brief"}]}, TURNS[1]]
    for messages in (TURNS, parts):
        answer = both.post("chat/completions", messages=messages, temperature=0, max_tokens=40)
        assert answer["object"] == "chat.completion"
        choice = answer["choices"][0]
        assert choice["message"] == {"role": "assistant", "content": expected, "refusal": None}
        assert answer["usage"]["prompt_tokens"] == len(chat_model.encode(TURNS))


def test_lists_of_prompts_and_several_answers_are_those_of_each_alone(both: Running) -> None:
    prompts = ["the", "a cat", "on"]
    common = {"model": "pairs", "max_tokens": 12}
    together = both.post("completions", prompt=prompts, n=2, seed=5, **common)
    texts = [choice["text"] for choice in together["choices"]]
    assert [choice["index"] for choice in together["choices"]] == list(range(6))
    alone = [
        both.post("completions", prompt=prompt, seed=seed, **common)["choices"][0]["text"]
        for prompt in prompts
        for seed in (5, 6)
    ]
    assert texts == alone
    assert together["usage"]["completion_tokens"] == 6 * 12


def test_ids_are_read_as_they_are(both: Running, pairs_model: Model) -> None:
    ids = pairs_model.encode("the cat")
    common = {"model": "pairs", "max_tokens": 5, "temperature": 0, "echo": True}
    expected = both.post("completions", prompt="the cat", **common)["choices"][0]["text"]
    for prompt in (ids, [ids]):
        answer = both.post("completions", prompt=prompt, **common)
        assert answer["choices"][0]["text"] == expected
    assert expected.startswith("the cat")


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_stream_has_what_a_whole_answer_has(both: Running, temperature: int) -> None:
    common = {"n": 2, "seed": 3, "max_tokens": 30, "temperature": temperature, "stop": ["\n", "th"]}
    body: dict[str, Any] = {"model": "pairs", "prompt": ["a", "b"], "logprobs": 2, "echo": True}
    whole = both.post("completions", **body, **common)
    events = both.stream("completions", **body, **common, stream_options={"include_usage": True})
    *events, last = events
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    for choice in whole["choices"]:
        own = [e["choices"][0] for e in events if e["choices"][0]["index"] == choice["index"]]
        assert "".join(each["text"] for each in own) == choice["text"]
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        for name, values in choice["logprobs"].items():
            assert [value for each in own for value in each["logprobs"][name]] == values


def test_a_stream_of_a_chat_has_what_a_whole_answer_has(both: Running) -> None:
    common = {"messages": TURNS, "seed": 3, "max_tokens": 30, "logprobs": True, "top_logprobs": 2}
    whole = both.post("chat/completions", **common)["choices"][0]
    events = both.stream("chat/completions", **common)
    deltas = [event["choices"][0] for event in events]
    assert deltas[0]["delta"] == {"role": "assistant", "content": ""}
    assert (
        "".join(each["delta"].get("content", "") for each in deltas)
        == (whole["message"]["content"])
    )
    assert deltas[-1]["finish_reason"] == whole["finish_reason"]
    found = [each["logprobs"]["content"] for each in deltas if each["logprobs"]]
    assert [entry for content in found for entry in content] == whole["logprobs"]["content"]
    assert len(whole["logprobs"]["content"]) == 30


def test_log_probabilities_are_those_of_the_logits(both: Running, pairs_model: Model) -> None:
    ids = pairs_model.encode(PROMPT)
    answer = both.post(
        "completions", model="pairs", prompt=PROMPT, max_tokens=4, temperature=0, logprobs=3,
        echo=True,
    )["choices"][0]  # fmt: skip
    drawn: list[int] = []
    for _ in range(4):
        drawn.append(int(log_probabilities(pairs_model, [*ids, *drawn])[-1].argmax()))
    expected = log_probabilities(pairs_model, [*ids, *drawn])
    reported = answer["logprobs"]
    assert reported["token_logprobs"][0] is None
    assert reported["top_logprobs"][0] is None
    for position, token in enumerate([*ids, *drawn][1:], 1):
        row = expected[position - 1]
        assert reported["token_logprobs"][position] == pytest.approx(row[token], abs=1e-4)
        top = sorted(reported["top_logprobs"][position].values(), reverse=True)
        assert top == pytest.approx(np.sort(row)[::-1][:3], abs=1e-4)
    assert reported["tokens"][: len(ids)] == ["th", "e", " ", "c", "at"]
    assert reported["text_offset"][: len(ids)] == [0, 2, 3, 4, 5]


def test_a_prompt_alone_is_scored(both: Running, pairs_model: Model) -> None:
    body = {"model": "pairs", "prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 1}
    answer = both.post("completions", **body)
    choice = answer["choices"][0]
    assert choice["text"] == PROMPT
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    ids = pairs_model.encode(PROMPT)
    row = log_probabilities(pairs_model, ids)
    expected = [row[place, token] for place, token in enumerate(ids[1:])]
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(expected, abs=1e-4)


def test_a_stop_text_is_never_shown_nor_half_of_it(both: Running) -> None:
    common: dict[str, Any] = {"model": "pairs", "prompt": PROMPT, "seed": 11, "temperature": 2}
    common |= {"max_tokens": 120, "logprobs": 0}
    full = both.post("completions", **common)["choices"][0]
    assert full["finish_reason"] == "length"
    text = full["text"]
    places = [20, 41, 60]
    stops = [text[place : place + 5] for place in places]
    for stop in [stops[:1], stops[1:2], stops, "no such text"]:
        wanted = [stop] if isinstance(stop, str) else stop
        ends = [text.find(each) for each in wanted if each in text]
        expected = text[: min(ends)] if ends else text
        answer = both.post("completions", stop=stop, **common)["choices"][0]
        assert answer["text"] == expected
        assert answer["finish_reason"] == ("stop" if ends else "length")
        assert all(offset < len(expected) for offset in answer["logprobs"]["text_offset"])
        shown = ""
        for event in both.stream("completions", stop=stop, **common):
            shown += event["choices"][0]["text"]
            assert expected.startswith(shown)
        assert shown == expected


def test_the_default_is_as_many_tokens_as_fit(both: Running, chat_model: Model) -> None:
    used = len(chat_model.encode(TURNS))
    answer = both.post("chat/completions", messages=TURNS, seed=1)
    choice = answer["choices"][0]
    if choice["finish_reason"] == "length":
        assert used + answer["usage"]["completion_tokens"] == chat_model.context + 1
    short = both.post("completions", model="pairs", prompt="a", seed=1)
    assert short["usage"]["completion_tokens"] <= 16
    exact = both.post("chat/completions", messages=TURNS, max_completion_tokens=3, seed=1)
    assert exact["usage"]["completion_tokens"] <= 3


def test_models_are_listed_and_chosen_by_name(both: Running, pairs_model: Model) -> None:
    listed = both.client.get("/v1/models").json()
    assert [each["id"] for each in listed["data"]] == ["chat", "pairs"]
    assert both.client.get("/v1/models/pairs").json() == listed["data"][1]
    assert both.client.get("/v1/models/pair").json()["error"]["code"] == "model_not_found"
    greedy = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0}
    by_name = {
        name: both.post("completions", model=name, **greedy)["choices"][0]["text"]
        for name in ("chat", "pairs")
    }
    assert both.post("completions", **greedy)["choices"][0]["text"] == by_name["chat"]
    assert by_name["pairs"] == pairs_model.generate(PROMPT, temperature=0, max_new_tokens=20)


def test_a_stop_text_ends_its_answer_and_not_the_others(both: Running) -> None:
    common: dict[str, Any] = {"model": "pairs", "prompt": ["a", "b"], "seed": 4, "temperature": 2}
    common["max_tokens"] = 100
    first, second = (each["text"] for each in both.post("completions", **common)["choices"])
    stop = first[10:16]
    assert stop not in second
    before = both.workers["pairs"].load.drawn
    stopped = both.post("completions", **common, stop=stop)
    texts = [each["text"] for each in stopped["choices"]]
    assert texts == [first[: first.index(stop)], second]
    assert both.workers["pairs"].load.drawn - before < 150
