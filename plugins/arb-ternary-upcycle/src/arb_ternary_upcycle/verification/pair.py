"""Teacher and student through the same batches, block by block: only one block of the teacher is in
memory at a time.

Shapes: ``B`` sequences, ``S`` positions, ``D`` width, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import torch
from torch import Tensor, nn

from arb_ternary.errors import ConfigError, DataError
from arb_ternary.protocols.data import MaskContext, MaskedBatch
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_train.evaluate import evaluation_mode
from arb_ternary_train.seeding import derived_generator, preserved_global_rng
from arb_ternary_upcycle.float_model import FloatModel
from arb_ternary_upcycle.stages import find_stage
from arb_ternary_upcycle.streams import updates_of
from arb_ternary_upcycle.teacher_module import Teacher

if TYPE_CHECKING:
    from arb_ternary_train.context import TrainingContext

#: Bytes of residual streams that are kept while a block runs over several batches.
_STREAM_BYTES: Final = 1 << 28
#: Logits that are computed at a time, of each of the two.
_LOGITS_AT_ONCE: Final = 1 << 24


class Side(Protocol):
    """One of the two models, block by block."""

    @property
    def layers(self) -> int: ...

    @property
    def width(self) -> int: ...

    def embed(self, tokens_BS: Tensor) -> Tensor: ...

    def run(self, number: int, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream after block ``number``, and the update that its attention gave, ``[B,
        S, D]``.
        """
        ...

    def logits(self, x_BSD: Tensor) -> Tensor: ...


