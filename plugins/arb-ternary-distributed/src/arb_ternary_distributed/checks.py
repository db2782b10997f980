"""Checks before a distributed run: what needs one process, and what differs between ranks.

Several ranks train with the bytes of one process. Whatever cannot be done so is refused by name
before anything is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch
from attrs import evolve
from torch import nn
from torch.optim import Optimizer

from arb_ternary.config.choice import Choice
from arb_ternary.config.errors import show_path
from arb_ternary.config.fields import leaves, to_plain
from arb_ternary.errors import CheckpointError, ConfigError, EnvironmentProblem
from arb_ternary.optim.protocol import (
    build_optimizer,
    collect_trainable,
    inner_optimizers,
    may_defer,
)
from arb_ternary.optim.ternary import TernaryOptimizer
from arb_ternary.ternary.models import ternary_modules
from arb_ternary_distributed.optimizer_state import unsliced
from arb_ternary_train.added_parts import parts_added_by
from arb_ternary_train.build import RunParts, choices_in, versions_of
from arb_ternary_train.checkpoint import Checkpoint
from arb_ternary_train.config import RunConfig
from arb_ternary_train.fine_tuning import frozen_at_first
from arb_ternary_train.protocols import ModelChangingPhase, RefusesRanks
from arb_ternary_train.seeding import global_rng_state, preserved_global_rng
from arb_ternary_train.standard import StandardPhase

if TYPE_CHECKING:
    from arb_ternary_distributed.process_group import ProcessGroup

#: Oldest version of torch whose FSDP2 shards integer parameters; that of 2.5 crashes on them.
_LEAST_TORCH: Final = "2.13"


def check_config(config: RunConfig, size: int) -> None:
    """Check that ``size`` ranks can train ``config``.

    Raises:
        ConfigError: they cannot; it names every option.
        EnvironmentProblem: torch is too old.
    """
    if config.ranks.weights == "sharded":
        check_torch()
    _raise(size, [*_in_phases(config, size), *_in_components(config)])


def check_torch() -> None:
    """Check that this version of torch can shard packed weights.

    Raises:
        EnvironmentProblem: it cannot.
    """
    if torch.__version__ < _LEAST_TORCH:
        raise EnvironmentProblem(
            f"ranks.weights: sharded weights need torch {_LEAST_TORCH} or newer, and this is "
            f"{torch.__version__}",
            f"pip install 'torch>={_LEAST_TORCH}', or set ranks.weights to replicated",
        )


def check_parts(config: RunConfig, parts: RunParts, size: int) -> None:
    """Check that ``size`` ranks can train the model of a run with its optimizer.

    Raises:
        ConfigError: they cannot; it names every reason.
    """
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
    _raise(size, found)


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
    _raise(size, list(_in_optimizer(optimizer)))


def check_checkpoint(checkpoint: Checkpoint, size: int) -> None:
    """Check that ``size`` ranks can continue from ``checkpoint``.

    Raises:
        CheckpointError: it was written within a step: what is summed so far is that of one process.
    """
    if _is_within_step(checkpoint.state["phase"]):
        raise CheckpointError(
            f"{checkpoint.path}: it was written between two micro-batches of a step, and "
            f"{size} ranks begin with whole steps",
            "Resume from an earlier checkpoint (--resume PATH), or in one process up to the next "
            "one.",
        )


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


def _raise(size: int, found: list[tuple[str, str]]) -> None:
    if found:
        lines = "\n".join(f"{where}: {why}" for where, why in dict.fromkeys(found))
        raise ConfigError(
            f"{size} ranks cannot train this run:\n{lines}",
            "Change this, or train in one process: arb train",
        )


def has_microbatches(options: Any) -> bool:
    """Return whether a phase of these ``options`` trains on micro-batches, which ranks share."""
    return getattr(options, "gradient_accumulation_steps", None) is not None


def _in_phases(config: RunConfig, size: int) -> Iterator[tuple[str, str]]:
    for index, choice in enumerate(config.phases):
        where = f"phases.{index}"
        options = choice.options
        if not has_microbatches(options):
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
