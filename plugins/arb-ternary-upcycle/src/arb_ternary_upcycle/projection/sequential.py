"""A float model made ternary block after block, each sub-layer seeing the errors of those before
it.

Two residual streams run side by side over the same tokens: the student's, through blocks that are
ternary as far as they have been rounded, and the teacher's. Of a block, the linears that read the
same tensor are rounded together: first what the student's and the teacher's inputs are there is
summed up, over calibration tokens and over held-out ones; then weights are corrected for the
difference and rounded, and the next sub-layer sees the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from attrs import asdict, field, frozen
from torch import Tensor, nn

from arb_ternary_text.models.block import Block
from arb_ternary_text.models.parts import FloatLinear, rounded_to_int8
from arb_ternary_text.models.rms_norm import rms_norm
from arb_ternary_upcycle.float_model import FloatModel
from arb_ternary_upcycle.projection.correction import corrected
from arb_ternary_upcycle.projection.rounded import Rounded
from arb_ternary_upcycle.projection.scales import absmean, least_squares
from arb_ternary_upcycle.projection.solve import Recipe, project
from arb_ternary_upcycle.projection.statistics import InputStatistics
from arb_ternary_upcycle.projection.streams import Stream
from arb_ternary_upcycle.projection.sublayers import entering, linears_of, sublayers, watched

#: Tokens that run through a block together.
_TOKENS_AT_ONCE = 2048
#: Rows of an embedding that are rounded together.
_ROWS_AT_ONCE = 8192


@frozen(kw_only=True)
class Plan:
    """What is rounded, and how.

    Attributes:
        recipe: how matrices are rounded.
        correction: whether weights make up for the errors in their inputs.
        activations: of the student: what enters its linears is rounded to int8, or float.
        calibration: ids of calibration tokens, int64 ``[N, S]``.
        held_out: ids of held-out tokens, int64 ``[N', S]``; on these, errors are only measured.
    """

    recipe: Recipe
    correction: bool
    activations: str
    calibration: Tensor = field(eq=False)
    held_out: Tensor = field(eq=False)


@frozen
class LinearError:
    """How far the outputs of a rounded linear are from the teacher's, ``|difference| /
    |teacher's|``.

    Attributes:
        name: path of the linear.
        calibration, held_out: over these tokens; the student reads its own inputs, the teacher the
            teacher's.
        rounding: over held-out tokens, of rounding alone: both weights read the student's inputs.
        zeros: share of trits that are 0.
    """

    name: str
    calibration: float
    held_out: float
    rounding: float
    zeros: float

    def to_json(self, prefix: str = "") -> dict[str, str | float]:
        """Plain numbers for reports, with ``prefix`` before the name."""
        return {**asdict(self), "name": prefix + self.name}


class SequentialProjection:
    """The projection of one model.

    Args:
        source: the weights that are rounded.
        teacher: whose inputs they are corrected towards, in the same basis.
        plan: how.
        folder: for the streams.
    """

    def __init__(self, source: FloatModel, teacher: FloatModel, plan: Plan, folder: Path) -> None:
        self.source = source
        self.teacher = teacher
        self.plan = plan
        self.folder = folder
        tokens = torch.cat([plan.calibration, plan.held_out])
        self.tokens = tokens
        self.parts = (slice(0, len(plan.calibration)), slice(len(plan.calibration), len(tokens)))
        shape = (tokens.shape[0], tokens.shape[1], source.config.width)
        at_once = max(1, _TOKENS_AT_ONCE // tokens.shape[1])
        self.student_stream = Stream(folder, "student", shape, at_once)
        self.teacher_stream = Stream(folder, "teacher", shape, at_once)

    @torch.no_grad()
    def start(self, embedding: Tensor | None) -> None:
        """Write the streams in front of block 0.

        Args:
            embedding: the student's, float32 ``[V, D]``; None = that of the source.
        """
        with self.student_stream.writing(0) as student, self.teacher_stream.writing(0) as teacher:
            for part in torch.split(self.tokens, self.student_stream.at_once):
                student(self.source.embed(part) if embedding is None else embedding[part])
                teacher(self.teacher.embed(part))

    def embedding(self, weight: Tensor) -> Rounded:
        """The rows of an embedding, which nothing enters but ids: rounded for themselves, one
        exponent a row.
        """
        rule = absmean if self.plan.recipe.policy == "absmean" else least_squares
        found = [rule(part, "row") for part in torch.split(weight, _ROWS_AT_ONCE)]
        trits, exponent, residue = (
            torch.cat([getattr(each, name) for each in found])
            for name in ("trits", "exponent", "residue")
        )
        return Rounded(trits, exponent, residue, weight.shape[1])

    @torch.no_grad()
    def block(self, number: int) -> tuple[dict[str, Rounded], list[LinearError]]:
        """Round block ``number`` and write the streams behind it: its linears by path, and their
        errors.
        """
        student = self.source.block(number)
        originals = {name: module.weight for name, module in linears_of(student).items()}
        for module in linears_of(student).values():
            if isinstance(module, FloatLinear):
                module.activations = "int8" if self.plan.activations == "int8" else "float"
        groups = self._sublayers(student, number)
        inputs = self._run_teacher(number, groups)
        rounded: dict[str, Rounded] = {}
        errors: list[LinearError] = []
        for names, teacher_inputs in zip(groups, inputs, strict=True):
            calibration, held_out = (
                self._statistics(student, number, names[0], teacher_inputs, part)
                for part in self.parts
            )
            found = self._round({name: originals[name] for name in names}, calibration)
            for name in names:
                student.get_submodule(name).weight = nn.Parameter(
                    found[name].dense(), requires_grad=False
                )
                errors.append(_error(name, originals[name], found[name], calibration, held_out))
            rounded |= found
        with self.student_stream.writing(number + 1) as write:
            for x in self.student_stream.read(number, slice(None)):
                write(self.source.through(student, x))
        return rounded, errors

    def forget(self, kept: int) -> None:
        """Remove everything on disk but the streams in front of block ``kept``."""
        self.student_stream.forget(kept)
        self.teacher_stream.forget(kept)
        for file in self.folder.glob("inputs-*"):
            file.unlink()

    @torch.no_grad()
    def head(self, weight: Tensor, gains: tuple[Tensor, Tensor]) -> tuple[Rounded, LinearError]:
        """The head ``[V, D]``, from the streams behind the last block.

        Args:
            weight: of the head.
            gains: of the student's final norm and of the teacher's.
        """
        layers = self.source.config.layers
        found = []
        for part in self.parts:
            statistics = InputStatistics(weight.shape[1])
            streams = (
                self.student_stream.read(layers, part),
                self.teacher_stream.read(layers, part),
            )
            for x, y in zip(*streams, strict=True):
                normed = (
                    rms_norm(z, model.config.norm_eps).mul_(gain).flatten(0, -2)
                    for z, model, gain in zip(
                        (x, y), (self.source, self.teacher), gains, strict=True
                    )
                )
                student_MK, teacher_MK = normed
                statistics.add(self._entering(student_MK), teacher_MK)
            found.append(statistics)
        rounded = self._round({"head": weight}, found[0])["head"]
        return rounded, _error("head", weight, rounded, *found)

    def _sublayers(self, block: Block, number: int) -> list[list[str]]:
        x = next(self.student_stream.read(number, slice(0, 1)))[:, :2]
        return sublayers(block, lambda: self.source.through(block, x))

    def _run_teacher(self, number: int, groups: list[list[str]]) -> list[Stream]:
        """The teacher's stream behind block ``number``, and what entered its linears at each
        sub-layer.
        """
        teacher = self.teacher.block(number)
        known = linears_of(teacher)
        watch = [next(known[name] for name in names if name in known) for names in groups]
        sequences, length, _ = self.teacher_stream.shape
        inputs = [
            Stream(
                self.folder,
                f"inputs-{place}",
                (sequences, length, module.in_features),
                self.teacher_stream.at_once,
            )
            for place, module in enumerate(watch)
        ]
        with ExitStack() as stack:
            write = stack.enter_context(self.teacher_stream.writing(number + 1))
            keep = [stack.enter_context(each.writing(number)) for each in inputs]
            seen = stack.enter_context(watched(watch))
            for y in self.teacher_stream.read(number, slice(None)):
                write(self.teacher.through(teacher, y))
                for each, entered in zip(keep, seen, strict=True):
                    each(entered)
        return inputs

    def _statistics(
        self, student: Block, number: int, name: str, teacher_inputs: Stream, part: slice
    ) -> InputStatistics:
        """Of what enters the linear ``name`` of the student, and of what entered the teacher's
        there.
        """
        here = student.get_submodule(name)
        found = InputStatistics(teacher_inputs.shape[2])
        for x, y in zip(
            self.student_stream.read(number, part), teacher_inputs.read(number, part), strict=True
        ):
            entered = entering(here, lambda x=x: self.source.through(student, x))  # type: ignore[misc]
            found.add(self._entering(entered.flatten(0, -2)), y.flatten(0, -2))
        return found

    def _entering(self, student_MK: Tensor) -> Tensor:
        return rounded_to_int8(student_MK) if self.plan.activations == "int8" else student_MK

    def _round(
        self, weights: Mapping[str, Tensor], statistics: InputStatistics
    ) -> dict[str, Rounded]:
        """Weights that read the same inputs; those whose rows have exponents of their own as one
        matrix.
        """
        recipe = self.plan.recipe
        if recipe.grouping == "tensor" and len(weights) > 1:
            return {
                name: self._round({name: weight}, statistics)[name]
                for name, weight in weights.items()
            }
        target = torch.cat(list(weights.values()))
        if self.plan.correction:
            target = corrected(target, statistics.gram, statistics.cross, recipe.damping)
        whole = project(target, recipe, statistics.gram)
        sizes = [weight.shape[0] for weight in weights.values()]
        parts = zip(
            weights,
            *(torch.split(each, sizes) for each in (whole.trits, whole.exponent, whole.residue)),
            strict=True,
        )
        return {
            name: Rounded(trits, exponent, left, whole.size)
            for name, trits, exponent, left in parts
        }


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
