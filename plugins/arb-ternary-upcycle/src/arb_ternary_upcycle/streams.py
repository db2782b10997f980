"""The residual streams of student and teacher at a block, from the cache if they are there.

Each sample runs alone, with or without a cache: the sums of a matrix product may depend on the
number of rows, and a sample's stream must not depend on its batch or on which samples are cached.

Shapes: ``B`` samples, ``S`` positions, ``D`` width.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

from arb_ternary_text.models.decoder import Decoder
from arb_ternary_upcycle.output_cache import OutputCache, Place, inputs_digest
from arb_ternary_upcycle.teacher_module import Teacher


class Streams:
    """Inputs and targets of a block of the student.

    Args:
        student: its blocks before the one in training are frozen.
        teacher: of the same sizes.
        target: see ``BlockwiseConfig.distill_target``.
        cache: None = everything is computed every time.
    """

    def __init__(
        self,
        student: Decoder,
        teacher: Teacher,
        target: Literal["residual", "attention"],
        cache: OutputCache | None,
    ) -> None:
        self._student = student
        self._teacher = teacher
        self._target = target
        self._cache = cache
        self._dtype: torch.dtype | None = None

    def begin(self, block: int) -> None:
        """Drop what is not needed to train ``block``."""
        if self._cache is not None:
            self._cache.keep_only(_places(block))

    @torch.no_grad()
    def inputs(self, block: int, inputs_BS: Tensor, samples_B: Tensor) -> Tensor:
        """Return the student's residual stream before ``block``, ``[B, S, D]``."""
        student = self._student

        def run(number: int, x_BSD: Tensor) -> Tensor:
            return student.run_blocks(x_BSD, number, number + 1)

        return self._stream("student", block, inputs_BS, samples_B, student.embed, run)

    @torch.no_grad()
    def targets(self, block: int, inputs_BS: Tensor, samples_B: Tensor) -> Tensor:
        """Return the teacher's output that ``block`` learns to give, float32 ``[B, S, D]``."""
        if self._target == "attention":
            return self._updates(block, inputs_BS, samples_B)
        return self._teacher_stream(block + 1, inputs_BS, samples_B)

    def _teacher_stream(self, level: int, inputs_BS: Tensor, samples_B: Tensor) -> Tensor:
        teacher = self._teacher
        return self._stream(
            "teacher", level, inputs_BS, samples_B, teacher.embed, teacher.run_block
        )

    def _updates(self, block: int, inputs_BS: Tensor, samples_B: Tensor) -> Tensor:
        """Return the updates of the teacher's attention; keep the streams for the next block."""
        rows = self._cached(Place("attention", block), inputs_BS, samples_B)
        missing = [row for row, found in enumerate(rows) if found is None]
        if missing:
            x_MSD = self._teacher_stream(block, inputs_BS[missing], samples_B[missing])
            attention = self._teacher.block(block).attention
            for row, x_SD in zip(missing, x_MSD, strict=True):
                with recorded_updates(attention) as updates:
                    y_1SD = self._teacher.run_block(block, x_SD[None])
                rows[row] = updates[0][0]
                inputs_S = inputs_BS[row]
                self._keep(Place("attention", block), inputs_S, samples_B[row], updates[0][0])
                self._keep(Place("teacher", block + 1), inputs_S, samples_B[row], y_1SD[0])
        return torch.stack([found for found in rows if found is not None])

    def _stream(
        self,
        kind: Literal["student", "teacher"],
        level: int,
        inputs_BS: Tensor,
        samples_B: Tensor,
        embed: Callable[[Tensor], Tensor],
        run: Callable[[int, Tensor], Tensor],
    ) -> Tensor:
        """Return the residual stream after ``level`` blocks.

        It continues from what is cached of that level, or of the level before.
        """
        if level == 0:
            return torch.cat([embed(inputs_BS[row : row + 1]) for row in range(len(inputs_BS))])
        rows = self._cached(Place(kind, level), inputs_BS, samples_B)
        missing = [row for row, found in enumerate(rows) if found is None]
        if missing:
            before = self._cached(Place(kind, level - 1), inputs_BS[missing], samples_B[missing])
            streams: dict[int, Tensor] = {}
            starts: dict[int, int] = {}
            for row, x_SD in zip(missing, before, strict=True):
                if x_SD is None:
                    streams[row] = embed(inputs_BS[row : row + 1])
                    starts[row] = 0
                else:
                    streams[row] = x_SD[None]
                    starts[row] = level - 1
            # Block by block, so that a teacher that does not fit into memory is read once for all
            # samples.
            for number in range(min(starts.values()), level):
                for row in missing:
                    if starts[row] <= number:
                        streams[row] = run(number, streams[row])
            for row in missing:
                rows[row] = streams[row][0]
                self._keep(Place(kind, level), inputs_BS[row], samples_B[row], streams[row][0])
        return torch.stack([found for found in rows if found is not None])

    def _cached(self, place: Place, inputs_BS: Tensor, samples_B: Tensor) -> list[Tensor | None]:
        """Return what is cached of each row of a batch, or None."""
        if self._cache is None or (place.level == 0 and place.kind != "attention"):
            return [None] * len(inputs_BS)
        found = [
            self._cache.get(place, sample, inputs_digest(inputs_S))
            for sample, inputs_S in zip(samples_B.tolist(), inputs_BS.cpu(), strict=True)
        ]
        dtype = torch.float32
        if place.kind == "student":
            if self._dtype is None:
                self._dtype = self._student.embed(inputs_BS[:1, :1]).dtype
            dtype = self._dtype
        return [None if each is None else each.to(inputs_BS.device, dtype) for each in found]

    def _keep(self, place: Place, inputs_S: Tensor, sample: Tensor, x_SD: Tensor) -> None:
        if self._cache is not None:
            self._cache.put(place, int(sample), inputs_digest(inputs_S), x_SD)


def block_output(
    student: Decoder, block: int, target: Literal["residual", "attention"], x_BSD: Tensor
) -> Tensor:
    """Return the stream after ``block`` of the student, or the update of its attention."""
    if target == "residual":
        return student.run_blocks(x_BSD, block, block + 1)
    with recorded_updates(student.blocks[block].get_submodule("attention")) as updates:
        student.run_blocks(x_BSD, block, block + 1)
    return updates[0]


def _places(block: int) -> Collection[Place]:
    """Return the places that training ``block`` reads and writes."""
    return (
        Place("student", block - 1),
        Place("student", block),
        Place("teacher", block),
        Place("teacher", block + 1),
        Place("attention", block),
    )


@contextmanager
def recorded_updates(attention: nn.Module) -> Iterator[list[Tensor]]:
    """Yield a list of what ``attention`` returns within the block, call by call."""
    found: list[Tensor] = []
    handle = attention.register_forward_hook(lambda _module, _inputs, output: found.append(output))
    try:
        yield found
    finally:
        handle.remove()
