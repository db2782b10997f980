"""Rounds a float model block after block, each linear seeing the errors of those before it.

Two residual streams run side by side over the same tokens: the student's, through blocks that are
ternary as far as they have been rounded, and the teacher's. The linears of a block that read the
same tensor are rounded together: products of the student's and the teacher's inputs are summed over
calibration tokens and over held-out ones, the weights are corrected for the difference and rounded,
and the next linears see the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack

import torch
from attrs import asdict, field, frozen
from torch import Tensor, nn

from arb_ternary_text.models.block import Block
from arb_ternary_text.models.parts import FloatLinear, rounded_to_int8
from arb_ternary_text.models.rms_norm import rms_norm
from arb_ternary_upcycle.float_model import FloatModel
from arb_ternary_upcycle.projection.config import ProjectionConfig
from arb_ternary_upcycle.projection.correction import corrected
from arb_ternary_upcycle.projection.rounded import Grouping, Rounded, joined
from arb_ternary_upcycle.projection.scales import absmean, least_squares
from arb_ternary_upcycle.projection.solve import project
from arb_ternary_upcycle.projection.statistics import InputStatistics
from arb_ternary_upcycle.projection.streams import Stream
from arb_ternary_upcycle.projection.sublayers import (
    inputs_of,
    linears_of,
    recorded_inputs,
    sublayers,
)
from arb_ternary_upcycle.store import Store

#: Tokens that run through a block together.
_TOKENS_AT_ONCE = 2048
#: Rows of an embedding that are rounded together.
_ROWS_AT_ONCE = 8192


@frozen(kw_only=True)
class Plan:
    """How a model is rounded.

    Attributes:
        config: options of the phase.
        grouping: what shares an exponent.
        activations: number format of the inputs of the student's linears, ``int8`` or ``float``.
        calibration: ids of calibration tokens, int64 ``[N, S]``.
        held_out: ids of held-out tokens, int64 ``[N', S]``, on which errors are only measured.
    """

    config: ProjectionConfig = field(factory=ProjectionConfig)
    grouping: Grouping = "row"
    activations: str
    calibration: Tensor = field(eq=False)
    held_out: Tensor = field(eq=False)


@frozen
class LinearError:
    """Relative error of a rounded linear's outputs, ``|difference| / |teacher's|``.

    Attributes:
        name: path of the linear.
        calibration, held_out: on these tokens; student and teacher read their own inputs.
        rounding: of rounding alone, on held-out tokens: both weights read the student's inputs.
        zeros: share of trits that are 0.
    """

    name: str
    calibration: float
    held_out: float
    rounding: float
    zeros: float

    def to_json(self, prefix: str = "") -> dict[str, str | float]:
        """Return plain numbers for reports, with ``prefix`` in front of the name."""
        return {**asdict(self), "name": prefix + self.name}


class SequentialProjection:
    """Rounds one model.

    Args:
        source: the weights that are rounded.
        teacher: model whose inputs the weights are corrected towards, in the same basis.
        plan: how.
        store: for the streams.
    """

    def __init__(self, source: FloatModel, teacher: FloatModel, plan: Plan, store: Store) -> None:
        self.source = source
        self.teacher = teacher
        self.plan = plan
        self.store = store
        self.tokens = torch.cat([plan.calibration, plan.held_out])
        count, length = self.tokens.shape
        self.at_once = max(1, _TOKENS_AT_ONCE // length)
        self.calibration = slice(0, len(plan.calibration))
        self.held_out = slice(len(plan.calibration), count)
        self.student_stream = self._stream("student", source.config.width)
        self.teacher_stream = self._stream("teacher", source.config.width)

    @torch.no_grad()
    def start(self, embedding: Tensor | None) -> None:
        """Write the streams in front of block 0.

        Args:
            embedding: the student's, float32 ``[V, D]``; None = that of the source.
        """
        with self.student_stream.writing(0) as student, self.teacher_stream.writing(0) as teacher:
            for part in torch.split(self.tokens, self.at_once):
                student(self.source.embed(part) if embedding is None else embedding[part])
                teacher(self.teacher.embed(part))

    def keep_only(self, block: int) -> None:
        """Delete everything on disk but the streams in front of ``block``."""
        self.student_stream.keep_only(block)
        self.teacher_stream.keep_only(block)
        for file in self.store.folder.glob("inputs-*"):
            file.unlink()

    def embedding(self, weight: Tensor) -> Rounded:
        """Round the rows of an embedding, each with an exponent of its own."""
        rule = absmean if self.plan.config.policy == "absmean" else least_squares
        return joined([rule(part, "row") for part in torch.split(weight, _ROWS_AT_ONCE)])

    @torch.no_grad()
    def block(self, number: int) -> tuple[dict[str, Rounded], list[LinearError]]:
        """Round a block and write the streams behind it.

        Returns:
            its linears by path, and their errors.
        """
        student = self.source.block(number)
        linears = linears_of(student)
        originals = {name: module.weight for name, module in linears.items()}
        for module in linears.values():
            if isinstance(module, FloatLinear):
                module.activations = "int8" if self.plan.activations == "int8" else "float"
        groups = self._sublayers(student, number)
        teacher_inputs = self._run_teacher(number, groups)

        rounded: dict[str, Rounded] = {}
        errors: list[LinearError] = []
        for names, inputs in zip(groups, teacher_inputs, strict=True):
            read = linears[names[0]]
            calibration = self._statistics(student, read, number, inputs, self.calibration)
            held_out = self._statistics(student, read, number, inputs, self.held_out)
            weights = {name: originals[name] for name in names}
            for name, made in self._round(weights, calibration).items():
                rounded[name] = made
                linears[name].weight = nn.Parameter(made.dense(), requires_grad=False)
                errors.append(_error(name, originals[name], made, calibration, held_out))

        with self.student_stream.writing(number + 1) as write:
            for x in self.student_stream.read(number, slice(None)):
                write(self.source.through(student, x))
        return rounded, errors

    @torch.no_grad()
    def head(self, weight: Tensor, gains: tuple[Tensor, Tensor]) -> tuple[Rounded, LinearError]:
        """Round the head ``[V, D]``, from the streams behind the last block.

        Args:
            weight: of the head.
            gains: of the student's final norm and of the teacher's.
        """
        calibration = self._head_statistics(gains, self.calibration)
        held_out = self._head_statistics(gains, self.held_out)
        rounded = self._round({"head": weight}, calibration)["head"]
        return rounded, _error("head", weight, rounded, calibration, held_out)

    def _stream(self, name: str, features: int) -> Stream:
        count, length = self.tokens.shape
        return Stream(self.store, name, (count, length, features), self.at_once)

    def _sublayers(self, block: Block, number: int) -> list[list[str]]:
        x = next(self.student_stream.read(number, slice(0, 1)))[:, :2]
        return sublayers(block, lambda: self.source.through(block, x))

    def _run_teacher(self, number: int, groups: list[list[str]]) -> list[Stream]:
        """Write the teacher's stream behind block ``number`` and its linears' inputs, by group."""
        teacher = self.teacher.block(number)
        known = linears_of(teacher)
        # The student may have linears that the teacher lacks, but none with an input of its own.
        watched = [next(known[name] for name in names if name in known) for names in groups]
        inputs = [
            self._stream(f"inputs-{index}", module.in_features)
            for index, module in enumerate(watched)
        ]
        with ExitStack() as stack:
            write = stack.enter_context(self.teacher_stream.writing(number + 1))
            keep = [stack.enter_context(each.writing(number)) for each in inputs]
            seen = stack.enter_context(recorded_inputs(watched))
            for y in self.teacher_stream.read(number, slice(None)):
                write(self.teacher.through(teacher, y))
                for append, entered in zip(keep, seen, strict=True):
                    append(entered)
        return inputs

    def _statistics(
        self, student: Block, linear: nn.Linear, number: int, teacher_inputs: Stream, part: slice
    ) -> InputStatistics:
        """Sum up what a linear of the student reads, and what the teacher's reads there."""
        statistics = InputStatistics(linear.in_features)
        streams = zip(
            self.student_stream.read(number, part), teacher_inputs.read(number, part), strict=True
        )
        for x, y in streams:
            entered = inputs_of(linear, lambda x=x: self.source.through(student, x))  # type: ignore[misc]
            statistics.add(self._as_read(entered.flatten(0, -2)), y.flatten(0, -2))
        return statistics

    def _head_statistics(self, gains: tuple[Tensor, Tensor], part: slice) -> InputStatistics:
        layers = self.source.config.layers
        statistics = InputStatistics(self.source.config.width)
        streams = zip(
            self.student_stream.read(layers, part),
            self.teacher_stream.read(layers, part),
            strict=True,
        )
        for x, y in streams:
            student = rms_norm(x, self.source.config.norm_eps).mul_(gains[0])
            teacher = rms_norm(y, self.teacher.config.norm_eps).mul_(gains[1])
            statistics.add(self._as_read(student.flatten(0, -2)), teacher.flatten(0, -2))
        return statistics

    def _as_read(self, student_MK: Tensor) -> Tensor:
        return rounded_to_int8(student_MK) if self.plan.activations == "int8" else student_MK

    def _round(
        self, weights: Mapping[str, Tensor], statistics: InputStatistics
    ) -> dict[str, Rounded]:
        """Round weights that read the same inputs."""
        if self.plan.grouping == "tensor":
            return {name: self._round_matrix(each, statistics) for name, each in weights.items()}
        # No exponent is shared between rows, so that all are rounded as one matrix.
        whole = self._round_matrix(torch.cat(list(weights.values())), statistics)
        parts = whole.split([len(each) for each in weights.values()])
        return dict(zip(weights, parts, strict=True))

    def _round_matrix(self, weight: Tensor, statistics: InputStatistics) -> Rounded:
        config = self.plan.config
        if config.correction:
            weight = corrected(weight, statistics.gram, statistics.cross, config.damping)
        return project(weight, config, self.plan.grouping, statistics.gram)


def _error(
    name: str,
    weight: Tensor,
    rounded: Rounded,
    calibration: InputStatistics,
    held_out: InputStatistics,
) -> LinearError:
    return LinearError(
        name,
        calibration.output_error(weight, rounded),
        held_out.output_error(weight, rounded),
        held_out.rounding_error(weight, rounded),
        float((rounded.trits == 0).to(torch.float64).mean()),
    )
