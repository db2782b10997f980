"""SignGSD for ternary modules: the sign of the gradient is a vote, full accumulators flip trits.

Backward subtracts ``sign(g)`` from the accumulators, which is the first term of SignGSD's update.
The second term, ``weight_decay * sign(p)``, is ``weight_decay`` votes of ``T`` per update: ``A =
sat8(A - c * T)`` with the integer ``c = floor((n + 1) w) - floor(n w)`` at update ``n``. ``n``
updates thus cast exactly ``floor(n w)`` decay votes. ``w`` is ``weight_decay`` rounded to a
multiple of ``2**-20``; everything after that is integer arithmetic. A trit at zero gets no decay
vote, and the exponents do not decay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from attrs import asdict
from torch import Tensor

from arb_ternary.counters.hashing import STEP
from arb_ternary.errors import ConfigError
from arb_ternary.optim.protocol import StepOutcome
from arb_ternary.optim.ternary import is_finite, to_host
from arb_ternary.ternary.module import TernaryModule
from arb_ternary_signgsd.config import MAX_DECAY
from arb_ternary_signgsd.sign_gsd import NanGradientError, NanPolicy
from arb_ternary_votes.config import SignVotesConfig
from arb_ternary_votes.sign_votes import SignVotes

_DECAY_BITS = 20


def decay_votes(update: int, weight_decay: float) -> int:
    """Return the decay votes of update number ``n`` (from 0): ``floor((n + 1) w) - floor(n w)``."""
    share = round(weight_decay * (1 << _DECAY_BITS))
    before = (update * share) >> _DECAY_BITS
    after = ((update + 1) * share) >> _DECAY_BITS
    return after - before


class TernarySignGSD(SignVotes):
    """Sign votes with SignGSD's decay and its policy for NaN gradients.

    A NaN gradient casts no vote, which is all that ``nan_policy="zero"`` requires. Under
    ``"error"`` and ``"skip"`` no trit and no exponent changes in a step with a NaN gradient.
    ``"skip"`` drops the votes that the other elements cast in backward; after an error,
    ``skip_update`` drops them.

    Args:
        modules: ternary modules by qualified name.
        weight_decay: decay votes per update, 0 to 127; may be a fraction.
        nan_policy: ``"error"``, ``"zero"`` or ``"skip"``.
        votes: thresholds, band, leak and rate.

    Raises:
        ConfigError: ``weight_decay`` is outside its range.
    """

    def __init__(
        self,
        modules: Mapping[str, TernaryModule],
        *,
        weight_decay: float = 0.0,
        nan_policy: NanPolicy = "error",
        votes: SignVotesConfig | None = None,
    ) -> None:
        if not 0 <= weight_decay <= MAX_DECAY:
            raise ConfigError(
                f"signgsd: weight_decay must be between 0 and {MAX_DECAY:g} votes per update for "
                f"ternary modules, not {weight_decay!r}"
            )
        super().__init__(modules, **asdict(votes or SignVotesConfig()))
        self._named = dict(modules)
        for group in self.param_groups:
            group.update(weight_decay=weight_decay, nan_policy=nan_policy)

    @property
    def refuses(self) -> bool:
        """True if a step may be skipped because of a NaN gradient."""
        return any(group["nan_policy"] == "skip" for group in self.param_groups)

    def may_step(self, loss_signal: Tensor | float | None = None) -> bool:
        """Return whether a step would be taken: no gradient since ``zero_grad`` was NaN.

        Raises:
            NanGradientError: a module of a group with ``nan_policy="error"`` had a NaN gradient.
        """
        checked: list[tuple[str, TernaryModule]] = []
        for index, group in enumerate(self.param_groups):
            policy = group["nan_policy"]
            if policy != "zero":
                checked += [(policy, module) for module in self.modules_of(index)]
        counts = to_host(module.stats[0] for _, module in checked)

        poisoned = False
        for (policy, module), count in zip(checked, counts, strict=True):
            if not count:
                continue
            if policy == "error":
                raise self._nan_error(module, int(count))
            poisoned = True
        return not poisoned and super().may_step(loss_signal)

    def _nan_error(self, module: TernaryModule, count: int) -> NanGradientError:
        name = next(name for name, other in self._named.items() if other is module)
        shape = (module.shape.out_features, module.shape.in_features)
        return NanGradientError(
            f"SignGSD: ternary module {name!r}, shape {shape}: {count} NaN in the gradient since "
            "zero_grad; no trit was changed",
            'nan_policy "zero" treats NaN as a gradient of zero, "skip" drops the whole step',
        )

    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None, *, loss_signal: Tensor | float | None = None
    ) -> StepOutcome:
        """Cast the decay votes, then flip; see :meth:`SignVotes.step`.

        Raises:
            NanGradientError: see :meth:`may_step`.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not is_finite(loss) or not self.may_step(loss_signal):
            return self.skip_update()
        return super().step(loss_signal=loss_signal)

    def begin_group(self, group: dict[str, Any], modules: Sequence[TernaryModule]) -> None:
        """Cast the decay votes of the modules that learn."""
        super().begin_group(group, modules)
        for module in modules:
            if module.frozen:
                continue
            update = module.control.tolist()[STEP]
            count = decay_votes(update, group["weight_decay"])
            if count:
                _decay(module, count)


def _decay(module: TernaryModule, count: int) -> None:
    """Cast ``count`` votes of each trit against itself."""
    shape = module.shape
    votes = module.logical_votes().to(torch.int16)
    votes.sub_(module.trits(), alpha=count)
    votes.clamp_(shape.smallest_vote, shape.largest_vote)
    module.set_votes(votes.to(torch.int8))
