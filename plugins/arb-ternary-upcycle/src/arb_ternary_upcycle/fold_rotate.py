"""The phase ``fold_rotate``: the stage ``prepared``, the teacher in a basis that rounds better."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from arb_ternary_train.seeding import derived_generator
from arb_ternary_upcycle.float_model import FloatModel
from arb_ternary_upcycle.float_model_writer import FloatModelWriter
from arb_ternary_upcycle.folding import Basis, untied
from arb_ternary_upcycle.rotation import random_rotation
from arb_ternary_upcycle.stage_options import FoldRotateConfig
from arb_ternary_upcycle.stage_phase import StagePhase
from arb_ternary_upcycle.stages import find_stage, stage_folder
from arb_ternary_upcycle.student import check_student

if TYPE_CHECKING:
    from arb_ternary_train.context import TrainingContext


class FoldRotatePhase(StagePhase):
    """Writes the teacher's weights in another basis."""

    name = "fold_rotate"

    def __init__(self, config: FoldRotateConfig) -> None:
        self.config = config
        self._work: tuple[FloatModel, Basis] | None = None

    def writer(self, context: TrainingContext) -> FloatModelWriter:
        """See ``StagePhase``."""
        options = self.config
        teacher = find_stage(context, None, ("teacher",))
        seed = context.seed if options.seed is None else options.seed
        rotation = (
            random_rotation(teacher.config.width, derived_generator(seed, "residual"))
            if options.rotate
            else None
        )
        basis = Basis(
            teacher.config, options.fold, rotation, seed if options.rotate_values else None
        )
        self._work = teacher, basis
        config = untied(teacher.config) if options.fold else teacher.config
        check_student(context.model, config)
        return FloatModelWriter(
            stage_folder(context, "prepared"),
            config,
            teacher.vocabulary_size,
            teacher.tokenizer,
            teacher.dtype,
            origin={
                "teacher": teacher.digest,
                "fold": options.fold,
                "rotate": options.rotate,
                "rotate_values": options.rotate_values,
                "seed": seed,
            },
        )

    def ends(self) -> Mapping[str, Tensor]:
        """See ``StagePhase``."""
        teacher, basis = self._parts
        return basis.ends(teacher.ends())

    def blocks(self, done: frozenset[int]) -> Iterator[tuple[int, Mapping[str, Tensor]]]:
        """See ``StagePhase``."""
        teacher, basis = self._parts
        for number in range(teacher.config.layers):
            if number not in done:
                yield number, basis.block(number, teacher.weights(f"blocks.{number}."))

    def judge(self, context: TrainingContext, model: FloatModel) -> Mapping[str, float]:
        """See ``StagePhase``."""
        return {}

    @property
    def _parts(self) -> tuple[FloatModel, Basis]:
        if self._work is None:
            raise RuntimeError("the teacher has not been found")
        return self._work


def build(config: FoldRotateConfig) -> FoldRotatePhase:
    """The factory that the phase ``fold_rotate`` registers."""
    return FoldRotatePhase(config)
