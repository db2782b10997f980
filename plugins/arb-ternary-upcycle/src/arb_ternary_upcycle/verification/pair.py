"""Teacher and student on the same batches, with only one block of the teacher in memory at a time.

Shapes: ``B`` sequences, ``S`` positions, ``D`` width, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from attrs import frozen
from torch import Tensor, nn

from arb_ternary.errors import ConfigError, DataError
from arb_ternary.protocols.data import MaskedBatch
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_train.evaluate import evaluation_mode
from arb_ternary_train.seeding import preserved_global_rng
from arb_ternary_upcycle.calibration import masked_batches
from arb_ternary_upcycle.float_model import FloatModel
from arb_ternary_upcycle.stages import find_stage
from arb_ternary_upcycle.streams import recorded_updates
from arb_ternary_upcycle.teacher_module import Teacher

if TYPE_CHECKING:
    from arb_ternary_train.context import TrainingContext

#: Bytes of residual streams that are kept while a block runs over several batches.
_STREAM_BYTES: Final = 1 << 28
#: Logits of each model that are computed at a time.
_LOGITS_AT_ONCE: Final = 1 << 24

#: Called with a layer, and the teacher's and the student's update of its attention, ``[B, S, D]``.
OnAttention = Callable[[int, Tensor, Tensor], None]


@frozen(eq=False)
class Side:
    """One of the two models, block by block.

    Attributes:
        layers, width: its sizes.
        embed: returns the residual stream before the first block.
        run_block: returns the residual stream after a block.
        attention: returns the attention of a block.
        logits: applies final norm and head.
    """

    layers: int
    width: int
    embed: Callable[[Tensor], Tensor]
    run_block: Callable[[int, Tensor], Tensor]
    attention: Callable[[int], nn.Module]
    logits: Callable[[Tensor], Tensor]


def teacher_side(model: FloatModel, device: torch.device) -> Side:
    """Run a float model on disk; the block in use stays in memory until the next is needed."""
    blocks = Teacher(model, 0, device)
    return Side(
        layers=model.config.layers,
        width=model.config.width,
        embed=model.embed,
        run_block=blocks.run_block,
        attention=lambda number: blocks.block(number).attention,
        logits=model.logits,
    )


def student_side(model: Decoder) -> Side:
    """Run the run's model."""

    def attention(number: int) -> nn.Module:
        found = getattr(model.blocks[number], "attention", None)
        if not isinstance(found, nn.Module):  # decoders of other plugins have other blocks
            raise ConfigError(
                f"block {number} of the model: it has no attention",
                "Only plain blocks of a decoder can be compared.",
            )
        return found

    return Side(
        layers=len(model.blocks),
        width=model.config.width,
        embed=model.embed,
        run_block=lambda number, x_BSD: model.run_blocks(x_BSD, number, number + 1),
        attention=attention,
        logits=model.logits,
    )


class Pair:
    """A teacher and its student.

    Attributes:
        teacher: the float model on disk.
        student: the run's model.
        device: where both compute.
        sides: both, the teacher first.
    """

    def __init__(self, teacher: FloatModel, student: Decoder, device: torch.device) -> None:
        self.teacher = teacher
        self.student = student
        self.device = device
        self.sides = (teacher_side(teacher, device), student_side(student))

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
            used += 4 * batch.numel() * sum(side.width for side in self.sides)
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
        streams = [[side.embed(batch) for batch in tokens] for side in self.sides]
        for layer in range(max(side.layers for side in self.sides)):
            for index in range(len(tokens)):
                updates = []
                for side, stream in zip(self.sides, streams, strict=True):
                    if layer < side.layers:
                        with recorded_updates(side.attention(layer)) as recorded:
                            stream[index] = side.run_block(layer, stream[index])
                        updates += recorded
                if on_attention is not None and len(updates) == len(self.sides):
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
                    side.logits(x[None, place])[0].float()
                    for side, x in zip(self.sides, flat, strict=True)
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
