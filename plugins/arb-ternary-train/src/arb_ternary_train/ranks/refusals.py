"""What several ranks cannot do with the bytes of one process, refused by name before anything is
made.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from attrs import evolve
from torch import nn
from torch.optim import Optimizer

from arb_ternary.config.choice import Choice
from arb_ternary.errors import CheckpointError, ConfigError
from arb_ternary.optim.protocol import (
    build_optimizer,
    collect_trainable,
    inner_optimizers,
    may_defer,
)
from arb_ternary.optim.ternary import TernaryOptimizer
from arb_ternary.ternary.models import ternary_modules
from arb_ternary_train.added_parts import parts_added_by
from arb_ternary_train.build import RunParts, choices_in
from arb_ternary_train.checkpoint import Checkpoint
from arb_ternary_train.config import RunConfig
from arb_ternary_train.fine_tuning import frozen_at_first
from arb_ternary_train.protocols import ModelChangingPhase, RefusesRanks
from arb_ternary_train.ranks.owned_moments import unsliced
from arb_ternary_train.ranks.phases import deals
from arb_ternary_train.ranks.weights import check_torch
from arb_ternary_train.ranks.world import World
from arb_ternary_train.seeding import global_rng_state, preserved_global_rng


def refuse_config(config: RunConfig, world: World) -> None:
    """Refuse what the config alone tells.

    Raises:
        ConfigError: all of it, each at its option.
        EnvironmentProblem: torch is too old for it.
    """
    if world.size > 1:
        if config.ranks.weights == "sharded":
            check_torch()
        _raise(world, [*_in_phases(config, world.size), *_in_components(config)])


def refuse_parts(config: RunConfig, parts: RunParts, world: World) -> None:
    """Refuse what the model and its optimizer tell, once they are there.

    Raises:
        ConfigError: all of it.
    """
    if world.size == 1:
        return
    found = list(_in_model(parts.model))
    # An optimizer prepares its modules; what is frozen is to be as one process has it.
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
            found.extend(_in_optimizer(optimizer))
            if config.ranks.optimizer_state == "sharded":
                found.extend(("ranks.optimizer_state", why) for why in unsliced(optimizer))
    _raise(world, found)


def refuse_optimizer(optimizer: Optimizer, world: World) -> None:
    """Refuse an optimizer that a training loop takes on.

    Raises:
        ConfigError: it does not work on several ranks.
    """
    if world.size > 1:
        _raise(world, list(_in_optimizer(optimizer)))


def refuse_checkpoint(checkpoint: Checkpoint, world: World) -> None:
    """Refuse a checkpoint that was written within a step: what is summed so far is one process's.

    Raises:
        CheckpointError: it was.
    """
    if world.size > 1 and _is_within_step(checkpoint.state["phase"]):
        raise CheckpointError(
            f"{checkpoint.path}: it was written between two micro-batches of a step, and "
            f"{world.size} ranks begin with whole steps",
            "Resume from an earlier checkpoint (--resume PATH), or in one process up to the next "
            "one.",
        )


@contextmanager
def refuse_global_draws(device: torch.device) -> Iterator[None]:
    """Refuse, within a block, what draws from torch's global generators: each rank would draw on
    from its own place.

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


def _raise(world: World, found: list[tuple[str, str]]) -> None:
    if found:
        lines = "\n".join(f"{where}: {why}" for where, why in dict.fromkeys(found))
        raise ConfigError(
            f"{world.size} ranks cannot train this run:\n{lines}",
            "Change this, or train in one process: arb train",
        )


