"""Scaled votes of which those of embedding and head differ: a plugin file for ``pure_start.py`` alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from attrs import asdict, frozen
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


@frozen(kw_only=True)
class PartedVotesConfig(ScaledVotesConfig):
    """Options of scaled votes, and what is other in embedding and head."""

    head_clip: float = option(2.5, "`clip` of the head", validator=gt(0.0))
    embedding_clip: float = option(2.5, "`clip` of the embedding", validator=gt(0.0))
    head_mean: Literal["geometric", "arithmetic"] = option(
        "geometric", "mean over time of a magnitude of the head: of its logarithm, or of itself"
    )
    head_exponents: bool = option(False, "the exponents of the head alone learn, of a model whose exponents do")


class ArithmeticMagnitudes(Magnitudes):
    """Running magnitudes whose mean over time is that of the magnitudes: a rare large one counts as what it is."""

    def update(self, sums: Tensor, weight: float, casts: int = 1) -> None:
        """See :class:`Magnitudes`; rows and columns that have no gradient count as 0, after their first one."""
        old = self._logarithms.clone()
        first = self.steps == 0
        super().update(sums, weight, casts)
        if first:
            return
        share = max(weight, 1.0 / self.steps)
        counts = torch.full_like(sums, self._rows * casts)
        counts[: self._rows] = self._columns * casts
        kept = (old.double() / FRACTION).exp2() * (1.0 - share)
        mean = (kept + share * (sums / counts).double()).clamp_min(2.0**-100)
        self._logarithms.copy_((mean.log2() * FRACTION).round().clamp_(-(2**15), 2**15 - 1).to(torch.int16))


class PartedVotes(ScaledVotes):
    """Scaled votes with a clip of their own for embedding and head, and another mean for the head."""

    def __init__(self, modules: Mapping[str, TernaryModule], config: PartedVotesConfig) -> None:
        own = ("head_clip", "embedding_clip", "head_mean", "head_exponents")
        self._clips = {
            modules[name]: clip
            for name, clip in (("head", config.head_clip), ("embedding", config.embedding_clip))
            if name in modules
        }
        super().__init__(modules, **{name: value for name, value in asdict(config).items() if name not in own})
        for name, module in modules.items() if config.head_exponents else ():
            if name != "head":
                module.scale_rule = "frozen"
        if config.head_mean == "arithmetic":
            group, place = self._places[modules["head"]]
            shape = modules["head"].shape
            self._magnitudes[group][place] = ArithmeticMagnitudes(shape.out_features, shape.in_features)

    def _scaling(self, group: Mapping[str, Any], module: TernaryModule, quanta: float) -> tuple[float, float, int]:
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
