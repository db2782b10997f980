"""Checks before a distributed run: what needs one process, and what differs between ranks.

Several ranks train with the bytes of one process. Whatever cannot be done so is refused by name
before anything is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from attrs import evolve
from torch import nn
from torch.optim import Optimizer

from arb_ternary.config.choice import Choice
from arb_ternary.config.errors import show_path
from arb_ternary.config.fields import leaves, to_plain
from arb_ternary.errors import ConfigError
from arb_ternary.optim.protocol import (
    build_optimizer,
    collect_trainable,
    inner_optimizers,
    may_defer,
)
from arb_ternary.optim.ternary import TernaryOptimizer
from arb_ternary.ternary.models import ternary_modules
from arb_ternary_distributed.optimizer_state import reasons_against_sharding
from arb_ternary_train.build import RunParts, choices_in, versions_of
from arb_ternary_train.capabilities import parts_added_by
from arb_ternary_train.config import RunConfig
from arb_ternary_train.fine_tuning import frozen_at_first
from arb_ternary_train.protocols import ModelChangingPhase
from arb_ternary_train.seeding import global_rng_state, preserved_global_rng

if TYPE_CHECKING:
    from arb_ternary_distributed.process_group import ProcessGroup

#: An option or part that several ranks cannot train, and why.
Fault = tuple[str, str]

_DEFERS: Final = "it defers steps by what one process has seen"


def check_config(config: RunConfig, size: int) -> None:
    """Check that ``size`` ranks can train ``config``.

    Raises:
        ConfigError: they cannot; it names every option.
    """
    faults: list[Fault] = []
    for index, choice in enumerate(config.phases):
        faults += _phase_faults(choice, f"phases.{index}", size)
    for choice in choices_in(config):
        faults += _component_faults(choice)
    _raise_faults(size, faults)


def check_parts(config: RunConfig, parts: RunParts, size: int) -> None:
    """Check that ``size`` ranks can train the model of a run with its optimizer.

    Raises:
        ConfigError: they cannot; it names every reason.
    """
    found = list(_model_faults(parts.model))
    # An optimizer prepares its modules; frozen ones have to be as in one process.
    with frozen_at_first(config, parts.model):
        trainable = evolve(collect_trainable(parts.model), later=parts_added_by(config.phases))
    if trainable.parts:
        with preserved_global_rng(parts.device):
            try:
                optimizer = build_optimizer("optimizer", config.optimizer, trainable)
            except ConfigError:
                # A phase may have to change the model first; the loop says so if it does not.
                optimizer = None
        if optimizer is not None:
            found.extend(_optimizer_faults(optimizer))
            if config.ranks.optimizer_state == "sharded":
                found.extend(
                    ("ranks.optimizer_state", why) for why in reasons_against_sharding(optimizer)
                )
    _raise_faults(size, found)


def check_same_run(world: ProcessGroup, config: RunConfig, parts: RunParts) -> None:
    """Check that all ranks have the same of everything that decides the bytes of a run. Collective.

    Raises:
        ArbError: something differs; it says what, and which rank has which.
    """
    world.check_agreement("versions", versions_of(config, parts.backend.name))
    settings = {show_path(path): value for path, value in leaves(to_plain(config))}
    world.check_agreement("config", settings)
    data = {
        "fingerprint": parts.data.fingerprint(),
        "vocabulary size": parts.data.vocabulary_size,
    }
    world.check_agreement("data", data)
    world.check_agreement("backend", parts.backend.name)
    # Sums of floats depend on the instructions that add them, and every rank computes the float
    # parts.
    world.check_agreement("processor", _processor(parts.device))


def _processor(device: torch.device) -> Mapping[str, str]:
    found = {"instructions": torch.backends.cpu.get_cpu_capability()}
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    return found


def check_optimizer(optimizer: Optimizer, size: int) -> None:
    """Check that ``size`` ranks can train with an optimizer that a training loop takes on.

    Raises:
        ConfigError: they cannot.
    """
    _raise_faults(size, [*_optimizer_faults(optimizer)])


@contextmanager
def no_global_draws(device: torch.device) -> Iterator[None]:
    """Check that nothing draws from torch's global generators within a block.

    Each rank would continue from its own position.

    Raises:
        ConfigError: something did.
    """
    before = _generators(device)
    yield
    if not all(map(torch.equal, before, _generators(device))):
        raise ConfigError(
            "model: it draws from torch's global generator in training, and the draws of several "
            "ranks are not those of one process",
            "Draw from a generator of its own (arb_ternary_train.seeding.derived_generator), or "
            "train in one process.",
        )


def _generators(device: torch.device) -> list[torch.Tensor]:
    state = global_rng_state(device)
    return [state[name] for name in ("torch", "cuda", "mps") if name in state]


def _raise_faults(size: int, faults: list[Fault]) -> None:
    if faults:
        lines = "\n".join(f"{where}: {why}" for where, why in dict.fromkeys(faults))
        raise ConfigError(
            f"{size} ranks cannot train this run:\n{lines}",
            "Change this, or train in one process: arb train",
        )


def has_microbatches(options: Any) -> bool:
    """Return whether a phase of these ``options`` trains on micro-batches, which ranks share."""
    return getattr(options, "gradient_accumulation_steps", None) is not None


def _phase_faults(choice: Choice[Any], where: str, size: int) -> Iterator[Fault]:
    options = choice.options
    if not has_microbatches(options):
        if isinstance(choice.build(), ModelChangingPhase):
            yield (
                where,
                f"{choice.name!r} runs on rank 0 alone, and changes the structure of the model",
            )
        return
    count = options.gradient_accumulation_steps
    if count < size:
        yield (
            f"{where}.gradient_accumulation_steps",
            f"{count} of all ranks together, and each of {size} needs one; use {size} or more",
        )
    if getattr(options, "preserve_state", False):
        yield (
            f"{where}.preserve_state",
            "the model's state is carried from one micro-batch to the next",
        )
    if getattr(options, "policy", None) is not None:
        yield (
            f"{where}.policy",
            f"{options.policy.name!r} tries steps and takes them back in one process",
        )
    if getattr(options, "use_amp", False) and options.amp_dtype == "float16":
        yield (
            f"{where}.amp_dtype",
            "the scale of the loss follows the gradients of one process; use bfloat16",
        )


def _component_faults(choice: Choice[Any]) -> Iterator[Fault]:
    options = choice.options
    # Options of a component may know which of them work in one process only.
    unsupported = getattr(options, "unsupported_when_distributed", None)
    if unsupported is not None:
        for option, why in unsupported():
            yield f"{choice.kind} {choice.name!r}, {option}", why
    if choice.kind == "optimizer" and getattr(options, "defers", False):
        yield f"optimizer {choice.name!r}", _DEFERS


def _model_faults(model: nn.Module) -> Iterator[Fault]:
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            yield f"model, {name}", "each rank draws its own dropout masks; use p=0"
    for name, ternary in ternary_modules(model):
        if getattr(ternary, "scale_rule", None) == "correlation":
            yield (
                f"model, {name}",
                "scale rule 'correlation' follows the tokens of one process; use residual or "
                "frozen",
            )


def _optimizer_faults(optimizer: Optimizer) -> Iterator[Fault]:
    for each in inner_optimizers(optimizer):
        name = type(each).__name__
        if may_defer(each):
            yield f"optimizer {name}", _DEFERS
        if isinstance(each, TernaryOptimizer) and not each.votes_by_rows:
            yield (
                f"optimizer {name}",
                "its rule needs the votes of all rows in one process (votes_by_rows is False)",
            )