def _in_phases(config: RunConfig, size: int) -> Iterator[tuple[str, str]]:
    for index, choice in enumerate(config.phases):
        where = f"phases.{index}"
        options = choice.options
        if not deals(options):
            if isinstance(choice.build(), ModelChangingPhase):
                yield (
                    where,
                    f"{choice.name!r} runs on rank 0 alone, and changes what the model is made of",
                )
            if config.ranks.weights == "sharded":
                yield (
                    where,
                    f"{choice.name!r} runs on rank 0 alone; it needs ranks.weights: replicated",
                )
            continue
        if (microbatches := options.gradient_accumulation_steps) < size:
            why = (
                f"{microbatches} of all ranks together, and each of {size} needs one; use "
                f"{size} or more"
            )
            yield f"{where}.gradient_accumulation_steps", why
        if getattr(options, "preserve_state", False):
            yield (
                f"{where}.preserve_state",
                "what the model remembers goes from one micro-batch to the next",
            )
        if getattr(options, "policy", None) is not None:
            yield (
                f"{where}.policy",
                f"{options.policy.name!r} tries steps and takes them back in one process",
            )
        if config.ranks.weights == "sharded":
            yield from _with_sharded_weights(choice, where)
        if getattr(options, "use_amp", False) and options.amp_dtype == "float16":
            yield (
                f"{where}.amp_dtype",
                "the scale of the loss follows the gradients of one process; use bfloat16",
            )


def _with_sharded_weights(choice: Choice[Any], where: str) -> Iterator[tuple[str, str]]:
    from arb_ternary_train.standard import StandardPhase  # its loop imports this module

    if not isinstance(choice.build(), StandardPhase):
        yield (
            where,
            f"{choice.name!r} may run parts of a model, or change it; it needs ranks.weights: "
            f"replicated",
        )
    if getattr(choice.options, "compile_model", False):
        yield (
            f"{where}.compile_model",
            "what is compiled cannot gather weights; use it with ranks.weights: replicated",
        )


def _in_components(config: RunConfig) -> Iterator[tuple[str, str]]:
    for choice in choices_in(config):
        options = choice.options
        if isinstance(options, RefusesRanks):
            for option, why in options.refused_on_ranks():
                yield f"{choice.kind} {choice.name!r}, {option}", why
        if choice.kind == "optimizer" and getattr(options, "defers", False):
            yield f"optimizer {choice.name!r}", "it puts steps off, by what one process has seen"
    for option in _names(config.model):
        value = getattr(config.model.options, option)
        if option.endswith("scale_rule") and value == "correlation":
            yield (
                f"model.{option}",
                "'correlation' follows the tokens of one process; use residual or frozen",
            )
        if "dropout" in option and isinstance(value, float) and value > 0:
            yield f"model.{option}", "what is dropped is drawn anew on each rank; use 0"


def _names(choice: Choice[Any]) -> list[str]:
    options = choice.options
    return [field.name for field in attrs.fields(type(options))] if attrs.has(type(options)) else []


def _in_model(model: nn.Module) -> Iterator[tuple[str, str]]:
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            yield f"model, {name}", "what is dropped is drawn anew on each rank; use p=0"
    for name, ternary in ternary_modules(model):
        if getattr(ternary, "scale_rule", None) == "correlation":
            yield (
                f"model, {name}",
                "its exponents follow the tokens of one process (scale rule correlation)",
            )
    for name in collect_trainable(model).stored:
        yield (
            f"model, {name}",
            "integer weights of a format of their own are trained by one process",
        )


def _in_optimizer(optimizer: Optimizer) -> Iterator[tuple[str, str]]:
    for each in inner_optimizers(optimizer):
        name = type(each).__name__
        if may_defer(each):
            yield f"optimizer {name}", "it puts steps off, by what one process has seen"
        if isinstance(each, TernaryOptimizer) and not each.votes_by_rows:
            yield (
                f"optimizer {name}",
                "its rule needs the votes of all rows in one process (votes_by_rows is False)",
            )


def _is_within_step(state: Any) -> bool:
    """Whether a training loop in the state of a phase has micro-batches of a step that has not been
    taken.
    """
    if not isinstance(state, dict):
        return False
    in_flight = state.get("in_flight")
    if isinstance(in_flight, dict) and in_flight.get("accumulated"):
        return True
    return any(_is_within_step(value) for value in state.values())
