"""A decoder whose head is a sum of ternary planes: a plugin file for ``pure_start.py`` alone.

The planes of a head have one scale each, powers of two apart. With ``digits`` they are the binary
digits of one integer: the last plane alone has votes, and what a flip carries beyond it moves the
digits above.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import torch
from attrs import frozen
from pure_start_votes import PartedVotes, PartedVotesConfig
from torch import Tensor, nn

from arb_ternary import hookimpl
from arb_ternary.config.options import option
from arb_ternary.optim.protocol import Trainable
from arb_ternary.specs import ModelSpec, OptimizerSpec
from arb_ternary.ternary.linear import TernaryLinear
from arb_ternary.ternary.module import TernaryModule
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoder import Decoder

ARB_API_VERSION = (1, 0)
#: Quanta a trit.
CELL: Final = 64


@frozen(kw_only=True)
class PlanesConfig(DecoderConfig):
    """A decoder, and the planes of its head."""

    head_offsets: tuple[int, ...] = option(
        (), "exponent offset of each plane of the head; none = a head as ever"
    )
    digits: bool = option(
        False, "planes are the digits of integers; each plane's offset is one less than the last's"
    )
    dither: bool = option(
        False, "accumulators of planes begin anywhere in the middle half of their cell"
    )
    head_bias: bool = option(False, "an integer bias in the head")
    linears_density: float | None = option(
        None, "share of the trits of the blocks that are not zero at birth"
    )


class Planes(nn.Module):
    """The sum of what modules make of the same input."""

    def __init__(self, planes: Sequence[TernaryModule]) -> None:
        super().__init__()
        self.planes = nn.ModuleList(planes)

    def forward(self, inputs: Tensor) -> Tensor:
        """The sum."""
        return torch.stack([plane(inputs) for plane in self.planes]).sum(0)


def set_digits(planes: Sequence[TernaryModule], value: Tensor, votes: Tensor | None = None) -> None:
    """Sign and magnitude of integers ``[N, K]``, most significant plane first."""
    size = value.abs()
    sign = value.sign()
    for place, plane in enumerate(planes):
        bit = (size >> (len(planes) - 1 - place)) & 1
        last = place == len(planes) - 1
        plane.set_trits((bit * sign).to(torch.int8), votes=votes if last else None)


def digits_of(planes: Sequence[TernaryModule]) -> Tensor:
    """The integers of planes, int32 ``[N, K]``."""
    value = torch.zeros(
        planes[0].shape.out_features, planes[0].shape.in_features, dtype=torch.int32
    )
    for plane in planes:
        value = 2 * value + plane.trits().to(torch.int32)
    return value


class PlanesDecoder(Decoder):
    """See the module."""

    def __init__(self, config: PlanesConfig, vocabulary_size: int) -> None:
        super().__init__(config, vocabulary_size)
        if config.head_offsets or config.head_bias:
            planes = [
                TernaryLinear(
                    config.width,
                    vocabulary_size,
                    group_size="row",
                    scale_rule="frozen",
                    exponent_offset=offset,
                    bias=config.head_bias and not place,
                )
                for place, offset in enumerate(config.head_offsets or (0,))
            ]
            if config.head_offsets:
                self._start(planes, config)
            self.head = Planes(planes)
        for module in self.blocks.modules() if config.linears_density is not None else ():
            if isinstance(module, TernaryLinear):
                shape = module.trits().shape
                sign = torch.randint(0, 2, shape, dtype=torch.int8) * 2 - 1
                module.set_trits(sign * (torch.rand(shape) < config.linears_density).to(torch.int8))

    @staticmethod
    def _start(planes: list[TernaryLinear], config: PlanesConfig) -> None:
        shape = planes[0].trits().shape
        if config.digits:
            unit = 2.0 ** int(planes[-1].exponent[0, 0])
            largest = 2 ** len(planes) - 1
            born = torch.randn(shape) * (1 / math.sqrt(config.width) / unit)
            set_digits(planes, born.round().clamp(-largest, largest).to(torch.int32))
            for plane in planes[:-1]:
                plane.frozen = True
            return
        for plane in planes if config.dither else ():
            plane.set_votes(torch.randint(-CELL // 2, CELL // 2 + 1, shape).to(torch.int8))


class DigitVotes(PartedVotes):
    """Scaled votes whose flips of the last digit carry into those above."""

    def __init__(self, trainable: Trainable, config: PartedVotesConfig) -> None:
        super().__init__(trainable.ternary, config)
        self._planes = [
            module for name, module in trainable.ternary.items() if name.startswith("head.planes.")
        ]
        self._carries = len(self._planes) > 1 and self._planes[0].frozen

    def _flip(
        self, group: dict[str, Any], module: TernaryModule, place: tuple[int, int], voted: bool
    ) -> Tensor:
        if not self._carries or module is not self._planes[-1]:
            return super()._flip(group, module, place, voted)
        module.take_votes()
        votes = module.logical_votes().to(torch.int32)
        value = digits_of(self._planes)
        flip = (votes >= CELL).to(torch.int32) - (votes <= -CELL).to(torch.int32)
        largest = 2 ** len(self._planes) - 1
        moved = (value + flip).clamp(-largest, largest)
        rest = torch.where(moved != value, votes - CELL * flip, votes)
        rest = torch.where((flip != 0) & (moved == value), votes.sign() * (CELL // 2), rest)
        noise = torch.rand(rest.shape, generator=self._noise)
        rest -= rest.sign() * (rest.abs() * (group["leak"] * group["lr"]) + noise).floor().to(
            torch.int32
        )
        changed = moved != value
        if bool(changed.any()):
            set_digits(self._planes, moved, rest.to(torch.int8))
        else:
            module.set_votes(rest.to(torch.int8))
        return changed.sum()


def build_model(config: PlanesConfig, vocabulary_size: int) -> PlanesDecoder:
    """The decoder."""
    return PlanesDecoder(config, vocabulary_size)


def build(config: PartedVotesConfig, trainable: Trainable) -> DigitVotes:
    """The optimizer over all ternary modules of ``trainable``."""
    return DigitVotes(trainable, config)


@hookimpl
def arb_register_models() -> Sequence[ModelSpec]:
    return (
        ModelSpec(
            name="planes",
            target="pure_start_planes:build_model",
            config="pure_start_planes:PlanesConfig",
            summary="a decoder whose head is a sum of ternary planes",
        ),
    )


@hookimpl
def arb_register_optimizers() -> Sequence[OptimizerSpec]:
    return (
        OptimizerSpec(
            name="digit_votes",
            target="pure_start_planes:build",
            config="pure_start_votes:PartedVotesConfig",
            accepts=frozenset({"ternary"}),
            summary="scaled votes whose flips carry from plane to plane",
        ),
    )