class TeacherSide:
    """A float model on disk; the block in use stays in memory until another is asked for."""

    def __init__(self, model: FloatModel, device: torch.device) -> None:
        self.model = model
        self.layers = model.config.layers
        self.width = model.config.width
        self._blocks = Teacher(model, 0, device)

    def embed(self, tokens_BS: Tensor) -> Tensor:
        return self.model.embed(tokens_BS)

    def run(self, number: int, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
        with updates_of(self._blocks.block(number).attention) as updates:
            after_BSD = self._blocks.run_block(number, x_BSD)
        return after_BSD, updates[0]

    def logits(self, x_BSD: Tensor) -> Tensor:
        return self.model.logits(x_BSD)


class StudentSide:
    """The run's model."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self.layers = len(model.blocks)
        self.width = model.config.width

    def embed(self, tokens_BS: Tensor) -> Tensor:
        return self.model.embed(tokens_BS)

    def run(self, number: int, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
        attention = getattr(self.model.blocks[number], "attention", None)
        if not isinstance(attention, nn.Module):  # decoders of other plugins have other blocks
            raise ConfigError(
                f"block {number} of the model: it has no attention",
                "Only plain blocks of a decoder are compared.",
            )
        with updates_of(attention) as updates:
            after_BSD = self.model.run_blocks(x_BSD, number, number + 1)
        return after_BSD, updates[0]

    def logits(self, x_BSD: Tensor) -> Tensor:
        return self.model.logits(x_BSD)


class Pair:
    """A teacher and its student.

    Attributes:
        teacher, student: the two sides.
        device: where both compute.
    """

    def __init__(self, teacher: FloatModel, student: Decoder, device: torch.device) -> None:
        self.teacher = TeacherSide(teacher, device)
        self.student = StudentSide(student)
        self.device = device

    def require_same_layers(self) -> None:
        """Raises ConfigError where attention cannot be compared layer by layer."""
        mine = (self.student.layers, self.student.width)
        its = (self.teacher.layers, self.teacher.width)
        if mine != its:
            raise ConfigError(
                f"attention: the student has {mine[0]} layers of width {mine[1]}, the teacher "
                f"{its[0]} of {its[1]}",
                "Compare the logits alone: leave `attention` out.",
            )

    def streams(
        self,
        tokens: Sequence[Tensor],
        attention: Callable[[int, Tensor, Tensor], None] | None = None,
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """The residual streams after the last block, of each of the batches ``tokens`` in turn.

        Args:
            tokens: int64 ``[B, S]`` each; the shapes may differ.
            attention: called with layer, teacher's and student's update of its attention, both
                ``[B, S, D]``.

        Yields:
            number of the batch, the teacher's stream and the student's.
        """
        start = 0
        while start < len(tokens):
            stop = start
            held = 0
            while stop < len(tokens) and (stop == start or held < _STREAM_BYTES):
                held += 4 * tokens[stop].numel() * (self.teacher.width + self.student.width)
                stop += 1
            yield from self._group(range(start, stop), tokens, attention)
            start = stop

    @torch.no_grad()
    def _walk(
        self,
        numbers: Sequence[int],
        tokens: Sequence[Tensor],
        attention: Callable[[int, Tensor, Tensor], None] | None,
    ) -> list[list[Tensor]]:
        sides: tuple[Side, Side] = (self.teacher, self.student)
        x = [[side.embed(tokens[i].to(self.device)) for i in numbers] for side in sides]
        for layer in range(max(side.layers for side in sides)):
            for index in range(len(numbers)):
                updates = []
                for side, stream in zip(sides, x, strict=True):
                    if layer < side.layers:
                        stream[index], update = side.run(layer, stream[index])
                        updates.append(update)
                if attention is not None and len(updates) == len(sides):
                    attention(layer, updates[0], updates[1])
        return x

    def _group(
        self,
        numbers: Sequence[int],
        tokens: Sequence[Tensor],
        attention: Callable[[int, Tensor, Tensor], None] | None,
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        with evaluation_mode(self.student.model), preserved_global_rng(self.device):
            teacher, student = self._walk(numbers, tokens, attention)
        yield from zip(numbers, teacher, student, strict=True)


def logit_pieces(
    pair: Pair, teacher_BSD: Tensor, student_BSD: Tensor
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Logits of both after their last block, a few positions at a time.

    Yields:
        positions (into ``B * S``, row after row), the teacher's and the student's logits
        ``[positions, V]``, float32.
    """
    teacher = pair.teacher
    student = pair.student
    flat = (teacher_BSD.flatten(0, 1), student_BSD.flatten(0, 1))
    step = max(1, _LOGITS_AT_ONCE // max(1, teacher.model.vocabulary_size))
    for start in range(0, flat[0].shape[0], step):
        place = slice(start, min(start + step, flat[0].shape[0]))
        with torch.no_grad(), evaluation_mode(student.model):
            # One sequence of positions: a norm and a head look at nothing else.
            found = teacher.logits(flat[0][None, place])[0], student.logits(flat[1][None, place])[0]
        yield place, found[0].float(), found[1].float()


def open_pair(context: TrainingContext, teacher: Path | None) -> Pair:
    """The run's student and its teacher, the newest of the stages prepared and teacher, or the one
    that is named.

    Raises:
        ConfigError: the run's model is no decoder.
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
            "Give the data the teacher's tokenizer, and start the run anew.",
        )
    return Pair(found, student, context.device)


def held_out_batches(
    context: TrainingContext, batches: int | None, batch_size: int | None, block_size: int | None
) -> list[MaskedBatch]:
    """Held-out samples, masked as an evaluation of the run masks them.

    Args:
        context: the run.
        batches: how many, spread over all samples; None = all.
        batch_size: ``B``; None = as the run evaluates.
        block_size: ``S``; None = as the run evaluates.

    Raises:
        DataError: there is not one sample.
    """
    usual = context.shape_to_evaluate
    size = (batch_size or usual[0], block_size or usual[1])
    where = MaskContext(
        step=context.step,
        seed=context.seed,
        vocabulary_size=context.vocabulary_size,
        training=False,
    )
    return [
        context.masking.apply(batch, derived_generator(context.seed, "evaluation", index), where)
        for index, batch in enumerate(context.data.held_out(*size, batches))
    ]
