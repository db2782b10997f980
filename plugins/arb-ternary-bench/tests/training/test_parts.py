"""A profiled step by part: from events made by hand, and from a real step."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from arb_ternary.backends.select import get_backend
from arb_ternary_bench.training.bench import parts_of_step
from arb_ternary_bench.training.child import respond
from arb_ternary_bench.training.parts import PARTS, Range, part_of_kernel, read_step, split_steps

TINY: dict[str, Any] = {
    "name": "small",
    "width": 32,
    "layers": 1,
    "heads": 2,
    "feed_forward": 32,
    "vocabulary": 64,
    "batch": 1,
    "block": 8,
    "group_size": 32,
}


def event(name: str, micro: float, *children: Any, number: int = -1) -> Any:
    """A range of the profiler with ``micro`` microseconds in all."""
    made = SimpleNamespace(
        name=name,
        sequence_nr=number,
        cpu_parent=None,
        cpu_children=children,
        cpu_time_total=micro,
        time_range=None,
    )
    for child in children:
        child.cpu_parent = made
    return made


def flat(root: Any) -> Iterator[Any]:
    """``root`` and all in it, in the order of their starts."""
    yield root
    for child in root.cpu_children:
        yield from flat(child)


def split(*children: Any, micro: float = 1000.0) -> Any:
    root = event("scope:step", micro, *children)
    return split_steps([read_step(root, flat(root))])


def micros(found: Any) -> dict[str, float]:
    return {part: round(each * 1e6, 3) for part, each in found.parts.items() if each}


def test_operation_belongs_to_its_module_and_the_rest_is_calls() -> None:
    norm = event("scope:RMSNorm", 100, event("aten::mul", 60), event("aten::view", 10))
    attention = event("scope:Attention", 300, norm, event("aten::bmm", 120), event("aten::cat", 30))
    found = split(attention, event("aten::add", 40))
    assert micros(found) == {
        "norms and quantisation": 60.0,
        "attention": 150.0,
        "everything else": 40.0,
        "calls": 1000.0 - 60 - 150 - 40,
    }


def test_the_parts_add_up_to_the_step() -> None:
    loss = event("scope:loss", 80, event("aten::_log_softmax", 30), event("aten::sum", 5))
    update = event(
        "scope:update", 90, event("Optimizer.step#AdamW.step", 80, event("aten::_fused_adamw_", 70))
    )
    found = split(
        event("scope:FloatLinear", 200, event("aten::linear", 190, event("aten::mm", 180))),
        loss,
        update,
    )
    assert sum(found.parts.values()) == pytest.approx(found.total) == pytest.approx(1e-3)
    assert list(found.parts) == list(PARTS)
    assert micros(found)["products"] == 180.0
    assert micros(found)["loss"] == 35.0
    assert micros(found)["update"] == 70.0


def test_a_kernel_counts_with_all_that_it_calls() -> None:
    dispatched = event(
        "arb_ternary::linear", 70, event("kernel:linear", 50, event("aten::mul", 20))
    )
    assert micros(split(event("scope:TernaryLinear", 90, dispatched))) == {
        "products": 50.0,
        "calls": 950.0,
    }


def test_gradient_belongs_to_the_part_of_its_forward_operation() -> None:
    seen = event("aten::empty", 1, number=7)  # makes no node: the number is that of the next one
    forward = event("scope:Attention", 100, event("aten::mul", 20, number=7))
    node = event(
        "autograd::engine::evaluate_function: MulBackward0", 60, event("aten::mul", 45), number=7
    )
    found = split(event("scope:RMSNorm", 10, seen), forward, node)
    assert micros(found) == {"attention": 65.0, "calls": 935.0}


def test_what_a_compiler_made_is_no_call() -> None:
    graph = event("## Call CompiledFxGraph abc ##", 500, event("aten::mm", 300))
    assert micros(split(graph)) == {"products": 300.0, "everything else": 200.0, "calls": 500.0}


def test_of_equal_steps_every_range_has_its_least_time() -> None:
    first = [Range("scope:step", "calls", 5.0), Range("aten::mm", "products", 9.0)]
    second = [Range("scope:step", "calls", 8.0), Range("aten::mm", "products", 4.0)]
    other = [Range("scope:step", "calls", 1.0), Range("aten::add", "everything else", 99.0)]
    found = split_steps([first, other, second])
    assert micros(found) == {"products": 4.0, "calls": 5.0}
    assert found.total == pytest.approx(9e-6)
    assert (found.events, found.longest[0][:3]) == (2, ("scope:step", "calls", 1))


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("linear", "products"),
        ("linear_grad_input", "products"),
        ("quantize_rows", "norms and quantisation"),
        ("rms_norm_quantize", "norms and quantisation"),
        ("cast_scaled_votes", "votes"),
        ("embedding_votes", "votes"),
        ("apply_scaled_votes", "update"),
        ("apply_exponent_votes", "update"),
        ("embedding", "everything else"),
        ("pack_votes", "update"),
        ("turn_heads_backward", "attention"),
        ("activate_quantize", "norms and quantisation"),
    ],
)
def test_kernels_have_parts_by_their_names(kernel: str, part: str) -> None:
    assert part_of_kernel(kernel) == part


def test_calls_are_what_kernels_leave_of_an_unprofiled_step() -> None:
    profiled = {"products": 3.0, "votes": 1.0, "calls": 6.0}
    assert parts_of_step(profiled, 5.0) == {"products": 3.0, "votes": 1.0, "calls": 1.0}
    # A machine that was not equally fast for both: everything in proportion.
    assert parts_of_step(profiled, 20.0) == pytest.approx(
        {"products": 6.0, "votes": 2.0, "calls": 12.0}
    )
    assert parts_of_step(profiled, 2.0) == pytest.approx(
        {"products": 0.6, "votes": 0.2, "calls": 1.2}
    )


@pytest.fixture
def unmarked() -> Iterator[None]:
    """A profiled step marks kernels and modules for the whole process: here, only for a test."""
    backend = get_backend("torch")
    call = nn.Module.__call__
    kernels = backend.kernels
    try:
        yield
    finally:
        object.__setattr__(backend, "kernels", kernels)
        setattr(nn.Module, "__call__", call)  # noqa: B010


@pytest.mark.usefixtures("unmarked")
def test_a_real_step_has_every_part_that_its_way_of_training_has() -> None:
    asked = {"way": "torch/pure/int8", "size": TINY, "threads": 1, "seed": 0, "profile": True}
    (found,) = respond(asked, ())
    assert sum(found["parts"].values()) == pytest.approx(found["total"])
    assert all(found["parts"][part] > 0 for part in PARTS)
    kernels = {name for name, *_ in found["longest"] if name.startswith("kernel:")}
    assert {"kernel:linear", "kernel:cast_scaled_votes"} <= kernels
