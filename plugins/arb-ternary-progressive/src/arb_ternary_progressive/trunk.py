"""The hidden states that a frozen trunk passes to the stack above it: cached or computed.

Shapes: ``B`` samples, ``S`` positions, ``D`` width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import torch
from torch import Tensor

from arb_ternary.errors import UsageProblem
from arb_ternary_progressive.activation_cache import ActivationCache, trunk_version
from arb_ternary_progressive.config import CacheDtype
from arb_ternary_progressive.hidden_codec import HiddenCodec
from arb_ternary_progressive.samples import cache_keys

if TYPE_CHECKING:
    from arb_ternary_progressive.rack import Rack


class TrunkStream:
    """The output of the first ``until_stack`` stacks of a rack, without gradients.

    Between two stacks the residual stream is rounded to the number format of the cache, with a
    cache and without, so that both train the next stack on the same numbers. With ``float32``
    nothing changes.

    When the trunk has grown by a stack, cached samples of the shorter trunk are still used: only
    the new stack is computed for them, and its output replaces them.

    Args:
        rack: its first ``until_stack`` stacks, and its embedding, are frozen.
        until_stack: number of stacks of the trunk; at least 1.
        cache: cache of hidden states; None = they are computed every time.
        dtype: number format between stacks if there is no cache.

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
        # Versions of the trunk, and of the trunk that is one stack shorter.
        self.version = trunk_version(
            *rack.input_end, base=repr(attrs.evolve(rack.config, layers=1))
        )
        self.shorter = ""
        for stack in rack.ordered_stacks[:until_stack]:
            self.shorter = self.version
            self.version = trunk_version(stack, base=self.shorter)
        if cache is not None:
            cache.keep_only((self.version, self.shorter))

    @torch.no_grad()
    def hidden(
        self, inputs: Tensor, sample_ids_B: Tensor, time: Tensor | float | None = None
    ) -> Tensor:
        """Return the hidden states after the trunk, float32 ``[B, S, D]``.

        Args:
            inputs: masked inputs of the rack: token ids ``[B, S]``, or images.
            sample_ids_B: int64 ``[B]``.
            time: the time if it is an input of the model: a number, or float ``[B]``. For the
                cache, a sample at another time is another sample.
        """
        if self.cache is None:
            return self._through(inputs, time)
        keys_B = cache_keys(sample_ids_B.cpu(), time)
        width = self.rack.config.width

        def compute(rows_M: Tensor) -> Tensor:
            return self._missing(inputs[rows_M], keys_B[rows_M], _rows(time, rows_M))

        return self.cache.fetch(
            keys_B, self.version, inputs, width, compute, positions=self.rack.positions_of(inputs)
        )

    def _missing(self, inputs: Tensor, keys_M: Tensor, time: Tensor | float | None) -> Tensor:
        """Compute the rows that the cache lacks, from those of the shorter trunk if it has them."""
        rows: dict[int, Tensor] = {}
        below = self._take_shorter(inputs, keys_M)
        if below:
            last = self.until_stack - 1
            x_LSD = torch.stack(list(below.values())).to(inputs.device)
            rows.update(zip(below, self.rack.run_stacks(x_LSD, last, last + 1), strict=True))
        absent = [row for row in range(len(keys_M)) if row not in rows]
        if absent:
            rows_A = torch.tensor(absent, dtype=torch.int64)
            hidden_ASD = self._through(inputs[rows_A], _rows(time, rows_A))
            rows.update(zip(absent, hidden_ASD, strict=True))
        return torch.stack([rows[row] for row in range(len(keys_M))])

    def _take_shorter(self, inputs: Tensor, keys_M: Tensor) -> dict[int, Tensor]:
        """Take the hidden states of the shorter trunk out of the cache, by row."""
        assert self.cache is not None
        found: dict[int, Tensor] = {}
        if self.until_stack == 1:
            return found
        width = self.rack.config.width
        positions = self.rack.positions_of(inputs)
        for row, key in enumerate(keys_M.tolist()):
            hidden_SD = self.cache.peek(
                key, self.shorter, inputs[row].cpu(), width, positions=positions
            )
            if hidden_SD is not None:
                found[row] = hidden_SD
                self.cache.drop(key, self.shorter)
        return found

    def _through(self, inputs: Tensor, time: Tensor | float | None) -> Tensor:
        """Run the whole trunk, and round to the cache's number format after every stack."""
        x_BSD = self._embedded(inputs, time)
        for position in range(self.until_stack):
            x_BSD = self.codec.rounded(self.rack.run_stacks(x_BSD, position, position + 1))
        return x_BSD

    def _embedded(self, inputs: Tensor, time: Tensor | float | None) -> Tensor:
        """Return the input of the first stack.

        Times are embedded one by one, so that the result for a sample does not depend on the
        others.
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


def _rows(time: Tensor | float | None, rows_M: Tensor) -> Tensor | float | None:
    if isinstance(time, Tensor) and time.dim():
        return time[rows_M.to(time.device)] if time.size(0) > 1 else time
    return time
