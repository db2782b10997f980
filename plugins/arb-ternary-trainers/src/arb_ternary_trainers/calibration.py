"""``init="gptq"``: weights that are fitted to the inputs of their layers, one stage after another.

A stage is the linears of a block that read the same input. A block is the numbered module that
holds them (``layers.3``), or the linear itself. The student is the model with the rounded weights
of all stages so far, the teacher has all float weights. The student's linears read their inputs as
they will when they are ternary: rounded to int8, unless activations are float. For a stage, both
run on the calibration; from their inputs follow the weights that compensate best for the errors of
earlier stages, which are then rounded column by column with coordinate descent (``gptq_cd`` of
arb-ternary-upcycle). Only the inputs of one block and the products of one stage are in memory at a
time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Final, Literal

import torch
from attrs import define, field
from torch import Tensor, nn

from arb_ternary.backends.reference import quantize_rows
from arb_ternary.errors import UsageProblem
from arb_ternary.ternary.module import GroupSize
from arb_ternary_trainers.layers import MultipliesRows
from arb_ternary_trainers.selection import Target
from arb_ternary_trainers.ternary_values import Initial
from arb_ternary_upcycle.projection.config import ProjectionConfig
from arb_ternary_upcycle.projection.correction import corrected
from arb_ternary_upcycle.projection.rounded import Rounded
from arb_ternary_upcycle.projection.solve import project
from arb_ternary_upcycle.projection.statistics import InputStatistics

_CONFIG: Final = ProjectionConfig()
_WITHOUT_INPUTS: Final = ProjectionConfig(policy="ls")

#: The arguments and keyword arguments of a call.
Call = tuple[tuple[Any, ...], dict[str, Any]]


class _Reached(Exception):
    """Ends a forward pass whose rest is not needed."""


@define(eq=False)
class _Fitted:
    """A target whose weight is being fitted.

    Attributes:
        target: the weight and its layers.
        layer: the linear whose inputs count.
        rounded: its ternary form, once it is found.
    """

    target: Target
    layer: nn.Module
    rounded: Rounded | None = None


@define(eq=False)
class _Weights:
    """Switches a model between the teacher and the student.

    Attributes:
        int8_layers: linears that read int8 activations in the student.
        teacher: the float values of each parameter that is rounded.
        student: the rounded ones.
    """

    int8_layers: Sequence[nn.Module]
    teacher: dict[nn.Parameter, Tensor] = field(factory=dict)
    student: dict[nn.Parameter, Tensor] = field(factory=dict)

    def round(self, target: Target, rounded: Rounded) -> None:
        """Give the student the rounded form of a weight."""
        parameter = target.parameter
        matrix = rounded.dense()
        if target.classes[0].transposes_weight:
            matrix = matrix.T
        self.teacher[parameter] = parameter.data
        self.student[parameter] = matrix.reshape(parameter.shape).to(parameter)

    @contextmanager
    def as_student(self) -> Iterator[None]:
        """Let the model compute as the student within a ``with`` block."""
        for parameter, values in self.student.items():
            parameter.data = values
        try:
            with ExitStack() as hooks:
                for layer in self.int8_layers:
                    hooks.enter_context(_hooked(layer, _read_int8))
                yield
        finally:
            for parameter, values in self.teacher.items():
                parameter.data = values


def _read_int8(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Round the input of a linear as :class:`~arb_ternary.ternary.module.TernaryLinear` does."""
    x = inputs[0]
    codes_MK, scale_M = quantize_rows(x.reshape(-1, x.shape[-1]))
    rounded_MK = codes_MK * scale_M.unsqueeze(1)
    return rounded_MK.view(x.shape).to(x.dtype), *inputs[1:]


@torch.no_grad()
def fit_weights(
    model: nn.Module,
    targets: Sequence[Target],
    calibration: Iterable[Any],
    group_size: GroupSize,
    activations: Literal["int8", "float"],
    vote_bits: int,
) -> Mapping[Target, Initial]:
    """Return what each target starts with.

    Embeddings, convolutions and linears that the calibration does not reach are rounded with the
    least squared error (``ls``). The model is unchanged.

    Raises:
        UsageProblem: the calibration has no batches, can be read only once, or has a batch of
            another form.
    """
    batches = _checked(calibration)
    int8_layers: list[nn.Module] = []
    if activations == "int8":
        int8_layers = [layer for target in targets for layer in _linears(target)]
    weights = _Weights(int8_layers)
    found: dict[Target, Initial] = {}
    with _evaluating(model):
        for block, stages in _stages(model, targets, batches):
            teacher_calls = list(_calls_of(model, block, batches))
            with weights.as_student():
                student_calls = list(_calls_of(model, block, batches))
            for stage in stages:
                statistics = _input_statistics(block, stage, weights, teacher_calls, student_calls)
                for each in stage:
                    rounded = _fit(each.target, statistics, group_size)
                    found[each.target] = _initial(_CONFIG, rounded, vote_bits)
                    weights.round(each.target, rounded)
    for target in targets:
        if target not in found:
            rounded = project(target.matrix(), _WITHOUT_INPUTS, group_size)
            found[target] = _initial(_WITHOUT_INPUTS, rounded, vote_bits)
    return found


def _checked(calibration: Iterable[Any]) -> Iterable[Any]:
    """Return a calibration that can be read several times and has a batch."""
    if iter(calibration) is calibration:
        raise UsageProblem(
            "calibration: it is an iterator, which can be read only once",
            "Give a list of batches, or a DataLoader that does not shuffle.",
        )
    if next(iter(calibration), None) is None:
        raise UsageProblem("calibration: it has no batches")
    return calibration


