"""Causal attention, forward and backward, against torch's in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from arb_ternary_cpu.backend import build
from arb_ternary_cpu.isa import usable_isas

# For each instruction set.
pytestmark = pytest.mark.sampled("call")

Call = Callable[..., Any]
#: Unit roundoff of float32.
UNIT = 2.0**-24


class Case(NamedTuple):
    """Sizes, and what is done to queries and keys."""

    batch: int
    heads: int
    key_heads: int
    length: int
    features: int
    eps: tuple[float | None, float | None] = (None, None)
    turns: bool = False
    gains: tuple[bool, bool] = (False, False)


CASES = (
    Case(2, 2, 2, 33, 16, (0.1, 0.2), turns=True),
    Case(1, 4, 2, 70, 40, turns=True),
    Case(1, 3, 1, 64, 128, (1e-6, None)),
    Case(1, 1, 1, 530, 32),
    Case(3, 1, 1, 1, 2, (None, 0.1)),
    Case(2, 4, 2, 70, 32, (0.1, 0.2), turns=True, gains=(True, True)),
    Case(1, 2, 2, 33, 16, (0.1, 0.2), gains=(False, True)),
    Case(2, 1, 1, 40, 18, (0.1, None), turns=True, gains=(True, False)),
)


@pytest.fixture(params=usable_isas())
def call(request: pytest.FixtureRequest) -> Call:
    kernels = build(request.param).kernels
    return lambda name, *arguments: kernels[f"text.{name}"](*arguments)


def drawn(
    case: Case, dtype: torch.dtype = torch.float32
) -> tuple[list[Tensor], tuple[Tensor, Tensor] | None]:
    """Queries, keys, values and a gradient; angles."""
    made = torch.Generator().manual_seed(case.length)
    rows = case.batch * case.length
    counts = (case.heads, case.key_heads, case.key_heads, case.heads)
    tensors = [
        torch.randn(rows, count * case.features, generator=made).to(dtype) for count in counts
    ]
    angle = torch.rand(case.length, case.features // 2, generator=made) * 7
    return tensors, (angle.cos(), angle.sin()) if case.turns else None


def gains_of(case: Case) -> list[Tensor | None]:
    """Gains of queries and of keys around 1, where the case has any."""
    made = torch.Generator().manual_seed(case.features)
    drawn = [torch.rand(case.features, generator=made) + 0.5 for _ in range(2)]
    return [gain if wanted else None for gain, wanted in zip(drawn, case.gains, strict=True)]


def run(
    call: Call, case: Case, tensors: list[Tensor], angles: tuple[Tensor, Tensor] | None
) -> list[Tensor]:
    """What is seen, and the gradients of queries, keys and values, and of the gains."""
    *inputs, grad = tensors
    gains = gains_of(case)
    rest = (angles, case.heads, case.key_heads, case.length, *case.eps, *gains)
    seen, logs = call("attend", *inputs, *rest)
    sums = [None if gain is None else torch.zeros_like(gain) for gain in gains]
    gradients = call("attend_backward", grad, *inputs, seen, logs, *rest, *sums)
    return [seen, *gradients, *(each for each in sums if each is not None)]


def in_float64(
    case: Case, tensors: list[Tensor], angles: tuple[Tensor, Tensor] | None
) -> tuple[list[Tensor], float]:
    """The same by torch, and the largest score."""
    leaves = [each.double().requires_grad_() for each in tensors[:3]]
    gains = [None if gain is None else gain.double().requires_grad_() for gain in gains_of(case)]

    def heads(
        x: Tensor, count: int, eps: float | None, turns: bool, gain: Tensor | None = None
    ) -> Tensor:
        x = x.view(case.batch, case.length, count, case.features)
        if eps is not None:
            x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
        if gain is not None:
            x = x * gain
        x = x.transpose(1, 2)
        if turns and angles is not None:
            cos, sin = (each.double() for each in angles)
            first, second = x.chunk(2, dim=-1)
            x = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return x

    query = heads(leaves[0], case.heads, case.eps[0], True, gains[0])
    key = heads(leaves[1], case.key_heads, case.eps[1], True, gains[1])
    value = heads(leaves[2], case.key_heads, None, False)
    seen = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    seen = seen.transpose(1, 2).reshape(tensors[0].shape)
    seen.backward(tensors[3].double())
    shared = key.repeat_interleave(case.heads // case.key_heads, dim=1)
    largest = float((query @ shared.mT).detach().abs().max()) / case.features**0.5
    gradients = [each.grad for each in (*leaves, *gains) if each is not None]
    assert all(each is not None for each in gradients)
    return [seen.detach(), *(each for each in gradients if each is not None)], largest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_and_its_gradients_are_those_of_float64(
    call: Call, dtype: torch.dtype, case: Case
) -> None:
    tensors, angles = drawn(case, dtype)
    wanted, largest = in_float64(case, tensors, angles)
    # An error of a score, in sums of as many terms as there are features, is one of its weight
    # relative to itself; a sum over keys is one of 16 partial sums. What is rounded to the dtype
    # beside the result: turned queries and keys, weights, and their gradients.
    roundings = (case.features + case.length / 16 + 32) * UNIT
    if dtype != torch.float32:
        roundings += 4 * torch.finfo(dtype).eps / 2
    for found, right in zip(run(call, case, tensors, angles), wanted, strict=True):
        assert found.dtype == (torch.float32 if found.dim() == 1 else dtype)
        # Operands are of size 1; gradients can be 0 because terms of that size cancel.
        bound = roundings * (1 + largest) * max(1.0, float(right.abs().max()))
        assert float((found.double() - right).abs().max()) < bound


def test_gradients_are_the_slopes_of_what_is_seen(call: Call) -> None:
    case = Case(1, 2, 1, 40, 16, (0.1, 0.1), turns=True)
    tensors, angles = drawn(case)
    _, *gradients = run(call, case, tensors, angles)
    step = 2.0**-6
    for place, gradient in enumerate(gradients):
        direction = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(place))
        ends = []
        for sign in (1, -1):
            moved = [
                each + sign * step * direction if i == place else each
                for i, each in enumerate(tensors)
            ]
            ends.append((run(call, case, moved, angles)[0].double() * tensors[3]).sum())
        slope = (ends[0] - ends[1]) / (2 * step)
        # The third derivative times a square of the step, and float32 over the step.
        torch.testing.assert_close(
            slope, (gradient.double() * direction).sum(), rtol=2e-3, atol=2e-2
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_position_sees_itself_and_those_before_it(call: Call, dtype: torch.dtype) -> None:
    case = Case(1, 2, 2, 75, 16)
    tensors, _ = drawn(case, dtype)
    before = run(call, case, tensors, None)[0]
    for changed in (40, 41, 63, 64):
        later = [each.clone() for each in tensors]
        for each in later[1:3]:
            each[changed:] += 1
        after = run(call, case, later, None)[0]
        assert torch.equal(after[:changed], before[:changed])
        assert not torch.equal(after[changed], before[changed])


def test_large_scores_choose_one_value(call: Call) -> None:
    case = Case(1, 1, 1, 50, 16)
    (query, key, value, grad), _ = drawn(case)
    query *= 1e4
    seen, *gradients = run(call, case, [query, key, value, grad], None)
    best = (query @ key.T).masked_fill(torch.ones(50, 50).triu(1) > 0, -torch.inf).argmax(-1)
    torch.testing.assert_close(seen, value[best], rtol=1e-6, atol=1e-6)
    assert all(each.isfinite().all() for each in gradients)


def test_what_is_not_finite_reaches_who_sees_it(call: Call) -> None:
    case = Case(2, 1, 1, 40, 16)
    tensors, _ = drawn(case)
    tensors[0][10] = torch.nan
    tensors[1][39] = torch.inf
    seen = run(call, case, tensors, None)[0]
    assert seen.isnan().any(-1).nonzero().flatten().tolist() == [10, 39]


def test_results_are_independent_of_threads_and_sequences() -> None:
    kernels: Mapping[str, Any] = build().kernels

    def native(name: str, *arguments: Any) -> Any:
        return kernels[f"text.{name}"](*arguments)

    case = Case(3, 4, 2, 70, 32, (0.1, 0.1), turns=True, gains=(True, True))
    before = torch.get_num_threads()
    try:
        for dtype in (torch.float32, torch.bfloat16):
            tensors, angles = drawn(case, dtype)
            torch.set_num_threads(1)
            alone = run(native, case, tensors, angles)
            torch.set_num_threads(3)
            for one, other in zip(alone, run(native, case, tensors, angles), strict=True):
                assert torch.equal(one, other)
            second = [each[70:140] for each in tensors]
            # Gains are those of all sequences.
            for one, other in zip(
                alone[:4], run(native, case._replace(batch=1), second, angles)[:4], strict=True
            ):
                assert torch.equal(one[70:140], other)
    finally:
        torch.set_num_threads(before)


def test_rows_that_are_not_contiguous_are_read_right() -> None:
    kernels: Mapping[str, Any] = build().kernels
    case = Case(1, 2, 2, 20, 16)
    tensors, _ = drawn(case)
    apart = [torch.stack((each, -each), dim=-1)[..., 0] for each in tensors]
    assert not apart[0].is_contiguous()
    found, wanted = (
        run(lambda name, *arguments: kernels[f"text.{name}"](*arguments), case, each, None)
        for each in (apart, tensors)
    )
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


def test_tensors_without_elements_give_such(call: Call) -> None:
    for shape, length in (((0, 8), 4), ((3, 0), 3)):
        none = torch.empty(shape)
        seen, logs = call("attend", none, none, none, None, 2, 2, length, None, None)
        assert seen.shape == shape
        assert logs.shape == (shape[0] // length, 2, length)
        grads = call(
            "attend_backward",
            none,
            none,
            none,
            none,
            seen,
            logs,
            None,
            2,
            2,
            length,
            None,
            None,
        )
        assert [each.shape for each in grads] == [shape] * 3


ONE = torch.ones(4, 8)
LOGS = torch.ones(2, 2, 2)


@pytest.mark.parametrize(
    ("name", "arguments", "fault"),
    [
        ("attend", (torch.ones(4, 6), ONE, ONE, None, 2, 2, 2, None, None), "even number"),
        ("attend", (ONE, ONE, ONE, None, 2, 2, 3, None, None), r"B \* 3"),
        ("attend", (ONE, ONE, ONE, None, 2, 3, 2, None, None), "multiple of key_heads"),
        ("attend", (ONE, torch.ones(4, 6), ONE, None, 2, 2, 2, None, None), "key must be"),
        ("attend", (ONE, ONE, ONE.bfloat16(), None, 2, 2, 2, None, None), "value must be"),
        (
            "attend",
            (ONE.double(), ONE, ONE, None, 2, 2, 2, None, None),
            "float32, bfloat16 and float16",
        ),
        (
            "attend",
            (ONE, ONE, ONE, (torch.ones(2, 3),) * 2, 2, 2, 2, None, None),
            "cos must be",
        ),
        (
            "attend",
            (ONE, ONE, ONE, None, 2, 2, 2, 0.1, None, torch.ones(3)),
            "query_gain must be",
        ),
        (
            "attend",
            (ONE, ONE, ONE, None, 2, 2, 2, 0.1, None, None, torch.ones(4)),
            "key_gain needs rows",
        ),
        (
            "attend_backward",
            (ONE,) * 5 + (LOGS, None, 2, 2, 2, 0.1, 0.1, torch.ones(4)),
            "given together",
        ),
        (
            "attend_backward",
            (ONE[:2], ONE, ONE, ONE, ONE, LOGS, None, 2, 2, 2, None, None),
            "grad must be",
        ),
        (
            "attend_backward",
            (ONE, ONE, ONE, ONE, ONE[:2], LOGS, None, 2, 2, 2, None, None),
            "seen must be",
        ),
        (
            "attend_backward",
            (ONE, ONE, ONE, ONE, ONE, LOGS[:1], None, 2, 2, 2, None, None),
            "logs must be",
        ),
    ],
)
def test_wrong_arguments_are_named(name: str, arguments: tuple[Any, ...], fault: str) -> None:
    with pytest.raises((ValueError, TypeError), match=fault):
        build().kernels[f"text.{name}"](*arguments)
