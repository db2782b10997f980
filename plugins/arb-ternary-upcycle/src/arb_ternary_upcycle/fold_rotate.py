"""The phase ``fold_rotate``: the stage ``prepared``, the teacher in a basis that rounds better."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define

from arb_ternary_train.seeding import derived_generator
from arb_ternary_upcycle.folding import Basis, untied
from arb_ternary_upcycle.rotation import random_rotation
from arb_ternary_upcycle.stage_options import FoldRotateConfig
from arb_ternary_upcycle.stage_phase import Stage, StagePhase
from arb_ternary_upcycle.stages import find_stage, stage_folder
from arb_ternary_upcycle.student import check_student

if TYPE_CHECKING:
    from arb_ternary_train.context import TrainingContext


@define(eq=False)
class FoldRotatePhase(StagePhase):
    """Writes the teacher's weights in another basis."""

    name = "fold_rotate"

    config: FoldRotateConfig

    def prepare(self, context: TrainingContext) -> Stage:
        """See ``StagePhase``."""
        options = self.config
        teacher = find_stage(context, None, ("teacher",))
        seed = context.seed if options.seed is None else options.seed
        residual = None
        if options.rotate:
            residual = random_rotation(teacher.config.width, derived_generator(seed, "residual"))
        values_seed = seed if options.rotate_values else None
        basis = Basis(teacher.config, options.fold, residual, values_seed)
        config = untied(teacher.config) if options.fold else teacher.config
        check_student(context.model, config)
        return Stage(
            folder=stage_folder(context, "prepared"),
            config=config,
            vocabulary_size=teacher.vocabulary_size,
            tokenizer=teacher.tokenizer,
            dtype=teacher.dtype,
            origin={
                "teacher": teacher.digest,
                "fold": options.fold,
                "rotate": options.rotate,
                "rotate_values": options.rotate_values,
                "seed": seed,
            },
            blocks=lambda: (
                basis.block(number, teacher.block_weights(number))
                for number in range(config.layers)
            ),
            ends=lambda: basis.ends(teacher.ends()),
        )
