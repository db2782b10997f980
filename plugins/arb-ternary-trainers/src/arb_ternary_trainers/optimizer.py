"""One optimizer of torch for the votes and the float parameters of a model."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from inspect import unwrap
from typing import Any, Final, Literal

import torch
from attrs import evolve
from torch import Tensor, nn
from torch.optim import Optimizer

from arb_ternary.config.choice import OptimizerChoice
from arb_ternary.config.structure import structure
from arb_ternary.config.yaml_document import Document
from arb_ternary.errors import ConfigError, UsageProblem, nearest
from arb_ternary.optim.protocol import (
    StepOutcome,
    Trainable,
    build_optimizer,
    collect_trainable,
)
from arb_ternary.optim.ternary import SingleProcessExchange, TernaryOptimizer, is_finite
from arb_ternary.plugins.manager import manager
from arb_ternary.specs import OptimizerSpec
from arb_ternary.ternary.models import seed_votes
from arb_ternary_train.gradients import gradient_norm
from arb_ternary_train.optim.joined import JoinedOptimizer
from arb_ternary_trainers.layers import TernaryLayer
from arb_ternary_trainers.loss_scale import ScaleProbe, new_probe

_VOTES: Final = "votes"
_FLOATS: Final = "floats"
#: Wrappers of a model that leave votes where they were cast, by the name of their class.
_WRAPPERS: Final = (
    "DataParallel",
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    "FSDPModule",
)
OUR_WAY: Final = (
    "Train with several processes: torchrun --nproc_per_node N -m arb_ternary train CONFIG"
)


def make_optimizer(
    model: nn.Module,
    votes: str = "scaled_votes",
    lr: float | Literal["auto"] = "auto",
    float: Callable[..., Optimizer] = torch.optim.AdamW,  # noqa: A002
    float_lr: float | None = None,
    *,
    votes_options: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> VotesAndFloats:
    """Return one optimizer for the ternary weights and the float parameters of ``model``.

    Its param groups are named ``votes`` and ``floats``, so that a scheduler drives both rates and a
    logger shows both. Make it when the model is on its device, and freeze before what is not to be
    trained.

    Args:
        model: a model with ternary layers, such as :func:`arb_ternary.ternarize` makes.
        votes: the rule that turns votes into flips: ``scaled_votes``, ``sign_votes``,
            ``momentum_votes`` or that of a plugin.
        lr: rate of the rule. ``auto`` is the default of the rule, 0.1 for ``scaled_votes``; a model
            that is already good wants less, such as 0.05.
        float: makes the optimizer of the float parameters: a class of ``torch.optim``, or a
            function such as ``functools.partial(torch.optim.AdamW, weight_decay=0.1)``. It is
            called with a list of param groups.
        float_lr: rate of the float parameters; None is the default of that class.
        votes_options: further options of the rule, such as ``{"orthogonal": True}``; they are those
            of a config.
        seed: seed of the stochastic rounding of votes.

    Raises:
        UsageProblem: the model has no ternary weights that learn, is wrapped for several devices,
            or ``votes`` is not a rule.
        ConfigError: an option does not exist or is out of range.
    """
    _check_wrappers(model)
    trainable = collect_trainable(model)
    if not trainable.ternary:
        what = "all ternary weights of the model are frozen"
        if "ternary" not in trainable.idle:
            what = "the model has no ternary weights"
        raise UsageProblem(
            f"make_optimizer: {what}", "Call arb_ternary.ternarize(model) first, or torch.optim."
        )
    seed_votes(model, seed)
    rule = _build_rule(votes, lr, votes_options or {}, evolve(trainable, floats={}))
    parts: dict[str, Optimizer] = {_VOTES: rule}
    if trainable.floats:
        settings = {} if float_lr is None else {"lr": float_lr}
        group = {"params": [*trainable.floats.values()]}
        parts[_FLOATS] = float([group], **settings)
    return VotesAndFloats(parts)


class VotesAndFloats(JoinedOptimizer):
    """An optimizer of votes and one of float parameters that step, or skip a step, together.

    It takes the place of an optimizer of torch in any training loop. ``step`` uses up votes and
    statistics, so gradients may be cleared by ``optimizer.zero_grad()`` or ``model.zero_grad()``.
    ``zero_grad`` drops the votes that were cast since the last step, as it drops gradients.

    A step is skipped, in both parts, if a gradient is not finite. With a ``torch.amp.GradScaler``
    the scaler decides, as for any optimizer: it does not call ``step``. It learns of gradients of
    ternary weights too, and the votes of a skipped step are dropped when it unscales. Votes are
    cast from scaled gradients: rules that measure gradients follow the scale, and the votes of the
    first step after the scale has changed are dropped, because they were cast at the old one.

    State dicts hold rates, magnitudes and the state of the float part; accumulators are in the
    state dict of the model.

    Attributes:
        last_outcome: what the last step did: flips, norm of gradients, whether it was skipped.
        skipped_updates: number of steps that were skipped.
    """

    def __init__(self, parts: Mapping[str, Optimizer]) -> None:
        super().__init__(parts)
        self.last_outcome = StepOutcome(stepped=False)
        self.skipped_updates = 0
        self._scale = 1.0
        self._name_groups()
        self._place_probe()

    @property
    def rule(self) -> TernaryOptimizer:
        """The optimizer of the ternary weights."""
        rule = self.parts[_VOTES]
        assert isinstance(rule, TernaryOptimizer)
        return rule

    # --- a step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take a step, and return the loss of ``closure`` if there is one.

        Raises:
            UsageProblem: several processes train, whose votes nothing exchanges.
        """
        self._check_processes()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.last_outcome = self._take_step(loss)
        if self.last_outcome.skipped:
            self.skipped_updates += 1
        self._place_probe()
        return loss

    def _take_step(self, loss: Tensor | float | None) -> StepOutcome:
        scale = self._loss_scale()
        # A scaler has looked at the gradients already.
        if scale is None and not (is_finite(loss) and self._gradients_are_finite()):
            warnings.warn(
                "a gradient is not finite: the update is skipped; optimizer.skipped_updates counts "
                "them",
                stacklevel=4,
            )
            return self.skip_update()

        scale = scale or 1.0
        octaves = math.log2(scale / self._scale)
        if octaves and self.rule.rescale_gradients(octaves):
            self.rule.skip_update()
        self._scale = scale
        outcome: StepOutcome = unwrap(JoinedOptimizer.step)(self)
        norm = outcome.grad_norm
        return outcome if norm is None else evolve(outcome, grad_norm=norm / scale)

    def _gradients_are_finite(self) -> bool:
        """Whether all gradients of floats and of ternary weights are finite."""
        norm = gradient_norm(p for group in self._float_groups() for p in group["params"])
        return is_finite(norm) and self._votes_are_finite()

    def _votes_are_finite(self) -> bool:
        """Whether all gradients from which votes were cast are finite."""
        # The number of NaN, and sums of squares, which are infinite if a gradient is.
        faults: dict[torch.device, list[Tensor]] = {}
        for module in self.rule.modules:
            stats = module.stats if module.sums is None else module.sums.stats
            faults.setdefault(stats.device, []).append(stats[0] + 0.0 * stats.sum())
        return not any(bool(torch.stack(each).any()) for each in faults.values())

    def _loss_scale(self) -> float | None:
        """Return the scale of the gradients of this step; None without a scaler."""
        probe = self._probe.grad
        if isinstance(probe, ScaleProbe) and probe.factor is not None:
            return 1.0 / probe.factor
        return None

    def _drop_votes(self) -> None:
        """Skip an update because a scaler has found gradients that are not finite."""
        self.last_outcome = self.rule.skip_update()
        self.skipped_updates += 1
        self._place_probe()

    def _check_processes(self) -> None:
        """Refuse to train in one of several processes."""
        if not torch.distributed.is_available() or not torch.distributed.is_initialized():
            return
        alone = isinstance(self.rule.exchange, SingleProcessExchange)
        if alone and torch.distributed.get_world_size() > 1:
            raise UsageProblem(
                f"torch.distributed: {torch.distributed.get_world_size()} processes train, and "
                f"nothing exchanges their votes here",
                OUR_WAY,
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients and statistics, and drop the votes cast since the last step."""
        super().zero_grad(set_to_none)
        for module in self.rule.modules:
            module.undo_votes()
        self._place_probe()

    # --- groups

    def _float_groups(self) -> list[dict[str, Any]]:
        floats = self.parts.get(_FLOATS)
        return [] if floats is None else floats.param_groups

    def _name_groups(self) -> None:
        for name, part in self.parts.items():
            for number, group in enumerate(part.param_groups, 1):
                group.setdefault("name", name if number == 1 else f"{name}_{number}")

    def _place_probe(self) -> None:
        """Put a fresh probe into the group of the votes, whose parameters a step sets anew."""
        modules = self.rule.modules
        device = modules[0].weight.device
        self._probe = new_probe(device, self._votes_are_finite, self._drop_votes)
        group = self.rule.param_groups[0]
        packed = self.rule.modules_of(0)
        group["params"] = [*(module.weight for module in packed), self._probe]

    # --- state

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state.pop("_probe", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.param_groups = [group for part in self.parts.values() for group in part.param_groups]
        self._place_probe()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of both parts, and the loss scale."""
        return {
            **super().state_dict(),
            "loss_scale": self._scale,
            "skipped_updates": self.skipped_updates,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            UsageProblem: it is that of another kind of optimizer.
        """
        missing = {"parts", "loss_scale", "skipped_updates"} - state_dict.keys()
        if missing or state_dict["parts"].keys() != self.parts.keys():
            raise UsageProblem(
                "load_state_dict: this is not the state of an optimizer of votes and floats for "
                "such a model",
                "Give what its own state_dict() returned.",
            )
        super().load_state_dict(state_dict)
        self._scale = float(state_dict["loss_scale"])
        self.skipped_updates = int(state_dict["skipped_updates"])
        self._place_probe()


def _check_wrappers(model: nn.Module) -> None:
    """Refuse a model whose wrapper leaves votes where they were cast."""
    for module in model.modules():
        names = {kind.__name__ for kind in type(module).__mro__}
        for wrapper in _WRAPPERS:
            if wrapper in names:
                raise UsageProblem(
                    f"{wrapper}: it averages float gradients, and does not exchange the votes of "
                    f"ternary layers",
                    OUR_WAY,
                )
        adapted = isinstance(getattr(module, "base_layer", None), TernaryLayer)
        if adapted and type(module).__module__.partition(".")[0] == "peft":
            raise UsageProblem(
                f"peft: {type(module).__name__} adapts a ternary layer, whose weight it could not "
                f"merge the adapter into",
                "Train the ternary weights themselves, without an adapter: they and their "
                "accumulators are ten bits per weight.",
            )


def _build_rule(
    name: str, lr: float | str, options: Mapping[str, Any], trainable: Trainable
) -> TernaryOptimizer:
    """Return the rule ``name`` over all ternary weights."""
    registry = manager().registry
    rules = [
        found.name
        for found in registry.all(OptimizerSpec.kind)
        if isinstance(found.spec, OptimizerSpec) and found.spec.accepts == {"ternary"}
    ]
    if name not in rules:
        close = nearest(name, rules)
        hint = f"did you mean {close!r}?\n" if close else ""
        raise UsageProblem(
            f"votes: {name!r} is not a rule of votes", f"{hint}available: {', '.join(rules)}"
        )
    given: dict[str, Any] = {"name": name, **options}
    if lr != "auto":
        given["lr"] = lr
    elif options.get("lr") == "auto":
        raise ConfigError("votes_options: lr is the argument lr of make_optimizer")
    choice: OptimizerChoice = structure(OptimizerChoice, Document(given), registry)
    rule = build_optimizer("votes", choice, trainable)
    assert isinstance(rule, TernaryOptimizer)
    return rule
