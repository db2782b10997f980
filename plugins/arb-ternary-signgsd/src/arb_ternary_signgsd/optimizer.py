"""The optimizer ``signgsd`` for the float parameters and the ternary modules of a model."""

from __future__ import annotations

from torch.optim import Optimizer

from arb_ternary.errors import ConfigError
from arb_ternary.optim.protocol import Trainable
from arb_ternary_signgsd.config import SignGSDConfig
from arb_ternary_signgsd.sign_gsd import SignGSD
from arb_ternary_signgsd.ternary import TernarySignGSD
from arb_ternary_train.optim.joined import JoinedOptimizer


class JoinedSignGSD(JoinedOptimizer):
    """SignGSD for float parameters and ternary modules, with one list of param groups.

    A NaN in any gradient is found before any weight changes.
    """

    def __init__(self, floats: SignGSD, ternary: TernarySignGSD) -> None:
        # The ternary part is checked first and steps last: the float part checks its own
        # gradients before it changes a parameter.
        super().__init__({"float": floats, "ternary": ternary})
        self._floats = floats
        self._ternary = ternary

    def get_memory_mb(self) -> float:
        """Return the MiB of the float parameters and of the packed ternary weights."""
        packed = [module.weight for module in self._ternary.modules]
        return self._floats.get_memory_mb() + self._floats.get_memory_mb(packed)


def build(config: SignGSDConfig, trainable: Trainable) -> Optimizer:
    """Return the optimizer of everything in ``trainable``.

    Raises:
        ConfigError: there is nothing to train, or ``maximize`` is on and there are ternary modules.
    """
    if trainable.ternary and config.maximize:
        raise ConfigError(
            "optimizer.maximize: ternary modules vote in backward, for a lower loss, so they "
            "cannot maximize it",
            "negate the loss instead",
        )
    floats = None
    ternary = None
    if trainable.floats:
        floats = SignGSD(
            trainable.floats.items(),
            lr=config.lr,
            weight_decay=config.weight_decay,
            maximize=config.maximize,
            foreach=config.foreach,
            nan_policy=config.nan_policy,
        )
    if trainable.ternary:
        ternary = TernarySignGSD(
            trainable.ternary,
            weight_decay=config.weight_decay,
            nan_policy=config.nan_policy,
            votes=config.votes,
        )
    if floats is not None and ternary is not None:
        return JoinedSignGSD(floats, ternary)
    if floats is not None:
        return floats
    if ternary is not None:
        return ternary
    raise ConfigError("optimizer: signgsd has nothing to train: every part of the model is frozen")
