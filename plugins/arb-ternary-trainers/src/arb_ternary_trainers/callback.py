"""Flips and accumulators in the logs of transformers' Trainer and of TRL's trainers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from arb_ternary.errors import EnvironmentProblem, UsageProblem
from arb_ternary.optim.ternary import to_host
from arb_ternary.plugins.discovery import install_command
from arb_ternary.ternary.models import ternary_modules
from arb_ternary.ternary.module import TernaryModule
from arb_ternary_train.audit import audit
from arb_ternary_trainers.optimizer import OUR_WAY, VotesAndFloats

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ModuleNotFoundError as error:
    raise EnvironmentProblem(
        f"TernaryCallback: needs a package that is not installed: {error.name}",
        install_command("transformers>=5.0"),
    ) from error


class TernaryCallback(TrainerCallback):
    """Adds to the logs of a Trainer what votes do, and refuses a Trainer that would lose them.

    Next to each logged loss are:

    * ``flips``: share of the trits that flip in a step, the mean since the last log;
    * ``saturated``: share of the accumulators that are at an end of their range;
    * ``bits_per_parameter``: persistent training state, as ``arb train`` reports it.

    Give it to the Trainer: ``callbacks=[arb_ternary.TernaryCallback()]``. Trackers named in
    ``report_to`` come before all callbacks and do not see these numbers. To show them there, leave
    ``report_to`` empty and give the tracker after this one: ``callbacks=[arb_ternary
    .TernaryCallback(), TensorBoardCallback()]``.

    Raises:
        UsageProblem: when training begins: the optimizer of the Trainer does not apply the votes of
            its model, or it trains with several devices.
    """

    def __init__(self) -> None:
        self._flips: list[int] = []

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Refuse several devices before the Trainer prepares for them."""
        _check_devices(args)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **parts: Any,
    ) -> None:
        """Refuse an optimizer that would not apply votes."""
        _check_devices(args)
        self._flips.clear()
        optimizer = _unwrapped(parts["optimizer"])
        if not isinstance(optimizer, VotesAndFloats):
            raise UsageProblem(
                f"Trainer: its optimizer is {type(optimizer).__name__}, which never applies the "
                f"votes of ternary weights",
                "Give it one: Trainer(..., optimizers=(arb_ternary.make_optimizer(model), None)). "
                "Options such as `optim` and `learning_rate` are then those of make_optimizer.",
            )
        strangers = set(_learning(parts["model"])) - set(optimizer.rule.modules)
        if strangers:
            raise UsageProblem(
                f"Trainer: {len(strangers)} ternary weights of its model are not those of its "
                f"optimizer, which was made for another model or before they could learn",
                "Call arb_ternary.make_optimizer(model) with the model that the Trainer gets.",
            )

    def on_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **parts: Any,
    ) -> None:
        """Note the flips of the step."""
        optimizer = _unwrapped(parts["optimizer"])
        assert isinstance(optimizer, VotesAndFloats)
        if not optimizer.last_outcome.skipped:
            self._flips.append(optimizer.last_outcome.flips)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **parts: Any,
    ) -> None:
        """Add to logs of training, and to the history of the Trainer."""
        logs = parts["logs"]
        if "loss" not in logs:
            return
        model = parts["model"]
        modules = _learning(model)
        weights = sum(module.shape.out_features * module.shape.in_features for module in modules)
        numbers = {
            "saturated": _saturated(modules) / weights,
            "bits_per_parameter": audit(model, parts["optimizer"]).state_bits_per_parameter,
        }
        if self._flips:
            numbers["flips"] = sum(self._flips) / len(self._flips) / weights
        self._flips.clear()
        logs.update(numbers)
        state.log_history[-1].update(numbers)


def _unwrapped(optimizer: Any) -> Optimizer:
    """Return the optimizer inside wrappers such as that of accelerate."""
    while not isinstance(optimizer, VotesAndFloats) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    found: Optimizer = optimizer
    return found


def _learning(model: nn.Module) -> list[TernaryModule]:
    return [module for _, module in ternary_modules(model) if not module.frozen]


def _saturated(modules: list[TernaryModule]) -> int:
    """Return the number of accumulators at an end of their range."""
    counts: list[Tensor] = []
    for module in modules:
        votes = module.logical_votes()
        largest = module.shape.largest_vote
        counts.append((votes >= largest).sum() + (votes <= -largest).sum())
    return sum(to_host(counts))


def _check_devices(args: TrainingArguments) -> None:
    """Refuse to train with several devices or processes."""
    if args.n_gpu > 1:
        raise UsageProblem(
            f"Trainer: it would copy the model to {args.n_gpu} GPUs with DataParallel, and lose "
            f"the votes that are cast in the copies",
            f"Train on one GPU: CUDA_VISIBLE_DEVICES=0. {OUR_WAY}",
        )
    ways = {
        "deepspeed": bool(args.deepspeed),
        "fsdp": bool(args.fsdp),
        f"{args.world_size} processes": args.world_size > 1,
    }
    for way, used in ways.items():
        if used:
            raise UsageProblem(
                f"Trainer: {way}: nothing exchanges the votes of ternary weights there", OUR_WAY
            )
