"""The residual streams of student and teacher at a block, from the cache if they are there.

Each sample runs alone, with or without a cache: the sums of a matrix product may depend on the
number of rows, and a sample's stream must not depend on its batch or on which samples are cached.

Shapes: ``B`` samples, ``S`` positions, ``D`` width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from arb_ternary.errors import ConfigError
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_train.activation_cache import (
    ActivationCache,
    module_version,
    sample_key,
    sample_keys,
)
from arb_ternary_upcycle.teacher_module import Teacher

#: Where a stream arises. ``student`` and ``teacher``: after a number of blocks. ``attention``: the
#: update of the teacher's attention in a block.
Kind: TypeAlias = Literal["student", "teacher", "attention"]


class Streams:
    """Inputs and targets of a block of the student.

    Args:
        student: its blocks before the one in training are frozen.
        teacher: of the same sizes.
        target: see ``BlockwiseConfig.distill_target``.
        cache: None = everything is computed every time.
        computed_by: what decides the streams beside the student's weights: the teacher's weights,
            number format and device.
    """

    def __init__(
        self,
        student: Decoder,
        teacher: Teacher,
        target: Literal["residual", "attention"],
        cache: ActivationCache | None = None,
        computed_by: str = "",
    ) -> None:
        self._student = student
        self._teacher = teacher
        self._target = target
        self._cache = cache
        self._computed_by = computed_by
        # Of the student after each number of blocks.
        self._versions: list[str] = []
        self._dtype: torch.dtype | None = None

    def begin(self, block: int) -> None:
        """Drop what is not needed to train ``block``."""
        if self._cache is None:
            return
        places: list[tuple[Kind, int]] = [
            ("student", block),
            ("teacher", block),
            ("teacher", block + 1),
            ("attention", block),
        ]
        if block:
            places.append(("student", block - 1))
        self._cache.keep_only(self._version(kind, level) for kind, level in places)

    @torch.no_grad()
    def inputs(self, block: int, inputs_BS: Tensor, samples_B: Tensor) -> Tensor:
        """Return the student's residual stream before ``block``, ``[B, S, D]``."""
        return self._stream("student", block, inputs_BS, samples_B)

    @torch.no_grad()
    def targets(self, block: int, inputs_BS: Tensor, samples_B: Tensor) -> Tensor:
        """Return the teacher's output that ``block`` learns to give, float32 ``[B, S, D]``."""
        if self._target == "attention":
            return self._updates(block, inputs_BS, samples_B)
        return self._stream("teacher", block + 1, inputs_BS, samples_B)

    def output(self, block: int, x_BSD: Tensor) -> Tensor:
        """Return what ``block`` of the student makes of its inputs, to be compared with targets."""
        if self._target == "residual":
            return self._student.run_blocks(x_BSD, block, block + 1)
        with recorded_updates(attention_of(self._student, block)) as updates:
            self._student.run_blocks(x_BSD, block, block + 1)
        return updates[0]

    def _updates(self, block: int, inputs_BS: Tensor, samples_B: Tensor) -> Tensor:
        """Return the updates of the teacher's attention; keep the streams for the next block."""

        def compute(missing: list[int]) -> Iterator[Tensor]:
            x_MSD = self._stream("teacher", block, inputs_BS[missing], samples_B[missing])
            attention = attention_of(self._teacher, block)
            for row, x_SD in zip(missing, x_MSD, strict=True):
                with recorded_updates(attention) as updates:
                    y_1SD = self._teacher.run_blocks(x_SD[None], block, block + 1)
                if self._cache is not None:
                    key = sample_key(int(samples_B[row]), inputs_BS[row])
                    self._cache.put(self._version("teacher", block + 1), key, y_1SD[0])
                yield updates[0][0]

        return self._fetch("attention", block, inputs_BS, samples_B, compute)

    def _stream(
        self,
        kind: Literal["student", "teacher"],
        level: int,
        inputs_BS: Tensor,
        samples_B: Tensor,
    ) -> Tensor:
        """Return the residual stream after ``level`` blocks.

        It continues from what is cached of that level, or of the level before.
        """
        model = self._student if kind == "student" else self._teacher
        if level == 0:
            return torch.cat([model.embed(row_S[None]) for row_S in inputs_BS])

        def compute(missing: list[int]) -> list[Tensor]:
            streams: dict[int, Tensor] = {}
            starts: dict[int, int] = {}
            for row in missing:
                x_SD = self._cached(kind, level - 1, inputs_BS[row], int(samples_B[row]))
                if x_SD is None:
                    streams[row] = model.embed(inputs_BS[row : row + 1])
                    starts[row] = 0
                else:
                    streams[row] = x_SD[None]
                    starts[row] = level - 1
            # Block by block, so that a teacher that does not fit into memory is read once for all
            # samples.
            for number in range(min(starts.values()), level):
                for row in missing:
                    if starts[row] <= number:
                        streams[row] = model.run_blocks(streams[row], number, number + 1)
            return [streams[row][0] for row in missing]

        return self._fetch(kind, level, inputs_BS, samples_B, compute)

    # --- the cache

    def _fetch(
        self,
        kind: Kind,
        level: int,
        inputs_BS: Tensor,
        samples_B: Tensor,
        compute: Callable[[list[int]], Iterator[Tensor] | list[Tensor]],
    ) -> Tensor:
        """Return what is cached of a batch; ``compute`` makes the rows that are missing."""
        if self._cache is None:
            return torch.stack(list(compute(list(range(len(inputs_BS))))))
        keys = sample_keys(samples_B, inputs_BS)
        rows = self._cache.fetch(self._version(kind, level), keys, compute)
        return torch.stack([self._as_computed(kind, row, inputs_BS) for row in rows])

    def _cached(self, kind: Kind, level: int, inputs_S: Tensor, sample: int) -> Tensor | None:
        """Return what is cached of one sample; nothing is after no block."""
        if self._cache is None or level == 0:
            return None
        found = self._cache.get(self._version(kind, level), sample_key(sample, inputs_S))
        return None if found is None else self._as_computed(kind, found, inputs_S)

    def _as_computed(self, kind: Kind, cached: Tensor, inputs: Tensor) -> Tensor:
        """Return cached numbers on the device of ``inputs``, in the dtype that computed them."""
        dtype = torch.float32
        if kind == "student":
            if self._dtype is None:
                self._dtype = self._student.embed(inputs.reshape(-1)[None, :1]).dtype
            dtype = self._dtype
        return cached.to(inputs.device, dtype)

    def _version(self, kind: Kind, level: int) -> str:
        """Return the version of what computes a stream."""
        if kind != "student":
            return f"{self._computed_by} {kind} {level}"
        versions = self._versions
        if not versions:
            versions.append(module_version(self._student.embedding, base=self._computed_by))
        while len(versions) <= level:
            block = self._student.blocks[len(versions) - 1]
            versions.append(module_version(block, base=versions[-1]))
        return versions[level]


def attention_of(model: Decoder | Teacher, number: int) -> nn.Module:
    """Return the attention of a block.

    Raises:
        ConfigError: it has none.
    """
    block = model.block(number) if isinstance(model, Teacher) else model.blocks[number]
    found = getattr(block, "attention", None)
    if not isinstance(found, nn.Module):  # decoders of other plugins have other blocks
        raise ConfigError(
            f"block {number} of the model: it has no attention",
            "Only plain blocks of a decoder can be compared.",
        )
    return found


@contextmanager
def recorded_updates(attention: nn.Module) -> Iterator[list[Tensor]]:
    """Yield a list of what ``attention`` returns within the block, call by call."""
    found: list[Tensor] = []
    handle = attention.register_forward_hook(lambda _module, _inputs, output: found.append(output))
    try:
        yield found
    finally:
        handle.remove()
