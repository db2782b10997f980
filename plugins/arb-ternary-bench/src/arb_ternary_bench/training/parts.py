"""The time of a training step by part, from torch's profiler and ranges around kernels and modules.

The profiler's events of the thread that trains form a tree. A kernel of a backend, an operation of
torch that computes, and generated code count with the time that is not spent in events below them.
What is left is calls: Python, dispatch, autograd, views and allocation. An operation belongs to the
part that its name says (a matrix product, a softmax), otherwise to that of the innermost module or
range around it. In the backward pass that is what was around the operation of the forward pass
whose gradient it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from attrs import frozen

PRODUCTS = "products"
ATTENTION = "attention"
NORMS = "norms and quantisation"
LOSS = "loss"
VOTES = "votes"
UPDATE = "update"
REST = "everything else"
CALLS = "calls"
#: In the order of the table.
PARTS: Final = (PRODUCTS, ATTENTION, NORMS, LOSS, VOTES, UPDATE, REST, CALLS)

#: How the names of our own ranges begin: around a kernel of a backend, and around a module or a
#: part of the loop.
KERNEL: Final = "kernel:"
SCOPE: Final = "scope:"

#: Parts of kernels, by what their names contain; the first match counts.
_KERNELS: Final[tuple[tuple[str, str], ...]] = (
    ("apply", UPDATE),
    ("settle", UPDATE),
    ("sums", UPDATE),
    ("pack", UPDATE),
    ("votes", VOTES),
    ("attend", ATTENTION),
    ("attention", ATTENTION),
    ("turn_heads", ATTENTION),
    ("loss", LOSS),
    ("entropy", LOSS),
    ("linear", PRODUCTS),
    ("product", PRODUCTS),
    ("quantize", NORMS),
    ("norm", NORMS),
)
#: Parts of torch's operations by their names, whatever is around them.
_OPERATIONS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("aten::mm", "aten::addmm", "aten::_int_mm", "mkl::_mkl_linear"), PRODUCTS),
    **dict.fromkeys(("mkldnn::_linear_pointwise", "mkldnn::_linear_pointwise.binary"), PRODUCTS),
    **dict.fromkeys(
        ("aten::bmm", "aten::baddbmm", "aten::_softmax", "aten::_softmax_backward_data"), ATTENTION
    ),
    **dict.fromkeys(("aten::_log_softmax", "aten::_log_softmax_backward_data"), LOSS),
    **dict.fromkeys(("aten::nll_loss_forward", "aten::nll_loss_backward"), LOSS),
}
#: Begins the names of torch's attention kernels.
_ATTENTION: Final = "aten::_scaled_dot_product"
#: Parts of modules, by what the names of their classes contain; the first match counts.
_MODULES: Final[tuple[tuple[str, str], ...]] = (
    ("Norm", NORMS),
    ("Attention", ATTENTION),
    ("FloatLinear", PRODUCTS),
    ("Linear", NORMS),
    ("TiedHead", NORMS),
)
#: Operations that compute nothing: views, allocation, and those that only call others.
_CALLS: Final = frozenset(
    {
        "aten::view",
        "aten::_unsafe_view",
        "aten::reshape",
        "aten::_reshape_alias",
        "aten::t",
        "aten::transpose",
        "aten::permute",
        "aten::as_strided",
        "aten::expand",
        "aten::expand_as",
        "aten::slice",
        "aten::select",
        "aten::unsqueeze",
        "aten::squeeze",
        "aten::detach",
        "aten::detach_",
        "aten::alias",
        "aten::empty",
        "aten::empty_like",
        "aten::empty_strided",
        "aten::new_empty",
        "aten::resize_",
        "aten::narrow",
        "aten::chunk",
        "aten::split",
        "aten::split_with_sizes",
        "aten::unbind",
        "aten::set_",
        "aten::result_type",
        "aten::item",
        "aten::_local_scalar_dense",
        "aten::is_nonzero",
        "aten::lift_fresh",
        "aten::flatten",
        "aten::unflatten",
        "aten::numpy_T",
        "aten::matrix_H",
        "aten::mT",
        "aten::view_as",
        "aten::swapaxes",
        "aten::movedim",
        "aten::contiguous",
        "aten::to",
        "aten::_to_copy",
        "aten::linear",
        "aten::matmul",
        "aten::cross_entropy_loss",
        "aten::nll_loss",
        "aten::nll_loss_nd",
        "aten::log_softmax",
        "aten::softmax",
        "aten::scaled_dot_product_attention",
        "aten::rms_norm",
        "aten::embedding",
        "aten::dropout",
        "aten::pad",
        "aten::resolve_conj",
        "aten::resolve_neg",
        "aten::unsafe_split",
        "aten::size",
        "aten::stride",
        "aten::numel",
    }
)
#: Begins the names of ranges around code that a compiler made.
_COMPILED: Final = "## Call CompiledFxGraph"
_BACKWARD: Final = "autograd::engine::evaluate_function: "


#: What torch's profiler says of one range: ``name``, ``sequence_nr``, ``cpu_parent``,
#: ``cpu_children``, and times in microseconds: ``cpu_time_total``, ``time_range``.
Event = Any


class Range(NamedTuple):
    """A range of a step: its name, its part, and the microseconds not spent in ranges below it."""

    name: str
    part: str
    micro: float


@frozen
class Split:
    """A step by part, in seconds.

    Attributes:
        total: seconds of the step, with the profiler at work.
        parts: by part; they add up to ``total``.
        longest: the ranges with the most time: name, part, number, seconds.
        events: number of recorded events, each of which costs time.
    """

    total: float
    parts: Mapping[str, float]
    longest: tuple[tuple[str, str, int, float], ...]
    events: int


def part_of_kernel(name: str) -> str:
    """Return the part that a kernel of a backend counts as."""
    return next((part for piece, part in _KERNELS if piece in name), REST)


def read_step(root: Event, forward: Iterable[Event]) -> list[Range]:
    """Return the ranges of the step around which ``root`` is, in order; their times add up to its.

    Args:
        root: the range of the step.
        forward: all events in order, with those that backward nodes belong to.
    """
    found: list[Range] = []
    _read(root, REST, _scopes(forward), found)
    return found


def split_steps(steps: Sequence[Sequence[Range]], longest: int = 24) -> Split:
    """Return what equal steps take, part by part.

    The least time of every range counts, since other work of the machine falls on any of them.
    Steps that have other ranges than the shortest one are left out.

    Args:
        steps: from :func:`read_step`; one at least.
        longest: number of ranges to name.
    """
    shortest = min(steps, key=lambda step: sum(each.micro for each in step))
    names = [each.name for each in shortest]
    equal = [step for step in steps if [each.name for each in step] == names]
    parts = dict.fromkeys(PARTS, 0.0)
    by_name: dict[tuple[str, str], tuple[int, float]] = {}
    for there in zip(*equal, strict=True):
        name = there[0].name
        part = there[0].part
        seconds = min(each.micro for each in there) * 1e-6
        parts[part] += seconds
        number, before = by_name.get((name, part), (0, 0.0))
        by_name[name, part] = (number + 1, before + seconds)
    ranked = sorted(by_name.items(), key=lambda each: -each[1][1])[:longest]
    return Split(
        total=sum(parts.values()),
        parts=parts,
        longest=tuple((name, part, number, seconds) for (name, part), (number, seconds) in ranked),
        events=len(shortest),
    )


def _read(event: Event, scope: str, scopes: Mapping[int, str], found: list[Range]) -> None:
    """Append ``event`` and the events below it; ``scope`` is the part of what is around it."""
    name = event.name
    if name.startswith(KERNEL):
        found.append(Range(name, part_of_kernel(name.removeprefix(KERNEL)), event.cpu_time_total))
        return
    own = event.cpu_time_total - sum(child.cpu_time_total for child in event.cpu_children)
    if name.startswith(SCOPE):
        scope = _part_of_scope(name)
        found.append(Range(name, CALLS, own))
    else:
        scope = scopes.get(event.sequence_nr, scope) if name.startswith(_BACKWARD) else scope
        found.append(Range(name, _part_of_operation(name, scope), own))
    for child in event.cpu_children:
        _read(child, scope, scopes, found)


def _part_of_operation(name: str, scope: str) -> str:
    if name in _OPERATIONS:
        return _OPERATIONS[name]
    if name.startswith(_ATTENTION):
        return ATTENTION
    if name.startswith(_COMPILED):
        return REST
    if name in _CALLS or not name.startswith(("aten::", "mkldnn::", "onednn::", "prims::")):
        return CALLS
    return scope


def _part_of_scope(name: str) -> str:
    inside = name.removeprefix(SCOPE)
    if inside in PARTS:
        return inside
    return next((part for piece, part in _MODULES if piece in inside), REST)


def _scopes(events: Iterable[Event]) -> dict[int, str]:
    """Return the part around the operation that made each node of the graph, by the node's number.

    Operations that make no node have the number of the next one that does, so that the last one of
    a number counts.
    """
    found: dict[int, str] = {}
    for event in events:
        if event.sequence_nr < 0 or event.name.startswith(_BACKWARD):
            continue
        around: Any = event
        while around is not None and not around.name.startswith((SCOPE, _BACKWARD)):
            around = around.cpu_parent
        if around is not None and around.name.startswith(SCOPE):
            found[event.sequence_nr] = _part_of_scope(around.name)
    return found
