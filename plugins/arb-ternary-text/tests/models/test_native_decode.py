"""The models that the decoding kernel serves, and how their changes are noticed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from arb_ternary.backends.select import use_backend
from arb_ternary_text.models import block_kernels, native_decode
from arb_ternary_text.models.cache import KeyValueCache
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decode_plan import DecoderPlan
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_text.models.rotary import rotary_angles

VOCABULARY = 11
MARK = 1234.0


class Kernel:
    """A backend whose step marks its logits and writes ones to the cache."""

    def __init__(self) -> None:
        self.plans: list[DecoderPlan] = []
        self.calls: list[tuple[int, int, float]] = []
        self.serves = True

    @property
    def kernels(self) -> dict[str, Callable[..., Any]]:
        return {"text.decode_step": self.prepare}

    def prepare(self, plan: DecoderPlan) -> Callable[..., Tensor | None]:
        self.plans.append(plan)

        def step(
            ids_B: Tensor, cache: Sequence[Tensor], slot: int, past: int, position: float
        ) -> Tensor | None:
            if not self.serves:
                return None
            self.calls.append((slot, past, position))
            for stored in cache:
                stored[:, :, slot] = 1.0
            outputs = plan.width if plan.head is None else plan.vocabulary
            return torch.full((ids_B.numel(), outputs), MARK, dtype=plan.dtype)

        return step


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    made = Kernel()
    monkeypatch.setattr(native_decode, "get_backend", lambda _: made)
    return made


def decoder(**options: Any) -> Decoder:
    with use_backend("torch"):
        return Decoder(
            DecoderConfig(**({"width": 16, "layers": 2, "heads": 4, "max_length": 16} | options)),
            VOCABULARY,
        )


@torch.no_grad()
def step(model: Any, cache: KeyValueCache | None = None, token: int = 3) -> Tensor:
    logits: Tensor = model(torch.tensor([[token]]), model.new_cache(1) if cache is None else cache)
    return logits


def marked(logits: Tensor) -> bool:
    return bool((logits == MARK).all())


def test_a_plain_decoder_uses_the_kernel(kernel: Kernel) -> None:
    model = decoder(rotary_scaling=4.0)
    cache = model.new_cache(1)
    with torch.no_grad():
        assert not marked(model(torch.tensor([[1, 2, 3]]), cache))  # a prompt is no step
    assert marked(step(model, cache))
    assert marked(step(model, cache))
    assert kernel.calls == [(3, 3, 0.75), (4, 4, 1.0)]
    assert cache.length == 5
    assert len(kernel.plans) == 1
    stored = cache.layers[1].stored[1]
    assert [bool((stored[0, 0, t] == 1).all()) for t in range(6)] == [
        False,
        False,
        False,
        True,
        True,
        False,
    ]


def test_a_sliding_window_limits_what_a_step_sees(kernel: Kernel) -> None:
    model = decoder(sliding_window=3)
    cache = model.new_cache(1)
    for _ in range(8):
        assert marked(step(model, cache))
    # A cache of twice the window is compacted when it is full.
    assert [(slot, past) for slot, past, _ in kernel.calls] == [
        (0, 0),
        (1, 1),
        (2, 2),
        (3, 2),
        (4, 2),
        (5, 2),
        (2, 2),
        (3, 2),
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"experts": 2},
        {"attention": "decoupled", "sem_dim": 4, "geo_dim": 4},
        {"query_key_value_bias": True},
        {"activations": "float"},
        {"float_parts": ("linears",)},
        {"embedding_scale_rule": "correlation"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_a_decoder_that_is_not_plain_runs_its_modules(
    kernel: Kernel, options: dict[str, Any]
) -> None:
    model = decoder(**options)
    assert not marked(step(model))
    assert not kernel.plans


def test_a_subclass_runs_its_modules(kernel: Kernel) -> None:
    class Other(Decoder):
        pass

    with use_backend("torch"):
        model = Other(DecoderConfig(width=16, layers=1, heads=4), VOCABULARY)
    assert not marked(step(model))


@pytest.mark.parametrize(
    "part", ["blocks.0", "blocks.1.attention.query", "blocks.0.feed_forward.norm", "blocks"]
)
def test_a_hook_on_a_module_is_called(kernel: Kernel, part: str) -> None:
    model = decoder()
    cache = model.new_cache(1)
    assert marked(step(model, cache))
    called: list[str] = []
    module = model.get_submodule(part)
    handle = module.register_forward_hook(lambda *_: called.append(part))
    assert not marked(step(model, cache))
    if part != "blocks":  # a list of modules is never called
        assert called == [part]
    handle.remove()
    assert marked(step(model))


def test_a_replaced_forward_is_called(kernel: Kernel) -> None:
    model = decoder()
    linear: Any = model.blocks[0].attention.value
    linear.forward = lambda x: torch.zeros(*x.shape[:-1], 16)
    assert not marked(step(model))


def test_gradients_autocast_and_exact_runs_use_the_modules(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = decoder()
    assert not marked(model(torch.tensor([[3]]), model.new_cache(1)))
    with torch.autocast("cpu", torch.bfloat16):
        assert not marked(step(model))
    assert marked(step(model))
    monkeypatch.setattr(block_kernels, "is_exact", lambda: True)
    assert not marked(step(model))


def test_replaced_tensors_are_used_in_the_next_step(kernel: Kernel) -> None:
    model = decoder(float_parts=("norms",))
    cache = model.new_cache(1)
    assert marked(step(model, cache))
    query = model.blocks[0].attention.query
    query.weight = query.weight.clone()
    gain = model.blocks[1].feed_forward.norm.weight
    # as moving a module does it: the parameter stays, its memory does not
    gain.data = gain.data.clone()
    assert marked(step(model, cache))
    assert len(kernel.plans) == 2
    found = kernel.plans[1].layers
    assert found[0].query.packed is query.weight
    assert found[1].feed_norm is not None
    assert found[1].feed_norm.gain is not None
    assert found[1].feed_norm.gain.data_ptr() == gain.data_ptr()
    model.blocks[0].attention.query.exponent += 1  # in place: the plan holds that very tensor
    assert marked(step(model, cache))
    assert len(kernel.plans) == 2


@pytest.mark.parametrize("trits", [None, 8])
def test_factors_and_gains_of_a_plan_follow_what_they_learn(
    kernel: Kernel, trits: int | None
) -> None:
    gains: dict[str, Any] = {} if trits is None else {"learned_norms": True, "vector_trits": trits}
    model = decoder(row_scales=True, **gains)
    cache = model.new_cache(1)
    assert marked(step(model, cache))
    assert marked(step(model, cache))
    assert len(kernel.plans) == 1
    query = model.blocks[1].attention.query
    gain = model.blocks[0].feed_forward.norm
    with torch.no_grad():
        if trits is None:
            query.row_scale[3] = 0.3
        else:
            query.row_trits.set_trits(torch.ones(16, 8, dtype=torch.int8))
            gain.gains.set_trits(-torch.ones(16, 8, dtype=torch.int8))
    assert marked(step(model, cache))
    assert len(kernel.plans) == 2
    before, after = (plan.layers[1].query.factor for plan in kernel.plans)
    assert before is not None
    assert after is not None
    assert torch.equal(before, torch.ones(16))
    expected = torch.full((16,), 2.0) if trits else torch.ones(16)
    if trits is None:
        expected[3] = 0.3
        expected = expected.half().float()
    else:
        norm = kernel.plans[1].layers[0].feed_norm
        assert norm is not None
        assert norm.gain is not None
        assert torch.equal(norm.gain, torch.zeros(16))
    assert torch.equal(after, expected)


def test_a_replaced_module_or_eps_is_noticed(kernel: Kernel) -> None:
    model = decoder()
    cache = model.new_cache(1)
    step(model, cache)
    model.blocks[0].attention.norm.eps = 0.5
    step(model, cache)
    norm = kernel.plans[-1].layers[0].attention_norm
    assert norm is not None
    assert norm.eps == 0.5
    model.blocks[1].attention.output = nn.Linear(16, 16, bias=False)
    assert not marked(step(model, cache))
    assert len(kernel.plans) == 2


def test_two_models_take_turns(kernel: Kernel) -> None:
    models = decoder(), decoder(layers=3)
    caches = [model.new_cache(1) for model in models]
    for _ in range(2):
        assert all(marked(step(model, cache)) for model, cache in zip(models, caches, strict=True))
    assert [len(plan.layers) for plan in kernel.plans] == [2, 3]


def test_a_kernel_that_declines_falls_back_to_modules(kernel: Kernel) -> None:
    model = decoder(sliding_window=2)
    twin_cache = decoder(sliding_window=2).new_cache(1)
    cache = model.new_cache(1)
    kernel.serves = False
    steps = [step(model, cache, token) for token in (1, 2, 3, 4, 5, 6)]
    with torch.no_grad():
        native_free = [model(torch.tensor([[token]]), twin_cache) for token in (1, 2, 3, 4, 5, 6)]
    assert cache.length == 6
    assert all(torch.equal(mine, other) for mine, other in zip(steps, native_free, strict=True))


def test_a_backend_without_the_kernel_runs_the_modules() -> None:
    assert step(decoder()).shape == (1, 1, VOCABULARY)


def test_a_float_head_gets_the_normed_rows_and_the_scale(kernel: Kernel) -> None:
    model = decoder(float_parts=("head",), logit_scale=-1)
    model.head.weight.data.fill_(1.0)
    assert torch.allclose(step(model), torch.full((1, 1, VOCABULARY), 16 * MARK / 2))
    assert kernel.plans[0].head is None


def test_the_speeds_of_a_plan_are_those_of_the_angles() -> None:
    model = decoder(rotary_base=50.0, rotary_factors=(1.0, 4.0))
    plan, backend = native_decode.plan_of(model)
    cos, sin = rotary_angles(
        7, 1, 4, 50.0, factors=(1.0, 4.0), dtype=torch.float64, device=torch.device("cpu")
    )
    angle = 7 * torch.tensor(plan.speeds, dtype=torch.float64)
    assert backend == "torch"
    assert torch.equal(angle.cos(), cos[0])
    assert torch.equal(angle.sin(), sin[0])
