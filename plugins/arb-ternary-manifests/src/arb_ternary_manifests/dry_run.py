"""Forecasts of runs: layers, parameters, memory, steps, and time from a few timed steps."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Final

from attrs import asdict, evolve, fields, frozen
from torch import nn

from arb_ternary.config.choice import PhaseChoice
from arb_ternary.errors import ArbError, EnvironmentProblem
from arb_ternary.optim.protocol import build_optimizer, collect_trainable
from arb_ternary.plugins.manager import manager
from arb_ternary.protocols.data import DataSource
from arb_ternary_train.audit import audit
from arb_ternary_train.auto_rate import resolve_auto_rate
from arb_ternary_train.build import built_module, require_protocol, undrawn
from arb_ternary_train.capabilities import parts_added_by, planned_steps
from arb_ternary_train.combinations import policy_notes
from arb_ternary_train.config import CheckpointConfig, RunConfig
from arb_ternary_train.growing_batches import tokens_in
from arb_ternary_train.memory import meta_model
from arb_ternary_train.optim.planned_state import planned_state_bytes
from arb_ternary_train.options import LoopOptions, StandardConfig
from arb_ternary_train.precision import resolve_device
from arb_ternary_train.progress import Silent
from arb_ternary_train.runner import RunRequest, train

#: Number of steps that are timed.
_PROBE_STEPS: Final = 3
#: Number of parameters from which a model is counted without allocating its weights.
_LARGE: Final = 1 << 27


@frozen(kw_only=True)
class PhaseForecast:
    """The forecast for a phase.

    Attributes:
        name: name of the phase.
        steps: optimizer steps; None if the phase takes none, or does not say before it runs.
        tokens: number of predictions to train on; None in the same cases.
        seconds: expected training time at the probe's speed; None without a probe.
    """

    name: str
    steps: int | None
    tokens: int | None
    seconds: float | None


@frozen(kw_only=True)
class RunForecast:
    """The forecast for a run.

    Attributes:
        layers: number of blocks; None if the model's options do not say.
        parameters, ternary_weights, float_parameters: numbers of parameters.
        model_bytes: size of weights, exponents, votes and float parameters.
        optimizer_bytes: size of the optimizer's state; None if unknown.
        gradient_bytes: size of float gradients; votes need none.
        phases: forecasts of the phases, in order.
        notes: sentences for the user.
    """

    layers: int | None
    parameters: int
    ternary_weights: int
    float_parameters: int
    model_bytes: int
    optimizer_bytes: int | None
    gradient_bytes: int
    phases: tuple[PhaseForecast, ...]
    notes: tuple[str, ...]

    @property
    def memory_bytes(self) -> int:
        """Memory that training needs, without activations."""
        return self.model_bytes + (self.optimizer_bytes or 0) + self.gradient_bytes

    def to_json(self) -> dict[str, Any]:
        """Return the forecast as a JSON object."""
        return {**asdict(self), "memory_bytes": self.memory_bytes}


def forecast(config: RunConfig, *, probe: bool) -> RunForecast:
    """Return the forecast for the run of ``config``; nothing stays on disk.

    Sizes are counted on a model without allocated weights if it can be built so. The probe trains
    a newly initialised model for three steps at the batch and block size of each training phase, in
    a temporary folder.

    Raises:
        ArbError: the run could not start either.
    """
    notes: list[str] = []
    resolved = resolve_auto_rate(_on_this_machine(config, notes))
    config = resolved.config
    notes += [*resolved.notes, *policy_notes(config)]
    data: DataSource = require_protocol(config.data.build(), DataSource, config.data)
    model = _sized_model(config, data.vocabulary_size)
    counted = audit(model)
    layers = getattr(config.model.options, "layers", None)
    return RunForecast(
        layers=layers if isinstance(layers, int) else None,
        parameters=counted.parameters,
        ternary_weights=counted.ternary_weights,
        float_parameters=counted.float_parameters,
        model_bytes=sum(row.nbytes for row in counted.rows),
        optimizer_bytes=_optimizer_bytes(config, model, notes),
        gradient_bytes=sum(
            parameter.nbytes for parameter in model.parameters() if parameter.requires_grad
        ),
        phases=tuple(_phase(config, choice, probe=probe) for choice in config.phases),
        notes=tuple(notes),
    )


def _on_this_machine(config: RunConfig, notes: list[str]) -> RunConfig:
    """Return ``config`` with a device that this machine has."""
    try:
        resolve_device(config.device)
    except EnvironmentProblem as error:
        notes.append(f"{error.what}; sizes are the same, and steps are timed on the cpu")
        return evolve(config, device="cpu")
    return config


def _sized_model(config: RunConfig, vocabulary_size: int) -> nn.Module:
    """Return the model, without allocated weights if it is large and can be built so."""
    model = meta_model(config.model, vocabulary_size)
    if model is not None and audit(model).parameters > _LARGE:
        return model
    with undrawn():
        return built_module(config.model, vocabulary_size)


def _optimizer_bytes(config: RunConfig, model: nn.Module, notes: list[str]) -> int | None:
    trainable = evolve(collect_trainable(model), later=parts_added_by(config.phases))
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        # Optimizers of votes read control words, which have no values here. Their state, a few
        # numbers per row and column, is left out.
        trainable = evolve(trainable, ternary={}, later=trainable.later | {"ternary"})
        if not trainable.floats:
            return 0
    try:
        return planned_state_bytes(build_optimizer("optimizer", config.optimizer, trainable))
    except ArbError as error:
        notes.append(f"{error.what}; its memory is not counted")
        return None


def _phase(config: RunConfig, choice: PhaseChoice, *, probe: bool) -> PhaseForecast:
    options = choice.options
    if not isinstance(options, LoopOptions):
        return PhaseForecast(name=choice.name, steps=None, tokens=None, seconds=None)
    steps = planned_steps(options, config)
    tokens = tokens_in(options, steps)
    seconds = tokens / _tokens_per_second(config, options) if probe else None
    return PhaseForecast(name=choice.name, steps=steps, tokens=tokens, seconds=seconds)


def _tokens_per_second(config: RunConfig, options: LoopOptions) -> float:
    """Measure the speed of a few steps of the whole model with these options."""
    loop = {field.name: getattr(options, field.name) for field in fields(LoopOptions)}
    changes: dict[str, Any] = {
        "steps": min(_PROBE_STEPS, options.steps),
        "warmup_steps": 0,
        "eval_every": 0,
        "policy": None,
    }
    if config.device == "cpu":  # perhaps in place of a device that this machine does not have
        changes |= {
            "pin_memory": False,
            "dtype": "float32" if options.dtype == "float16" else options.dtype,
        }
    phase = StandardConfig(**{**loop, **changes})
    spec = manager().registry.get("phase", "standard").spec
    probe = evolve(
        config,
        phases=(PhaseChoice("standard", phase, frozenset(), spec),),
        checks=(),
        trackers=(),
        checkpoint=CheckpointConfig(every=0),
    )
    with tempfile.TemporaryDirectory(prefix="arb-probe-") as folder:
        report = train(probe, RunRequest(directory=Path(folder) / "run", reporter=Silent))
    return report.tokens_per_second
