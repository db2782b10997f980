"""A token of a decoder in one native call, beside the modules of that decoder, which torch runs one
by one.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from attrs import frozen
from torch import Tensor

from arb_ternary.backends.select import use_backend
from arb_ternary_cpu.backend import build
from arb_ternary_cpu.isa import usable_isas
from arb_ternary_text.models import native_decode
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_text.models.generate import generate
from arb_ternary_text.models.trit_vector import TritVector

# For each instruction set.
pytestmark = pytest.mark.sampled("native")

VOCABULARY = 45
FLOATS = ("embedding", "head", "norms")
#: Kinds of norms, gains, heads, embeddings and activations; sizes that are no multiples of 16, or
#: of a group.
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"kv_heads": 2, "activation": "swiglu", "head_dim": 24, "rotary_scaling": 2.0},
    {"architecture": "bitnet", "learned_norms": True, "inner_gains": True, "group_size": 32},
    {
        "architecture": "qwen3",
        "kv_heads": 1,
        "inner_gains": True,
        "float_parts": ("embedding", "norms"),
    },
    {"tie_embeddings": True, "logit_scale": -2, "residual_scale": -1, "sliding_window": 5},
    {"tie_embeddings": True, "float_parts": FLOATS, "rotary_factors": tuple(range(1, 9))},
    {
        "width": 20,
        "heads": 5,
        "head_dim": 6,
        "feed_forward": 7,
        "linear_scales": True,
        "stored_eps": True,
    },
    {"width": 144, "feed_forward": 300, "head_dim": 160, "group_size": "row"},
    {"row_scales": True, "feed_forward": 150, "residual_scale": -1, "logit_scale": 1},
    {
        "row_scales": True,
        "vector_trits": 8,
        "learned_norms": True,
        "inner_gains": True,
        "stored_eps": True,
    },
)


class Counted:
    """A backend that counts the steps that its kernel takes, and may be told to take none."""

    def __init__(self, isa: str | None) -> None:
        self.isa = isa
        self.kernels = dict(build(isa).kernels)
        self.prepare: Callable[..., Any] = self.kernels["text.decode_step"]
        self.kernels["text.decode_step"] = self.counting
        self.steps = 0
        self.interrupted: int | None = None

    def counting(self, plan: Any) -> Any:
        step = self.prepare(plan)

        def one(*arguments: Any) -> Any:
            self.steps += 1
            result = step(*arguments)
            if self.steps == self.interrupted:
                # which Python hears of when a native call is over
                signal.raise_signal(signal.SIGINT)
            return result

        return None if step is None else one


@pytest.fixture(params=usable_isas())
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Counted:
    """Steps by the kernel of each instruction set."""
    return counted(monkeypatch, request.param)


@pytest.fixture
def best(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """Steps by the kernel of the best instruction set."""
    return counted(monkeypatch, None)


def counted(monkeypatch: pytest.MonkeyPatch, isa: str | None) -> Counted:
    made = Counted(isa)
    monkeypatch.setattr(native_decode, "get_backend", lambda _: made)
    return made


def decoder(dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    torch.manual_seed(len(options))
    base: dict[str, Any] = {"width": 64, "layers": 2, "heads": 4, "max_length": 40}
    with use_backend("cpu"):
        model = Decoder(DecoderConfig(**(base | options)), VOCABULARY)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "row_scale")):
                parameter.uniform_(0.5, 1.5)
        for module in model.modules():
            if isinstance(module, TritVector):
                module.set_trits(torch.randint(-1, 2, module.trits().shape).to(torch.int8))
    if dtype is not torch.float32:
        model.set_dtype(dtype)
    return model.eval()


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(
        0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(length)
    )


@torch.no_grad()
def decoded(model: Any, ids: Tensor, prompt: int = 4) -> Tensor:
    """Logits ``[B, S - prompt, V]`` of one token after another, behind a prompt that is read at
    once.
    """
    cache = model.new_cache(ids.size(0))
    model(ids[:, :prompt], cache)
    return torch.cat([model(token, cache) for token in ids[:, prompt:].split(1, dim=1)], dim=1)


@frozen
class Distance:
    """How far steps are from those of the modules.

    Both compute in float32 and add in different orders: a product of K terms is off by at most K
    roundings of its terms, sqrt(K) of it; a layer has six of them, each followed by a norm that
    keeps relative errors, and an activation that at most doubles them. Only where an entry lies
    that close to the middle of two integers does its rounding to int8 turn the other way, which
    moves it by one of 127 steps.
    """

    relative: Tensor

    def close(self, longest: int, layers: int) -> bool:
        rounding = layers * 6 * 2 * longest**1.5 * torch.finfo(torch.float32).eps
        return bool(self.relative.amax() < 8 / 127 and self.relative.quantile(0.75) < rounding)


def distance(steps: Tensor, expected: Tensor) -> Distance:
    largest = expected.float().abs().amax(dim=-1)
    return Distance(((steps.float() - expected.float()).abs().amax(dim=-1) / largest).flatten())


@pytest.mark.parametrize("options", VARIANTS, ids=lambda options: "-".join(options) or "default")
def test_a_step_gives_the_logits_of_the_modules(
    native: Counted, options: dict[str, Any], by_modules: Callable[[Any], Any]
) -> None:
    model = decoder(**options)
    ids = tokens(3, 14)
    steps = decoded(model, ids)
    expected = decoded(by_modules(model), ids)
    assert native.steps == 10
    assert steps.dtype == expected.dtype == torch.float32
    assert distance(steps, expected).close(max(model.config.hidden, model.config.width), 2)


def test_long_context_beyond_a_multiple_of_sixteen(
    native: Counted, by_modules: Callable[[Any], Any]
) -> None:
    model = decoder(max_length=400, head_dim=36, kv_heads=2)
    ids = tokens(1, 330)
    assert distance(decoded(model, ids, 310), decoded(by_modules(model), ids, 310)).close(400, 2)
    assert native.steps == 20


@pytest.mark.parametrize("options", [VARIANTS[0], VARIANTS[5]], ids=["pure", "float embedding"])
def test_bfloat16_is_as_close_to_float32_as_the_modules(
    native: Counted, options: dict[str, Any], by_modules: Callable[[Any], Any]
) -> None:
    model = decoder(torch.bfloat16, **options)
    ids = tokens(2, 14)
    steps = decoded(model, ids)
    modules = decoded(by_modules(model), ids)
    model.set_dtype(torch.float32)  # the weights keep what they have been rounded to
    exact = decoded(by_modules(model), ids)
    assert native.steps == 10
    assert steps.dtype == torch.bfloat16
    assert distance(steps, exact).relative.mean() < 1.5 * distance(modules, exact).relative.mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_keys_and_values_of_a_step_are_those_of_the_modules(
    native: Counted, dtype: torch.dtype, by_modules: Callable[[Any], Any]
) -> None:
    model = decoder(dtype, kv_heads=2, query_key_norm=True)
    ids = tokens(2, 6)
    caches = [model.new_cache(2), model.new_cache(2)]
    with torch.no_grad():
        for cache, runs in zip(caches, (model, by_modules(model)), strict=True):
            for token in ids.split(1, dim=1):
                runs(token, cache)
    assert native.steps == 6
    assert caches[0].length == caches[1].length == 6
    for mine, theirs in zip(caches[0].layers[:1], caches[1].layers[:1], strict=True):
        for stored, expected in zip(mine.stored, theirs.stored, strict=True):
            # What enters the first layer is the same; the modules round to the dtype after each
            # operation.
            bound = 16 * torch.finfo(dtype).eps * float(expected.abs().amax())
            torch.testing.assert_close(stored[:, :, :6], expected[:, :, :6], rtol=0, atol=bound)


def test_a_batch_gives_the_bits_of_its_sequences(native: Counted) -> None:
    model = decoder(kv_heads=2, activation="swiglu")
    ids = tokens(9, 8)
    together = decoded(model, ids)
    alone = torch.cat([decoded(model, row) for row in ids.split(1)])
    # The prompt is read by the modules, whose attention over a batch may round otherwise than that
    # over one sequence.
    assert native.steps == 4 * 10
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)
    fresh = (
        decoded(model, ids[:, :5], 1),
        torch.cat([decoded(model, row, 1) for row in ids[:, :5].split(1)]),
    )
    assert torch.equal(*fresh)


def test_the_number_of_threads_changes_no_bit(
    native: Counted, threads: Callable[[int], None]
) -> None:
    # large enough for several threads
    model = decoder(width=512, feed_forward=1400, layers=3, heads=8)
    ids = tokens(2, 7)
    results = []
    for count in (1, 2, 3, 5):
        threads(count)
        results.append(decoded(model, ids, 1))
    assert native.steps == 4 * 7  # the prompt of one token too
    assert all(torch.equal(results[0], other) for other in results)


@pytest.fixture(scope="module")
def shared_work() -> Any:
    """A decoder whose steps are large enough for several threads."""
    return decoder(width=512, feed_forward=1400, layers=3, heads=8)


def text(model: Any) -> Iterator[int]:
    return generate(model, [1], max_new_tokens=12, temperature=0.0)


def test_texts_that_are_abandoned_leave_the_next_one_its_tokens(
    best: Counted, shared_work: Any, threads: Callable[[int], None]
) -> None:
    threads(1)
    expected = list(text(shared_work))
    kept = []
    for turn in range(60):
        tokens = text(shared_work)
        taken = []
        for count in range(turn % 7):
            threads(1 + (turn + count) % 4)
            taken.append(next(tokens))
        assert taken == expected[: turn % 7]
        if turn % 3 == 0:
            tokens.close()
        elif turn % 3 == 1:
            kept.append((tokens, turn % 7))  # in the middle of its text while others begin
    for tokens, count in kept:
        assert list(tokens) == expected[count:]
    assert best.steps > 200


def test_interrupt_leaves_the_tokens_of_the_next_text(
    best: Counted, shared_work: Any, threads: Callable[[int], None]
) -> None:
    threads(2)
    expected = list(text(shared_work))

    class Interrupts:
        """Stops nothing, and interrupts at the fourth token."""

        asked = 0

        def __contains__(self, token: object) -> bool:
            self.asked += 1
            if self.asked == 4:
                signal.raise_signal(signal.SIGINT)
            return False

        def __iter__(self) -> Iterator[int]:
            return iter(())

        def __len__(self) -> int:
            return 0

    with pytest.raises(KeyboardInterrupt):
        list(generate(shared_work, [1], max_new_tokens=12, temperature=0.0, stop=Interrupts()))
    assert list(text(shared_work)) == expected
    for within in range(1, 12):
        taken: list[int] = []
        best.interrupted = best.steps + within
        with pytest.raises(KeyboardInterrupt):
            taken.extend(text(shared_work))
        assert taken == expected[: within - 1]
    assert list(text(shared_work)) == expected


def test_a_text_goes_on_in_a_forked_child_and_in_its_parent(
    best: Counted, shared_work: Any, threads: Callable[[int], None]
) -> None:
    threads(2)
    expected = list(text(shared_work))
    for already in (2, 5):
        tokens = text(shared_work)
        assert list(islice(tokens, already)) == expected[:already]
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            signal.alarm(60)  # rather than hang
            try:
                os.write(writer, bytes(tokens))
            finally:
                os._exit(0)
        os.close(writer)
        assert list(tokens) == expected[already:]
        answer = os.read(reader, 64)
        os.close(reader)
        assert os.waitpid(child, 0)[1] == 0
        assert list(answer) == expected[already:]


def test_texts_of_several_threads_at_once_are_those_of_one(
    best: Counted, shared_work: Any, threads: Callable[[int], None]
) -> None:
    threads(2)
    expected = list(text(shared_work))
    texts: list[list[int]] = []
    together = [
        threading.Thread(target=lambda: texts.append(list(text(shared_work)))) for _ in range(3)
    ]
    for one in together:
        one.start()
    for one in together:
        one.join()
    assert texts == [expected] * 3


def test_greedy_text_is_that_of_the_modules(
    best: Counted, by_modules: Callable[[Any], Any]
) -> None:
    model = decoder(layers=3, activation="swiglu", kv_heads=2)
    # Likeliest tokens of random weights are no close calls: their logits have unit variance.
    texts = [
        list(generate(runs, [1, 2, 3], max_new_tokens=30, temperature=0.0))
        for runs in (model, by_modules(model))
    ]
    assert best.steps == 29
    assert texts[0] == texts[1]


def test_a_step_follows_weights_that_learn_in_place(
    best: Counted, by_modules: Callable[[Any], Any]
) -> None:
    model = decoder(learned_norms=True)
    ids = tokens(1, 12)
    cache = model.new_cache(1)
    with torch.no_grad():
        model(ids[:, :1], cache)
        before = model(ids[:, 1:2], cache)
        for module in (
            model.blocks[0].attention.value,
            model.blocks[1].feed_forward.norm,
            model.head,
        ):
            module.exponent += 1
        model.blocks[0].feed_forward.up.set_trits(-model.blocks[0].feed_forward.up.trits())
        steps = model(ids[:, 2:3], cache)
        twin = model.new_cache(1)
    assert best.steps == 3
    with torch.no_grad():
        fresh = decoded(model, ids[:, :3], 1)[:, -1:]
        again = by_modules(model)(ids[:, :3], twin)[:, -1:]
    assert not torch.equal(before, steps)
    # Keys and values of the first two positions are those of the weights before.
    assert not torch.equal(steps, fresh)
    assert distance(fresh, again).close(256, 2)


def test_exponents_beyond_32_bit_sums_use_the_modules(
    native: Counted, by_modules: Callable[[Any], Any]
) -> None:
    model = decoder(group_size=32)
    ids = tokens(2, 8)
    down = model.blocks[1].feed_forward.down
    down.exponent[3, 1] -= 30
    steps = decoded(model, ids)
    expected = decoded(by_modules(model), ids)
    assert native.steps == 1  # tried once
    assert torch.equal(steps, expected)


def test_more_sequences_than_a_step_takes_use_the_modules(
    best: Counted, by_modules: Callable[[Any], Any]
) -> None:
    model = decoder()
    ids = tokens(17, 6)
    assert torch.equal(decoded(model, ids), decoded(by_modules(model), ids))


def test_id_outside_the_vocabulary_is_the_modules_error(best: Counted) -> None:
    model = decoder()
    cache = model.new_cache(1)
    with torch.no_grad(), pytest.raises(IndexError, match=f"ids must lie in 0..{VOCABULARY - 1}"):
        model(torch.tensor([[VOCABULARY]]), cache)


def test_a_cache_that_is_restored_is_continued(best: Counted) -> None:
    model = decoder(sliding_window=6)
    ids = tokens(2, 24)
    whole = decoded(model, ids, 1)
    cache = model.new_cache(2)
    later = model.new_cache(2)
    with torch.no_grad():
        for token in ids[:, :15].split(1, dim=1):
            model(token, cache)
        later.load_state_dict(cache.state_dict())
        rest = torch.cat([model(token, later) for token in ids[:, 15:].split(1, dim=1)], dim=1)
    assert torch.equal(rest, whole[:, 14:])


@pytest.mark.parametrize("broken", ["shape", "dtype", "stride"])
def test_a_cache_of_another_form_is_refused(best: Counted, broken: str) -> None:
    model = decoder()
    plan, _ = native_decode.plan_of(model)
    step = best.prepare(plan)
    cache = [torch.zeros(1, 4, 8, 16) for _ in range(4)]
    assert step(torch.tensor([1]), cache, 0, 0, 0.0) is not None
    assert step(torch.tensor([1]), cache, 8, 0, 0.0) is None  # beyond the capacity
    assert step(torch.tensor([1]), cache, 2, 3, 0.0) is None  # a past before the first slot
    cache[3] = {
        "shape": torch.zeros(1, 4, 9, 16),
        "dtype": torch.zeros(1, 4, 8, 16, dtype=torch.bfloat16),
        "stride": torch.zeros(1, 8, 4, 16).transpose(1, 2),
    }[broken]
    assert step(torch.tensor([1]), cache, 0, 0, 0.0) is None
