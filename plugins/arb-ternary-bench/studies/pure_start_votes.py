"""Scaled votes of which those of embedding and head differ: a plugin file for ``pure_start.py``
alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import torch
from attrs import asdict, fields, frozen
from attrs.validators import gt
from torch import Tensor

from arb_ternary import hookimpl
from arb_ternary.config.options import option
from arb_ternary.optim.protocol import Trainable
from arb_ternary.specs import OptimizerSpec
from arb_ternary.ternary.module import TernaryModule
from arb_ternary_votes.config import ScaledVotesConfig
from arb_ternary_votes.magnitudes import FRACTION, Magnitudes
from arb_ternary_votes.scaled_votes import ScaledVotes

ARB_API_VERSION = (1, 0)
#: Updates from one look at the rows of a head to the next, and octaves that a row may grow.
EVERY: Final = 10
OCTAVES: Final = 4


@frozen(kw_only=True)
class PartedVotesConfig(ScaledVotesConfig):
    """Options of scaled votes, and what is other in embedding and head."""

    head_clip: float = option(2.5, "`clip` of the head", validator=gt(0.0))
    embedding_clip: float = option(2.5, "`clip` of the embedding", validator=gt(0.0))
    head_mean: Literal["geometric", "arithmetic"] = option(
        "geometric", "mean over time of a magnitude of the head: of its logarithm, or of itself"
    )
    dense: float | None = option(
        None, "share of trits that are not zero from which on a row of the head grows"
    )
    outward: float | None = option(
        None, "mean of accumulator times trit, in trits, from which on a row of the head grows"
    )
    head_exponents: bool = option(
        False, "the exponents of the head alone learn, of a model whose exponents do"
    )


class ArithmeticMagnitudes(Magnitudes):
    """Running magnitudes whose mean over time is that of the magnitudes: a rare large one counts as
    what it is.
    """

    @classmethod
    def update_all(
        cls,
        tracked: Sequence[Magnitudes],
        sums: Sequence[Tensor],
        weight: float,
        casts: Sequence[int],
    ) -> None:
        """See :class:`Magnitudes`; rows and columns that have no gradient count as 0, after their
        first one.
        """
        for each, total, count in zip(tracked, sums, casts, strict=True):
            assert isinstance(each, cls)
            each._take_in(total, weight, count)

    def _take_in(self, sums: Tensor, weight: float, casts: int) -> None:
        old = self._logarithms.clone()
        first = self.steps == 0
        Magnitudes.update_all([self], [sums], weight, [casts])
        if first:
            return
        share = max(weight, 1.0 / self.steps)
        counts = torch.full_like(sums, self._rows * casts)
        counts[: self._rows] = self._columns * casts
        kept = (old.double() / FRACTION).exp2() * (1.0 - share)
        mean = (kept + share * (sums / counts).double()).clamp_min(2.0**-100)
        self._logarithms.copy_(
            (mean.log2() * FRACTION).round().clamp_(-(2**15), 2**15 - 1).to(torch.int16)
        )


class PartedVotes(ScaledVotes):
    """Scaled votes with a clip of their own for embedding and head, and another mean for the
    head.
    """

    def __init__(self, modules: Mapping[str, TernaryModule], config: PartedVotesConfig) -> None:
        clips = {"head": config.head_clip, "embedding": config.embedding_clip}
        self._clips = {
            module: clips[name.split(".")[0]]
            for name, module in modules.items()
            if name.split(".")[0] in clips
        }
        options = {field.name for field in fields(ScaledVotesConfig)}
        super().__init__(
            modules, **{name: value for name, value in asdict(config).items() if name in options}
        )
        for name, module in modules.items() if config.head_exponents else ():
            if name != "head":
                module.scale_rule = "frozen"
        self._head = modules.get("head")
        for name, module in modules.items() if config.head_mean == "arithmetic" else ():
            if name.split(".")[0] == "head":
                group, place = self._places[module]
                shape = module.shape
                self._magnitudes[group][place] = ArithmeticMagnitudes(
                    shape.out_features, shape.in_features
                )
        self._config = config
        self._noise = torch.Generator().manual_seed(1)

    def _flip(
        self, group: dict[str, Any], module: TernaryModule, place: tuple[int, int], voted: bool
    ) -> Tensor:
        flipped = super()._flip(group, module, place, voted)
        share = self._config.dense
        outward = self._config.outward
        asked = share is not None or outward is not None
        if asked and module is self._head and (self.updates + 1) % EVERY == 0:
            trits = module.trits()
            rows = (module.exponent < module.exponent_origin + OCTAVES).all(1)
            if share is not None:
                rows &= (trits != 0).float().mean(1) > share
            if outward is not None:
                module.take_votes()
                rows &= (trits.float() * module.logical_votes().float()).mean(1) > 64 * outward
            if bool(rows.any()):
                self._grow(module, trits, rows)
        return flipped

    def _grow(self, module: TernaryModule, trits: Tensor, rows: Tensor) -> None:
        """Double the scale of some rows and halve their numbers, so that the weights stay what they
        are on average.
        """
        module.take_votes()
        votes = module.logical_votes().clone()
        half = (trits[rows].to(torch.float32) + votes[rows].to(torch.float32) / 64) / 2
        new = (half + torch.rand(half.shape, generator=self._noise)).floor().clamp(-1, 1)
        trits[rows] = new.to(torch.int8)
        votes[rows] = ((half - new) * 64).round().clamp(-63, 63).to(torch.int8)
        origin = module.exponent_origin.clone()
        module.set_trits(trits, module.exponent + rows.to(torch.int8)[:, None], votes)
        module.exponent_origin = origin

    def _scaling(
        self, group: Mapping[str, Any], module: TernaryModule, quanta: float
    ) -> tuple[float, float, int]:
        factor, largest, noise_shift = super()._scaling(group, module, quanta)
        return factor, largest * self._clips.get(module, group["clip"]) / group["clip"], noise_shift


def build(config: PartedVotesConfig, trainable: Trainable) -> PartedVotes:
    """The optimizer over all ternary modules of ``trainable``."""
    return PartedVotes(trainable.ternary, config)


@hookimpl
def arb_register_optimizers() -> Sequence[OptimizerSpec]:
    return (
        OptimizerSpec(
            name="parted_votes",
            target="pure_start_votes:build",
            config="pure_start_votes:PartedVotesConfig",
            accepts=frozenset({"ternary"}),
            summary="scaled votes of which those of embedding and head differ",
        ),
    )
