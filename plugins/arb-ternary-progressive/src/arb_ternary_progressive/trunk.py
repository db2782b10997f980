"""The hidden states that a frozen trunk passes to the stack above it: cached or computed.

Shapes: ``B`` samples, ``S`` positions, ``D`` width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs
import torch
from torch import Tensor, nn

from arb_ternary.errors import UsageProblem
from arb_ternary.ternary.module import TernaryModule
from arb_ternary_train.activation_cache import (
    ActivationCache,
    CacheDtype,
    module_version,
    rounded,
    sample_keys,
)

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
        until_stack: number of stacks of the trunk; at least 1, and fewer than the rack has.
        cache: cache of hidden states; None = they are computed every time.
        dtype: number format between stacks, that of the cache if there is one.

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
        self.rack = rack
        self.until_stack = until_stack
        self.cache = cache
        self.dtype = dtype
        # Versions of the trunk, and of the trunk that is one stack shorter.
        self.version = frozen_version(
            *rack.input_end, base=repr(attrs.evolve(rack.config, layers=1))
        )
        self.shorter = ""
        for stack in rack.ordered_stacks[:until_stack]:
            self.shorter = self.version
            self.version = frozen_version(stack, base=self.shorter)
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
        times: list[float] | None = None
        if time is not None:
            times = torch.as_tensor(time).reshape(-1).expand(len(inputs)).tolist()
        if self.cache is None:
            return self._through(inputs, times)
        keys = sample_keys(sample_ids_B, inputs, times)

        def compute(missing: list[int]) -> list[Tensor]:
            rows = self._from_shorter(missing, inputs, keys)
            absent = [row for row in missing if row not in rows]
            if absent:
                moments = None if times is None else [times[row] for row in absent]
                found_ASD = self._through(inputs[absent], moments)
                rows.update(zip(absent, found_ASD, strict=True))
            return [rows[row] for row in missing]

        rows = self.cache.fetch(self.version, keys, compute)
        return torch.stack(rows).to(inputs.device)

    def _from_shorter(
        self, missing: list[int], inputs: Tensor, keys: list[str]
    ) -> dict[int, Tensor]:
        """Run the last stack on what the cache has of the shorter trunk, and drop that."""
        assert self.cache is not None
        below: dict[int, Tensor] = {}
        if self.until_stack == 1:
            return below
        for row in missing:
            hidden_SD = self.cache.get(self.shorter, keys[row])
            if hidden_SD is not None:
                below[row] = hidden_SD
                self.cache.drop(self.shorter, keys[row])
        if not below:
            return below
        last = self.until_stack - 1
        x_LSD = torch.stack(list(below.values())).to(inputs.device)
        return dict(zip(below, self.rack.run_stacks(x_LSD, last, last + 1), strict=True))

    def _through(self, inputs: Tensor, times: Sequence[float] | None) -> Tensor:
        """Run the whole trunk, and round to the cache's number format after every stack.

        Times are embedded one by one, so that the result for a sample does not depend on the
        others.
        """
        if times is None or len(set(times)) == 1:
            x_BSD = self.rack.embed(inputs, None if times is None else times[0])
        else:
            rows = [
                self.rack.embed(inputs[row : row + 1], moment) for row, moment in enumerate(times)
            ]
            x_BSD = torch.cat(rows)
        for position in range(self.until_stack):
            x_BSD = rounded(self.rack.run_stacks(x_BSD, position, position + 1), self.dtype)
        return x_BSD


def frozen_version(*modules: nn.Module, base: str = "") -> str:
    """Return the version of frozen modules; see ``module_version``.

    Raises:
        UsageProblem: something in them can learn (a QLoRA trunk), so hidden states change with
            every step.
    """
    for module in modules:
        name = _learner(module)
        if name is not None:
            raise UsageProblem(
                f"activation cache: {name} of the trunk can learn, so its activations change with "
                f"every step",
                "A QLoRA trunk streams: every batch runs through it. Only a frozen trunk "
                "(trunk_strategy: frozen) can be cached.",
            )
    return module_version(*modules, base=base)


def _learner(module: nn.Module) -> str | None:
    """Return the name of the first parameter or module in ``module`` that can learn."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            return name
    for name, part in module.named_modules():
        if isinstance(part, TernaryModule) and not part.frozen:
            return name or type(part).__name__
    return None