def _run(model: nn.Module, batch: Any) -> None:
    """Run a batch forward, until a hook ends it."""
    with suppress(_Reached):
        if isinstance(batch, Tensor):
            model(batch)
        elif isinstance(batch, Mapping):
            model(**batch)
        elif isinstance(batch, tuple | list):
            model(*batch)
        else:
            raise UsageProblem(
                f"calibration: a batch is a tensor, a tuple of arguments or a dict of keyword "
                f"arguments, not a {type(batch).__name__}"
            )


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Compute without dropout, and without a cache of keys and values that a replay would grow."""
    training = {module: module.training for module in model.modules()}
    config = getattr(model, "config", None)
    use_cache = getattr(config, "use_cache", None)
    model.eval()
    if use_cache:
        config.use_cache = False  # type: ignore[union-attr]
    try:
        yield
    finally:
        if use_cache:
            config.use_cache = use_cache  # type: ignore[union-attr]
        for module, before in training.items():
            module.training = before


def _stages(
    model: nn.Module, targets: Sequence[Target], batches: Iterable[Any]
) -> list[tuple[nn.Module, list[list[_Fitted]]]]:
    """Return blocks, in the order of the first batch, with the stages of each."""
    fitted: dict[nn.Module, _Fitted] = {}
    for target in targets:
        for layer in _linears(target)[:1]:
            fitted[layer] = _Fitted(target, layer)

    order: dict[_Fitted, Tensor] = {}

    def note(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        order.setdefault(fitted[layer], inputs[0])

    with ExitStack() as hooks:
        for layer in fitted:
            hooks.enter_context(_hooked(layer, note))
        _run(model, next(iter(batches)))

    blocks: list[tuple[nn.Module, list[list[_Fitted]]]] = []
    modules = dict(model.named_modules())
    last_input = None
    for each, read in order.items():
        name = each.target.names[each.target.layers.index(each.layer)]
        block = modules[_block_name(name)]
        if not blocks or blocks[-1][0] is not block:
            blocks.append((block, []))
            last_input = None
        if read is not last_input:
            blocks[-1][1].append([])
        blocks[-1][1][-1].append(each)
        last_input = read
    return blocks


def _linears(target: Target) -> list[nn.Module]:
    """Return the layers of a target that are linears."""
    pairs = zip(target.layers, target.classes, strict=True)
    return [layer for layer, kind in pairs if issubclass(kind, MultipliesRows)]


def _block_name(name: str) -> str:
    """Return the name up to its first number: ``layers.3`` of ``layers.3.mlp.up``, or ``name``."""
    parts = name.split(".")
    for index, part in enumerate(parts[:-1]):
        if part.isdigit():
            return ".".join(parts[: index + 1])
    return name


@contextmanager
def _hooked(module: nn.Module, hook: Callable[..., Any], **options: Any) -> Iterator[None]:
    """Call ``hook`` before each forward of ``module`` within a ``with`` block."""
    handle = module.register_forward_pre_hook(hook, **options)
    try:
        yield
    finally:
        handle.remove()


def _calls_of(model: nn.Module, block: nn.Module, batches: Iterable[Any]) -> Iterator[Call]:
    """Yield the calls of ``block`` in the forward passes of all batches; one call per batch."""
    for batch in batches:
        calls: list[Call] = []

        def reach(_: object, args: Any, kwargs: Any, calls: list[Call] = calls) -> None:
            calls.append((args, kwargs))
            raise _Reached

        with _hooked(block, reach, with_kwargs=True):
            _run(model, batch)
        yield from calls


def _input_statistics(
    block: nn.Module,
    stage: Sequence[_Fitted],
    weights: _Weights,
    teacher_calls: Sequence[Call],
    student_calls: Sequence[Call],
) -> InputStatistics:
    """Return the products of the inputs of a stage, of teacher and student."""
    layer = stage[0].layer
    columns = stage[0].target.matrix().shape[1]
    statistics = InputStatistics(columns)
    for teacher_call, student_call in zip(teacher_calls, student_calls, strict=True):
        teacher = _input_of(layer, block, teacher_call)
        with weights.as_student():
            student = _input_of(layer, block, student_call)
        if teacher is not None and student is not None:
            statistics.add(student, teacher)
    return statistics


def _input_of(layer: nn.Module, block: nn.Module, call: Call) -> Tensor | None:
    """Return the rows that ``layer`` reads in a call of ``block``; None if it is not reached."""
    rows: list[Tensor] = []

    def reach(_: object, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0]
        rows.append(x.reshape(-1, x.shape[-1]).to("cpu", torch.float32))
        raise _Reached

    args, kwargs = call
    with _hooked(layer, reach), suppress(_Reached):
        block(*args, **kwargs)
    return rows[0] if rows else None


def _fit(target: Target, statistics: InputStatistics, group_size: GroupSize) -> Rounded:
    """Return the ternary form of a weight that fits the inputs of its layer."""
    gram = statistics.gram
    weight = corrected(target.matrix(), gram, statistics.cross, _CONFIG.damping)
    return project(weight.to(torch.float32), _CONFIG, group_size, gram)


def _initial(config: ProjectionConfig, rounded: Rounded, vote_bits: int) -> Initial:
    return Initial(config.policy, rounded.trits, rounded.exponent, rounded.votes(vote_bits))
