"""The residual streams of student and teacher at a block, sample by sample, from the cache where
they are.

Each sample runs alone, with or without a cache: the sums of a matrix product may depend on the
number of rows, and a sample's stream must not depend on the batch that it is in, or on which others
of it are cached.

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
    """What enters a block of the student, and what it is to give.

    Args:
        student: its blocks before the one in training are frozen.
        teacher: of the same sizes.
        target: see ``BlockwiseConfig.distill_target``.
        cache: None = everything is computed anew.

    Attributes:
        asked, found: streams that were asked for, and those of them that were cached.
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
        self.asked = self.found = 0

    def begin(self, block: int) -> None:
        """Block ``block`` is trained from now on: forget what it does not need."""
        if self._cache is not None:
            self._cache.keep_only(_places(block))

    @torch.no_grad()
    def entering(self, block: int, inputs_BS: Tensor, samples_B: Tensor) -> Tensor:
        """The student's residual stream before ``block``, ``[B, S, D]``; as if nothing in the model
        learned.
        """
        student = self._student
        return self._stream(
            "student",
            block,
            inputs_BS,
            samples_B,
            embed=student.embed,
            run=lambda number, x_BSD: student.run_blocks(x_BSD, number, number + 1),
        )

    @torch.no_grad()
    def wanted(self, block: int, inputs_BS: Tensor, samples_B: Tensor) -> Tensor:
        """What ``block`` is to give, of the teacher: float32 ``[B, S, D]``."""
        if self._target == "attention":
            return self._updates(block, inputs_BS, samples_B)
        return self._teacher_stream(block + 1, inputs_BS, samples_B)

    def _teacher_stream(self, level: int, inputs_BS: Tensor, samples_B: Tensor) -> Tensor:
        teacher = self._teacher
        return self._stream(
            "teacher", level, inputs_BS, samples_B, embed=teacher.embed, run=teacher.run_block
        )

    def _updates(self, block: int, inputs_BS: Tensor, samples_B: Tensor) -> Tensor:
        """The updates of the teacher's attention; the streams after its block are kept for the next
        one.
        """
        place = Place("attention", block)
        after = Place("teacher", block + 1)
        rows, missing = self._look_up(place, inputs_BS, samples_B)
        if missing:
            x_MSD = self._teacher_stream(block, inputs_BS[missing], samples_B[missing])
            attention = self._teacher.block(block).attention
            for row, x_SD in zip(missing, x_MSD, strict=True):
                with updates_of(attention) as updates:
                    y_1SD = self._teacher.run_block(block, x_SD[None])
                rows[row] = updates[0][0]
                self._keep(place, inputs_BS[row], samples_B[row], updates[0][0])
                self._keep(after, inputs_BS[row], samples_B[row], y_1SD[0])
        return torch.stack([found for found in rows if found is not None])

    def _stream(
        self,
        kind: Literal["student", "teacher"],
        level: int,
        inputs_BS: Tensor,
        samples_B: Tensor,
        *,
        embed: Callable[[Tensor], Tensor],
        run: Callable[[int, Tensor], Tensor],
    ) -> Tensor:
        """The residual stream after ``level`` blocks, from what is cached of it, or of the level
        before.
        """
        if level == 0:
            return torch.cat([embed(inputs_BS[row : row + 1]) for row in range(len(inputs_BS))])
        rows, missing = self._look_up(Place(kind, level), inputs_BS, samples_B)
        if not missing:
            return torch.stack([found for found in rows if found is not None])
        before = self._cached(Place(kind, level - 1), inputs_BS[missing], samples_B[missing])
        at: dict[int, tuple[int, Tensor]] = {}
        for row, x_SD in zip(missing, before, strict=True):
            at[row] = (
                (0, embed(inputs_BS[row : row + 1])) if x_SD is None else (level - 1, x_SD[None])
            )
        # Block by block, so that a teacher that does not fit into memory is read once for all
        # samples.
        for number in range(min(start for start, _ in at.values()), level):
            for row, (start, x_1SD) in at.items():
                if start <= number:
                    at[row] = (start, run(number, x_1SD))
        for row, (_, x_1SD) in at.items():
            rows[row] = x_1SD[0]
            self._keep(Place(kind, level), inputs_BS[row], samples_B[row], x_1SD[0])
        return torch.stack([found for found in rows if found is not None])

    def _look_up(
        self, place: Place, inputs_BS: Tensor, samples_B: Tensor
    ) -> tuple[list[Tensor | None], list[int]]:
        """What is cached of a batch, and the rows that are not."""
        rows = self._cached(place, inputs_BS, samples_B)
        missing = [row for row, found in enumerate(rows) if found is None]
        self.asked, self.found = self.asked + len(rows), self.found + len(rows) - len(missing)
        return rows, missing

    def _cached(self, place: Place, inputs_BS: Tensor, samples_B: Tensor) -> list[Tensor | None]:
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


def _places(block: int) -> Collection[Place]:
    """What training ``block`` reads and writes: its own streams, and those before it."""
    return (
        Place("student", block - 1),
        Place("student", block),
        Place("teacher", block),
        Place("teacher", block + 1),
        Place("attention", block),
    )


@contextmanager
def updates_of(attention: nn.Module) -> Iterator[list[Tensor]]:
    """What ``attention`` returns within the block, call by call."""
    found: list[Tensor] = []
    handle = attention.register_forward_hook(lambda _module, _inputs, output: found.append(output))
    try:
        yield found
    finally:
        handle.remove()
