"""An axolotl plugin that trains ternary weights by votes.

Put this file where Python finds it, such as next to the config, and name it there::

    plugins:
      - arb_ternary_axolotl.ArbTernaryPlugin
    ternary_init: gptq          # or absmean, random
    ternary_exclude: [lm_head]
    ternary_group_size: 128
    votes_lr: 0.05              # learning_rate is that of the float parameters

The model is loaded as axolotl loads it, in float or with the quantization ``arb_ternary``. Its
linears, embeddings and convolutions then become ternary. A checkpoint of axolotl holds them packed,
with their accumulators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

import arb_ternary
from arb_ternary.errors import UsageProblem
from arb_ternary.ternary.models import ternary_modules


class ArbTernaryArgs(BaseModel):
    """The keys that the plugin adds to a config of axolotl.

    Attributes:
        ternary_init: where trits come from, see ``arb_ternary.ternarize``.
        ternary_exclude: names of modules, or patterns, that stay float.
        ternary_group_size: columns that share an exponent.
        ternary_calibration: for ``gptq``: a file of token ids, int64 ``[batches, rows, tokens]``,
            that ``torch.save`` wrote.
        votes: the rule that turns votes into flips.
        votes_lr: its rate; ``auto`` is the default of the rule.
    """

    ternary_init: str = "absmean"
    ternary_exclude: list[str] = ["lm_head"]
    ternary_group_size: int = 128
    ternary_calibration: str | None = None
    votes: str = "scaled_votes"
    votes_lr: float | str = "auto"


class ArbTernaryPlugin(BasePlugin):
    """Makes the model ternary after it is loaded, and gives the trainer an optimizer of votes."""

    def get_input_args(self) -> str:
        """Return the class of the keys that this plugin adds."""
        return f"{__name__}.{ArbTernaryArgs.__name__}"

    def post_model_load(self, cfg: Any, model: Any) -> None:
        """Make the weights of the model ternary, unless they are.

        Raises:
            UsageProblem: the config adds an adapter.
        """
        if cfg.adapter:
            raise UsageProblem(
                f"adapter: {cfg.adapter} adapts float weights, and ternary weights need none",
                "Leave `adapter` out: all ternary weights train at ten bits each.",
            )
        if ternary_modules(model):
            return
        calibration = None
        if cfg.ternary_calibration:
            calibration = list(torch.load(cfg.ternary_calibration, weights_only=True))
        report = arb_ternary.ternarize(
            model,
            exclude=cfg.ternary_exclude,
            init=cfg.ternary_init,
            group_size=cfg.ternary_group_size,
            calibration=calibration,
        )
        print(report)

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Give the trainer its optimizer; axolotl makes the schedule of its rates."""
        trainer.optimizer = arb_ternary.make_optimizer(
            trainer.model, votes=cfg.votes, lr=cfg.votes_lr, float_lr=cfg.learning_rate
        )

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[Callable[..., Any]]:
        """Return the callback that logs flips, saturation and bits."""
        return [arb_ternary.TernaryCallback()]
