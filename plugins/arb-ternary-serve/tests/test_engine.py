"""Sequences together give what each gives alone, and enter, wait and leave as the engine says."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from arb_ternary.backends.select import use_backend
from arb_ternary.errors import UsageProblem
from arb_ternary_serve.engine import Engine
from arb_ternary_serve.sequence import Event, Options
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_text.models.generate import generate

VOCABULARY = 45
BACKENDS = ("torch", "cpu")
LARGE = 1 << 24
#: The modules round activations after a pass of several tokens elsewhere than after one token.
TOLERANCE = {"cpu": 1e-5, "torch": 5e-3}
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"kv_heads": 2, "activation": "swiglu", "rotary_scaling": 2.0, "query_key_norm": True},
    {"sliding_window": 21, "tie_embeddings": True, "group_size": 32},
    {"float_parts": ("embedding", "head", "norms"), "head_dim": 24},
)


def small_decoder(backend: str, dtype: torch.dtype = torch.float32, **options: Any) -> Decoder:
    """Make a decoder; skip the test if its backend is not installed."""
    if backend == "cpu" and importlib.util.find_spec("arb_ternary_cpu") is None:
        pytest.skip("arb-ternary-cpu is not installed")
    torch.manual_seed(3)
    base: dict[str, Any] = {"width": 64, "layers": 2, "heads": 4, "max_length": 150}
    with use_backend(backend):
        model = Decoder(DecoderConfig(**(base | options)), VOCABULARY)
    if dtype is not torch.float32:
        model.set_dtype(dtype)
    return model.eval()


@torch.no_grad()
def one_by_one(model: Decoder, ids: Sequence[int], numbers: Any = "float") -> Tensor:
    """Return the logits ``[S, V]`` after each id, read one at a time into a cache of its own."""
    cache = model.new_cache(1, numbers)
    return torch.cat([model(torch.tensor([[token]]), cache)[0] for token in ids])


@cache
def decoder(backend: str, kind: int, dtype: torch.dtype = torch.float32) -> Decoder:
    return small_decoder(backend, dtype, **KINDS[kind])


def run(engine: Engine) -> list[Event]:
    """Step until there is nothing to do."""
    events: list[Event] = []
    while engine.load.waiting or engine.load.running:
        events += engine.step()
    return events


def tokens_of(events: list[Event], handle: int) -> list[int]:
    return [each.token for each in events if each.handle == handle and each.token is not None]


@frozen
class Arrival:
    """A request: after how many steps it arrives, its prompt, and how many tokens it wants."""

    steps: int
    prompt: tuple[int, ...]
    new: int


@st.composite
def arrivals(draw: st.DrawFn) -> list[Arrival]:
    """Some requests, of which many begin alike."""
    beginning = draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=70, max_size=70))
    made = []
    for _ in range(draw(st.integers(1, 7))):
        own = draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=12))
        prompt = (*beginning[: draw(st.integers(0, 70))], *own)
        made.append(Arrival(draw(st.integers(0, 5)), prompt, draw(st.integers(1, 8))))
    return made


@settings(max_examples=20)
@given(
    requests=arrivals(),
    kind=st.integers(0, len(KINDS) - 1),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    numbers=st.sampled_from(["float", "bfloat16", "int8"]),
    chunk=st.integers(1, 40),
    seats=st.integers(1, 5),
    blocks=st.integers(4, 12),
)
def test_logits_are_those_of_one_sequence_and_one_id_at_a_time(
    requests: list[Arrival],
    kind: int,
    dtype: torch.dtype,
    numbers: Any,
    chunk: int,
    seats: int,
    blocks: int,
) -> None:
    model = decoder("cpu", kind, dtype)
    engine = Engine(
        model,
        max_sequences=seats,
        cache_bytes=blocks * block_bytes(model, numbers),
        chunk=chunk,
        cache=numbers,
    )
    events: list[Event] = []
    handles: dict[int, Arrival] = {}
    for request in requests:
        for _ in range(request.steps):
            events += engine.step()
        options = Options(max_new_tokens=request.new, temperature=0, logprobs=VOCABULARY)
        handles[engine.submit(request.prompt, options)] = request
    events += run(engine)

    for handle, request in handles.items():
        drawn = tokens_of(events, handle)
        assert len(drawn) == request.new
        logits = one_by_one(model, [*request.prompt, *drawn[:-1]], numbers)[-request.new :]
        assert drawn == logits.argmax(dim=-1).tolist()
        expected = logits.double().log_softmax(dim=-1)
        reported = [each.logprobs for each in events if each.handle == handle]
        for row, logprobs in zip(expected, reported, strict=True):
            assert logprobs is not None
            assert dict(logprobs.top) == dict(enumerate(row.tolist()))
    assert engine.load.free_blocks == engine.load.blocks == blocks


def block_bytes(model: Decoder, numbers: str) -> int:
    config = model.config
    float_bytes = {torch.float32: 4, torch.bfloat16: 2}[model.embed(torch.tensor([[0]])).dtype]
    value_bytes = {"float": float_bytes, "bfloat16": 2, "int8": 1}[numbers]
    row = config.key_features * value_bytes + (4 if numbers == "int8" else 0)
    return 32 * config.layers * 2 * config.key_heads * row


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", [1, 2])
def test_draws_are_those_of_generate_with_the_same_seed(backend: str, kind: int) -> None:
    model = decoder(backend, kind)
    engine = Engine(model, max_sequences=3, cache_bytes=LARGE, chunk=64)
    prompts = [[1, 2, 3], [5] * 40, [7, 8], [9] * 20]
    sampling: dict[str, Any] = {"temperature": 0.8, "top_k": 20, "top_p": 0.9}
    handles = [
        engine.submit(prompt, Options(max_new_tokens=6, seed=seed, **sampling))
        for seed, prompt in enumerate(prompts)
    ]
    events = run(engine)
    for seed, (handle, prompt) in enumerate(zip(handles, prompts, strict=True)):
        expected = list(generate(model, prompt, max_new_tokens=6, seed=seed, **sampling))
        assert tokens_of(events, handle) == expected


def test_a_model_that_is_no_plain_decoder_runs_its_modules() -> None:
    model = small_decoder("torch", experts=2)
    engine = Engine(model, cache_bytes=LARGE, chunk=8)
    handle = engine.submit([1, 2, 3], Options(max_new_tokens=6, temperature=0))
    expected = list(generate(model, [1, 2, 3], max_new_tokens=6, temperature=0))
    assert tokens_of(run(engine), handle) == expected


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_stop_id_ends_a_sequence_and_is_not_reported(backend: str) -> None:
    model = decoder(backend, 0)
    text = list(generate(model, [1, 2, 3], max_new_tokens=8, temperature=0))
    stop = text[3]
    engine = Engine(model, cache_bytes=LARGE)
    options = Options(max_new_tokens=8, temperature=0, stop=frozenset({stop}), logprobs=1)
    engine.submit([1, 2, 3], options)
    events = run(engine)
    kept = text[: text.index(stop)]
    assert [each.logprobs.token for each in events if each.logprobs] == [*kept, stop]
    assert [each.token for each in events] == [*kept, None]
    assert [each.finished for each in events] == [None] * len(kept) + ["stop"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_last_token_says_that_the_length_was_reached(backend: str) -> None:
    engine = Engine(decoder(backend, 0), cache_bytes=LARGE)
    engine.submit([1], Options(max_new_tokens=2))
    assert [each.finished for each in run(engine)] == [None, "length"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunk", [4, 64])
def test_log_probabilities_of_a_prompt(backend: str, chunk: int) -> None:
    model = decoder(backend, 0)
    prompt = list(range(1, {"cpu": 40, "torch": 12}[backend]))
    engine = Engine(model, cache_bytes=LARGE, chunk=chunk, cache="float")
    for _ in range(2):  # the second time its blocks are known
        options = Options(max_new_tokens=0, logprobs=2, prompt_logprobs_from=1)
        handle = engine.submit(prompt, options)
        (event,) = run(engine)
        assert (event.handle, event.token, event.finished) == (handle, None, "length")
        expected = one_by_one(model, prompt).double().log_softmax(dim=-1)[:-1]
        assert event.prompt_logprobs is not None
        for row, token, reported in zip(expected, prompt[1:], event.prompt_logprobs, strict=True):
            assert reported.token == token
            assert math.isclose(reported.logprob, float(row[token]), abs_tol=1e-5)
            best = row.topk(2)
            assert [each for each, _ in reported.top] == best.indices.tolist()
            assert math.isclose(reported.top[0][1], float(best.values[0]), abs_tol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunk", [7, 64])
def test_log_probabilities_of_the_end_of_a_prompt_reuse_its_beginning(
    backend: str, chunk: int
) -> None:
    model = decoder(backend, 0)
    engine = Engine(model, cache_bytes=LARGE, chunk=chunk, cache="float")
    context = [each % VOCABULARY for each in range(70)]
    for number, end in enumerate(([3, 1, 4], [1, 5], [9, 2, 6, 5])):
        prompt = [*context, *end]
        options = Options(max_new_tokens=0, logprobs=1, prompt_logprobs_from=len(context))
        engine.submit(prompt, options)
        (event,) = run(engine)
        expected = one_by_one(model, prompt[:-1]).double().log_softmax(dim=-1)[-len(end) :]
        assert event.prompt_logprobs is not None
        assert [each.token for each in event.prompt_logprobs] == end
        for row, reported in zip(expected, event.prompt_logprobs, strict=True):
            expected_one = float(row[reported.token])
            assert math.isclose(reported.logprob, expected_one, abs_tol=TOLERANCE[backend])
            assert reported.top[0][0] == int(row.argmax())
        # Blocks have 32 positions; the modules keep what the sequence before has read.
        known = {"cpu": 64, "torch": 69}[backend]
        assert engine.load.reused == number * known
        # The last id predicts nothing, so it is not read.
        assert engine.load.read == 72 + (0, 71 - known, 71 + 73 - 2 * known)[number]
    assert engine.load.free_blocks == engine.load.blocks


@pytest.mark.parametrize("backend", BACKENDS)
def test_log_probabilities_fill_the_context(backend: str) -> None:
    model = decoder(backend, 0)
    # One block less than the last id would need, which is not read.
    engine = Engine(model, cache_bytes=5 * block_bytes(model, "float"), cache="float")
    prompt = [each % VOCABULARY for each in range(151)]
    engine.submit(prompt, Options(max_new_tokens=0, logprobs=0, prompt_logprobs_from=1))
    (event,) = run(engine)
    expected = one_by_one(model, prompt[:-1]).double().log_softmax(dim=-1)
    assert event.prompt_logprobs is not None
    assert len(event.prompt_logprobs) == 150
    last = event.prompt_logprobs[-1].logprob
    assert math.isclose(last, float(expected[-1, prompt[-1]]), abs_tol=TOLERANCE[backend])
    with pytest.raises(UsageProblem, match="152 tokens, and the context 150"):
        engine.submit([*prompt, 1], Options(max_new_tokens=0))
    with pytest.raises(UsageProblem, match="room for 0 new ones, not for 1"):
        engine.submit(prompt, Options(max_new_tokens=1))


def test_sequences_together_read_a_common_beginning_once() -> None:
    model = decoder("cpu", 0)
    engine = Engine(model, cache_bytes=LARGE, chunk=50)
    prompt = [each % VOCABULARY for each in range(100)]
    options = Options(max_new_tokens=3, temperature=0)
    same = [engine.submit([*prompt, last], options) for last in (1, 2, 3)]
    other = engine.submit([7] * 20, Options(max_new_tokens=3, temperature=0))
    # The first reads, those that begin as it does wait, and another one passes them.
    assert engine.step() == []
    assert engine.load.running == 2
    events = run(engine)
    assert (engine.load.read, engine.load.reused) == (101 + 2 * 5 + 20, 2 * 96)
    for handle, last in zip(same, (1, 2, 3), strict=True):
        expected = list(generate(model, [*prompt, last], max_new_tokens=3, temperature=0))
        assert tokens_of(events, handle) == expected
    assert len(tokens_of(events, other)) == 3


@pytest.mark.parametrize("kind", [1, 2])
@pytest.mark.parametrize("numbers", ["float", "bfloat16", "int8"])
def test_modules_continue_what_the_sequence_before_has_read(kind: int, numbers: Any) -> None:
    model = decoder("torch", kind)
    engine = Engine(model, cache_bytes=LARGE, cache=numbers)
    prompts = [[*range(30), 1], [*range(30), 2, 3], [*range(20)], [40, 41], [*range(20)]]
    options = Options(max_new_tokens=4, temperature=0)
    reused = []
    for prompt in prompts:
        handle = engine.submit(prompt, options)
        drawn = list(generate(model, prompt, max_new_tokens=4, temperature=0, cache=numbers))
        assert tokens_of(run(engine), handle) == drawn
        reused.append(engine.load.reused)
    # A window drops what another sequence would need.
    assert reused == ([0] * 5 if model.sliding_window else [0, 30, 49, 49, 49])


def test_a_known_beginning_is_not_read_again() -> None:
    model = decoder("cpu", 0)
    engine = Engine(model, cache_bytes=LARGE, chunk=50)
    prompt = [each % VOCABULARY for each in range(100)]
    options = Options(max_new_tokens=10, temperature=0)
    engine.submit(prompt, options)
    first = [each.token for each in run(engine)]
    assert (engine.load.read, engine.load.reused) == (100, 0)
    engine.submit(prompt, options)
    assert [each.token for each in run(engine)] == first
    assert (engine.load.read, engine.load.reused) == (104, 96)
    # What was drawn is known, too: the next turn of a conversation begins with it.
    engine.submit([*prompt, *first, 1], options)
    run(engine)
    assert engine.load.reused == 96 + 96
    engine.submit(prompt[:64], options)  # of which one id at least is read, to go on from it
    run(engine)
    assert engine.load.reused == 96 + 96 + 32


def test_known_blocks_are_given_up_for_new_sequences() -> None:
    model = decoder("cpu", 0)
    engine = Engine(model, cache_bytes=4 * block_bytes(model, "bfloat16"))
    for turn in range(6):
        prompt = [(turn + each) % VOCABULARY for each in range(90)]
        handle = engine.submit(prompt, Options(max_new_tokens=5, temperature=0))
        drawn = tokens_of(run(engine), handle)
        assert drawn == list(generate(model, prompt, max_new_tokens=5, temperature=0))
    assert engine.load.free_blocks == engine.load.blocks == 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sequence_without_memory_waits_for_its_turn(backend: str) -> None:
    model = decoder(backend, 0)
    # The modules' caches double, so they need memory for twice the positions.
    blocks = {"cpu": 2, "torch": 3}[backend]
    engine = Engine(model, cache_bytes=blocks * block_bytes(model, "bfloat16"))
    long = Options(max_new_tokens=25)
    handles = [engine.submit([1] * 10, long), engine.submit([2] * 10, long)]
    small = engine.submit([3], Options(max_new_tokens=3))
    order = list(dict.fromkeys(each.handle for each in run(engine)))
    assert order == [*handles, small]  # the small one does not overtake
    assert engine.load.free_blocks == engine.load.blocks


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_more_sequences_run_than_there_are_seats(backend: str) -> None:
    engine = Engine(decoder(backend, 0), cache_bytes=LARGE, max_sequences=2)
    for _ in range(5):
        engine.submit([1, 2], Options(max_new_tokens=4))
    most = 0
    while engine.load.waiting or engine.load.running:
        events = engine.step()
        most = max(most, len(events), engine.load.running)
    assert most == 2


def test_a_long_prompt_delays_others_by_no_more_than_a_chunk() -> None:
    engine = Engine(decoder("cpu", 0), cache_bytes=LARGE, chunk=10)
    talking = engine.submit([1, 2], Options(max_new_tokens=30))
    engine.step()
    engine.submit([3] * 100, Options(max_new_tokens=1))
    short = engine.submit([4, 5], Options(max_new_tokens=1))
    seen = []
    for _ in range(3):
        before = engine.load.read
        events = engine.step()
        assert engine.load.read - before <= 10
        seen.append([each.handle for each in events])
    # The one that draws gets a token per step, and the short prompt its turn after one chunk.
    assert all(talking in each for each in seen)
    assert short in seen[1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_cancelled_sequence_frees_what_it_holds(backend: str) -> None:
    model = decoder(backend, 0)
    engine = Engine(model, cache_bytes=LARGE, chunk=16, max_sequences=2)
    options = Options(max_new_tokens=20, temperature=0)
    reading, drawing, waiting = (engine.submit([each] * 40, options) for each in (1, 2, 3))
    for _ in range(4):
        engine.step()
    last = engine.submit([4] * 5, options)
    for each in (waiting, reading, drawing):
        engine.cancel(each)
    assert engine.load.free_blocks == engine.load.blocks
    engine.cancel(drawing)
    events = run(engine)
    assert {each.handle for each in events} == {last}
    assert tokens_of(events, last) == list(
        generate(model, [4] * 5, max_new_tokens=20, temperature=0)
    )


def test_a_text_fills_the_context() -> None:
    engine = Engine(decoder("cpu", 0), cache_bytes=LARGE)
    # The last token is not read.
    engine.submit([1] * 140, Options(150 - 140 + 1))
    assert len(run(engine)) == 150 - 140 + 1


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        ([], Options(1), "prompt: must have at least one token"),
        ([VOCABULARY], Options(1), "prompt: token ids must be from 0 to 44, not 45"),
        ([1], Options(1, stop=frozenset({-1})), "stop: token ids must be from 0 to 44"),
        ([1], Options(1, temperature=-1), "temperature: must be"),
        ([1], Options(1, top_k=0), "top_k: must be at least 1"),
        ([1], Options(max_new_tokens=-1), "max_new_tokens: must be at least 0, not -1"),
        ([1], Options(1, logprobs=-1), "logprobs: must be at least 0"),
        ([1], Options(1, prompt_logprobs_from=1), "prompt_logprobs_from: needs logprobs"),
        ([1], Options(1, logprobs=0, prompt_logprobs_from=0), "must be at least 1, not 0"),
        ([1] * 151, Options(1), "the prompt has 151 tokens, and the context 150"),
        ([1] * 100, Options(max_new_tokens=52), "room for 51 new ones, not for 52"),
        ([1] * 90, Options(max_new_tokens=30), "need 4 blocks of keys and values, and there are 3"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(
    ids: list[int], options: Options, message: str
) -> None:
    model = decoder("cpu", 0)
    engine = Engine(model, cache_bytes=3 * block_bytes(model, "bfloat16"))
    with pytest.raises(UsageProblem, match=message):
        engine.submit(ids, options)
    assert engine.load.waiting == 0


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"cache_bytes": 100}, "cache_bytes: 100 bytes hold no block of 32 positions"),
        ({"cache_bytes": LARGE, "max_sequences": 0}, "max_sequences: must be at least 1, not 0"),
        ({"cache_bytes": LARGE, "chunk": 0}, "chunk: must be at least 1, not 0"),
        ({"cache_bytes": LARGE, "cache": "int4"}, "cache: Decoder keeps keys and values as"),
    ],
)
def test_limits_of_an_engine_are_checked(limits: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageProblem, match=message):
        Engine(decoder("torch", 0), **limits)


def test_a_text_with_a_sliding_window_has_no_limit() -> None:
    engine = Engine(decoder("cpu", 2), cache_bytes=LARGE)
    engine.submit([1] * 200, Options(max_new_tokens=5))
    assert len(run(engine)) == 5
