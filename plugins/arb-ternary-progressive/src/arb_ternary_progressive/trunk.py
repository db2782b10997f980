"""The hidden states that a frozen trunk hands to the stack above it: looked up, or computed and
kept.

Shapes: ``B`` samples, ``S`` positions, ``D`` width.
"""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING

import attrs
import torch
from torch import Tensor

from arb_ternary.errors import UsageProblem
from arb_ternary_progressive.activation_cache import ActivationCache, trunk_version
from arb_ternary_progressive.config import CacheDtype
from arb_ternary_progressive.hidden_codec import HiddenCodec

if TYPE_CHECKING:
    from arb_ternary_progressive.rack import Rack


class TrunkStream:
    """What the first ``until_stack`` stacks of a rack make of a batch, without a gradient.

    Between two stacks the residual stream takes the number format of the cache, with a cache and
    without one, so that both train the next stack on the same numbers. In ``float32`` that changes
    nothing.

    A sample of the trunk before this one (one stack less) is not lost when the trunk has grown:
    where the cache still has it, only the stack that was added is computed, and what comes out
    takes its place.

    Args:
        rack: its first ``until_stack`` stacks, and its embedding, are frozen.
        until_stack: how many stacks the trunk has; at least 1.
        cache: where hidden states are kept; None = they are computed every time.
        dtype: the number format between stacks where there is no cache.

    Raises:
        UsageProblem: something in the trunk can learn.
    """

    def __init__(
        self,
        rack: Rack,
        until_stack: int,
        *,
        cache: ActivationCache | None = None,
        dtype: CacheDtype = "float32",
    ) -> None:
        stacks = len(rack.ordered_stacks)
        if not 1 <= until_stack < stacks:
            raise UsageProblem(
                f"trunk: a rack of {stacks} stacks has no trunk of {until_stack} with a stack "
                f"above it"
            )
        self.rack = rack
        self.until_stack = until_stack
        self.cache = cache
        self.codec = HiddenCodec(dtype) if cache is None else cache.codec
        #: Versions of the trunk, and of the one that is a stack shorter.
        self.version = trunk_version(
            *rack.input_end, base=repr(attrs.evolve(rack.config, layers=1))
        )
        self.shorter = ""
        for stack in rack.ordered_stacks[:until_stack]:
            self.version, self.shorter = trunk_version(stack, base=self.version), self.version
        if cache is not None:
            cache.keep_only((self.version, self.shorter))

    @torch.no_grad()
    def hidden(
        self, inputs: Tensor, sample_ids_B: Tensor, time: Tensor | float | None = None
    ) -> Tensor:
        """Float32 ``[B, S, D]`` after the trunk.

        Args:
            inputs: what the rack reads, as masked: token ids ``[B, S]``, or images.
            sample_ids_B: int64 ``[B]``.
            time: the time, where the model has it as input: a number, or float ``[B]``. A sample at
                another time is another sample to the cache.
        """
        if self.cache is None:
            return self._through(inputs, time)
        keys_B = _timed(sample_ids_B.cpu(), time)
        width = self.rack.config.width

        def compute(rows_M: Tensor) -> Tensor:
            return self._missing(inputs[rows_M], keys_B[rows_M], _rows(time, rows_M))

        return self.cache.fetch(
            keys_B, self.version, inputs, width, compute, positions=self.rack.positions_of(inputs)
        )

    def _missing(self, inputs: Tensor, keys_M: Tensor, time: Tensor | float | None) -> Tensor:
        """Compute what the cache lacks, from the shorter trunk's hidden states where it has
        those.
        """
        assert self.cache is not None
        width = self.rack.config.width
        above = self.until_stack - 1
        positions = self.rack.positions_of(inputs)
        rows: list[Tensor | None] = [None] * len(keys_M)
        below: list[tuple[int, Tensor]] = []
        if above:
            for row, key in enumerate(keys_M.tolist()):
                found = self.cache.peek(
                    key, self.shorter, inputs[row].cpu(), width, positions=positions
                )
                if found is not None:
                    below.append((row, found))
                    self.cache.drop(key, self.shorter)
        if below:
            x_LSD = torch.stack([found for _, found in below]).to(inputs.device)
            for (row, _), hidden_SD in zip(
                below, self.rack.run_stacks(x_LSD, above, above + 1), strict=True
            ):
                rows[row] = hidden_SD
        absent = torch.tensor(
            [row for row, found in enumerate(rows) if found is None], dtype=torch.int64
        )
        if len(absent):
            for row, hidden_SD in zip(
                absent, self._through(inputs[absent], _rows(time, absent)), strict=True
            ):
                rows[int(row)] = hidden_SD
        return torch.stack([found for found in rows if found is not None])

    def _through(self, inputs: Tensor, time: Tensor | float | None) -> Tensor:
        """Through the whole trunk, in the cache's number format after every stack."""
        x_BSD = self._embedded(inputs, time)
        for position in range(self.until_stack):
            x_BSD = self.codec.rounded(self.rack.run_stacks(x_BSD, position, position + 1))
        return x_BSD

    def _embedded(self, inputs: Tensor, time: Tensor | float | None) -> Tensor:
        """What enters the first stack. Times are embedded one by one, so that a sample's does not
        depend on others'.
        """
        if not isinstance(time, Tensor):
            return self.rack.embed(inputs, time)
        times_B = time.reshape(-1).expand(len(inputs))
        x_BSD: Tensor | None = None
        for moment in sorted(set(times_B.tolist())):
            rows = (times_B == moment).to(inputs.device)
            found = self.rack.embed(inputs[rows], moment)
            if x_BSD is None:
                x_BSD = found.new_empty(len(inputs), *found.shape[1:])
            x_BSD[rows] = found
        assert x_BSD is not None
        return x_BSD


def _timed(sample_ids_B: Tensor, time: Tensor | float | None) -> Tensor:
    """Sample ids in which the time has a part: int64 ``[B]``, a hash where there is one."""
    if time is None:
        return sample_ids_B
    times_B = torch.as_tensor(time, dtype=torch.float32).cpu().expand(len(sample_ids_B))
    keys = [
        hashlib.blake2b(struct.pack("<qf", sample, moment), digest_size=8).digest()
        for sample, moment in zip(sample_ids_B.tolist(), times_B.tolist(), strict=True)
    ]
    return torch.tensor(
        [int.from_bytes(key, "little", signed=True) for key in keys], dtype=torch.int64
    )


def _rows(time: Tensor | float | None, rows_M: Tensor) -> Tensor | float | None:
    if isinstance(time, Tensor) and time.dim():
        return time[rows_M.to(time.device)] if time.size(0) > 1 else time
    return time
