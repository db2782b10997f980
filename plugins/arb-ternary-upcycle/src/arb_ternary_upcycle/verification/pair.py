"""Teacher and student on the same batches, with only one block of the teacher in memory at a time.

Shapes: ``B`` sequences, ``S`` positions, ``D`` width, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from arb_ternary.errors import ConfigError, DataError
from arb_ternary.protocols.data import MaskedBatch
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_train.evaluate import evaluation_mode
from arb_ternary_train.seeding import preserved_global_rng
from arb_ternary_upcycle.calibration import masked_batches
from arb_ternary_upcycle.float_model import FloatModel
from arb_ternary_upcycle.stages import find_stage
from arb_ternary_upcycle.streams import attention_of, recorded_updates
from arb_ternary_upcycle.teacher_module import Teacher

if TYPE_CHECKING:
    from arb_ternary_train.context import TrainingContext

#: Bytes of residual streams that are kept while a block runs over several batches.
_STREAM_BYTES: Final = 1 << 28
#: Logits of each model that are computed at a time.
_LOGITS_AT_ONCE: Final = 1 << 24

#: Called with a layer, and the teacher's and the student's update of its attention, ``[B, S, D]``.
OnAttention = Callable[[int, Tensor, Tensor], None]


class Pair:
    """A teacher and its student.

    Attributes:
        teacher: the float model on disk.
        student: the run's model.
        device: where both compute.
        models: both, the teacher first, of which one block is in memory at a time.
    """

    def __init__(self, teacher: FloatModel, student: Decoder, device: torch.device) -> None:
        self.teacher = teacher
        self.student = student
        self.device = device
        self.models: tuple[Teacher | Decoder, ...] = (Teacher(teacher, 0, device), student)
        self.configs = (teacher.config, student.config)

    def streams(
        self, tokens: Sequence[Tensor], on_attention: OnAttention | None = None
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Run both models.

        Args:
            tokens: batches, int64 ``[B, S]`` each; the shapes may differ.
            on_attention: called for every batch and layer.

        Yields:
            number of the batch, the teacher's residual stream after its last block, and the
            student's.
        """
        for numbers in self._groups(tokens):
            group = [tokens[number].to(self.device) for number in numbers]
            with evaluation_mode(self.student), preserved_global_rng(self.device):
                teacher, student = self._run(group, on_attention)
            yield from zip(numbers, teacher, student, strict=True)

    def _groups(self, tokens: Sequence[Tensor]) -> Iterator[list[int]]:
        """Yield numbers of batches whose residual streams are in memory together."""
        group: list[int] = []
        used = 0
        for number, batch in enumerate(tokens):
            group.append(number)
            used += 4 * batch.numel() * sum(config.width for config in self.configs)
            if used >= _STREAM_BYTES:
                yield group
                group = []
                used = 0
        if group:
            yield group

    @torch.no_grad()
    def _run(
        self, tokens: Sequence[Tensor], on_attention: OnAttention | None
    ) -> list[list[Tensor]]:
        streams = [[model.embed(batch) for batch in tokens] for model in self.models]
        layers = [config.layers for config in self.configs]
        for layer in range(max(layers)):
            for index in range(len(tokens)):
                updates = []
                for model, depth, stream in zip(self.models, layers, streams, strict=True):
                    if layer < depth:
                        with recorded_updates(attention_of(model, layer)) as recorded:
                            stream[index] = model.run_blocks(stream[index], layer, layer + 1)
                        updates += recorded
                if on_attention is not None and len(updates) == len(self.models):
                    on_attention(layer, updates[0], updates[1])
        return streams

    def logits(
        self, teacher_BSD: Tensor, student_BSD: Tensor
    ) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Compute the logits of both models after their last blocks, some positions at a time.

        Yields:
            positions (into ``B * S``, row after row), the teacher's and the student's logits
            ``[positions, V]``, float32.
        """
        flat = (teacher_BSD.flatten(0, 1), student_BSD.flatten(0, 1))
        count = flat[0].shape[0]
        step = max(1, _LOGITS_AT_ONCE // max(1, self.teacher.vocabulary_size))
        for start in range(0, count, step):
            place = slice(start, min(start + step, count))
            with torch.no_grad(), evaluation_mode(self.student):
                # As one sequence: norm and head treat each position alone.
                teacher, student = (
                    model.logits(x[None, place])[0].float()
                    for model, x in zip(self.models, flat, strict=True)
                )
            yield place, teacher, student


def open_pair(context: TrainingContext, teacher: Path | None) -> Pair:
    """Open the run's student and its teacher.

    The teacher is the one that is named, or the newest of the stages prepared and teacher.

    Raises:
        ConfigError: the run's model is not a decoder.
        DataError: there is no teacher, or it has another number of ids.
    """
    student = context.model
    if not isinstance(student, Decoder):
        raise ConfigError(
            f"model: only a decoder is compared with a teacher, not a {type(student).__name__}",
            "Use `model: {name: decoder, ...}`.",
        )
    found = find_stage(context, teacher, ("prepared", "teacher"))
    if found.vocabulary_size != student.vocabulary_size:
        raise DataError(
            f"{found.path}: the teacher has {found.vocabulary_size:,} ids, the student "
            f"{student.vocabulary_size:,}",
            "Give the data the teacher's tokenizer, and start the run again.",
        )
    return Pair(found, student, context.device)


def held_out_batches(
    context: TrainingContext, batches: int | None, batch_size: int | None, block_size: int | None
) -> list[MaskedBatch]:
    """Return held-out samples, masked as in an evaluation of the run.

    Args:
        context: the run.
        batches: how many, spread over all samples; None = all.
        batch_size: ``B``; None = as the run evaluates.
        block_size: ``S``; None = as the run evaluates.

    Raises:
        DataError: there is not one sample.
    """
    usual = context.shape_to_evaluate
    samples = context.data.held_out(batch_size or usual[0], block_size or usual[1], batches)
    return list(masked_batches(context, samples, step=context.step))
