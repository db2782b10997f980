"""Builds the parts of a run from its config: device, backend, data, masking, model."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import attrs
import torch
from attrs import frozen
from torch import nn

from arb_ternary.backends.select import AUTO, Selection, request_backend, select, use_backend
from arb_ternary.config.choice import Choice
from arb_ternary.errors import ComponentError
from arb_ternary.plugins.manager import manager
from arb_ternary.protocols.data import DataSource, MaskingStrategy
from arb_ternary.protocols.runs import Phase
from arb_ternary.specs import ModelSpec
from arb_ternary.ternary.models import seed_votes
from arb_ternary.ternary.module import DRAW_TRITS
from arb_ternary.ternary.vote_memory import ACCUMULATES
from arb_ternary_train.config import RunConfig
from arb_ternary_train.memory import check_model_fits
from arb_ternary_train.observers import RunObservers
from arb_ternary_train.precision import resolve_device
from arb_ternary_train.seeding import seed_everything


@frozen(eq=False)
class RunParts:
    """The parts of a run.

    Attributes:
        device: where the model is.
        backend: the kernel backend, and who chose it.
        data: the data source.
        masking: the masking strategy.
        observers: the observers that the config activates.
        model: the model.
        vocabulary_size: ids that the model was built for.
    """

    device: torch.device
    backend: Selection
    data: DataSource
    masking: MaskingStrategy
    observers: RunObservers
    model: nn.Module
    vocabulary_size: int


def build_parts(
    config: RunConfig,
    *,
    backend: str | None = None,
    vocabulary_size: int = 0,
    device: torch.device | None = None,
) -> RunParts:
    """Build the parts that ``config`` names.

    The global generators are seeded, so the same config builds the same parts.

    Args:
        config: the resolved config.
        backend: backend of the command line; None = as environment or config say.
        vocabulary_size: least number of ids of the model; the data may use only some of them.
        device: device of the model; None = as the config says.

    Raises:
        ArbError: a component cannot be built, does not keep its protocol, or does not work here.
    """
    device = resolve_device(config.device) if device is None else device
    observers = build_observers(config)
    request = request_backend(
        command_line=backend, config=configured_backend(config), device=device.type
    )
    selection = select(request, observers.select_backend)
    data: DataSource = require_protocol(config.data.build(), DataSource, config.data)
    masking: MaskingStrategy = require_protocol(
        config.masking.build(), MaskingStrategy, config.masking
    )
    size = max(data.vocabulary_size, vocabulary_size)
    model = build_model(config, size, selection.name, device)
    return RunParts(device, selection, data, masking, observers, model, size)


def configured_backend(config: RunConfig) -> str | None:
    """Return the backend that the config asks for; None if it leaves the choice open."""
    return None if config.backend.strip().lower() == AUTO else config.backend


def build_model(
    config: RunConfig, vocabulary_size: int, backend: str, device: torch.device
) -> nn.Module:
    """Build the config's model on ``device``, with the run's seed for its votes.

    Raises:
        ComponentError: the factory did not return a module.
        ArbError: it does not fit into memory.
    """
    check_model_fits(config.model, vocabulary_size)
    seed_everything(config.seed)
    with use_backend(backend):
        model = built_module(config.model, vocabulary_size)
    seed_votes(model, config.seed)
    return model.to(device)


def built_module(choice: Choice[ModelSpec], vocabulary_size: int) -> nn.Module:
    """Build the model of ``choice``; ComponentError if its factory returns no module."""
    model = choice.build(vocabulary_size)
    if not isinstance(model, nn.Module):
        raise ComponentError(
            f"model {choice.name!r}: its factory returned a {type(model).__name__}, not a module"
        )
    return model


@contextmanager
def undrawn() -> Iterator[None]:
    """Build models with ternary weights of 0 within a ``with`` block, without drawing any.

    It is for models whose weights are all loaded afterwards. The global generators then differ from
    those after a model that draws.
    """
    token = DRAW_TRITS.set(False)
    try:
        yield
    finally:
        DRAW_TRITS.reset(token)


@contextmanager
def without_accumulators(left_out: bool = True) -> Iterator[None]:
    """Build ternary modules without accumulators within a ``with`` block.

    It saves a byte per weight; such modules compute, and refuse to learn.

    Args:
        left_out: False has no effect.
    """
    token = ACCUMULATES.set(not left_out and ACCUMULATES.get())
    try:
        yield
    finally:
        ACCUMULATES.reset(token)


def build_phase(config: RunConfig, index: int) -> Phase:
    """Build a phase of the config.

    Raises:
        ComponentError: it does not keep its protocol.
    """
    choice = config.phases[index]
    phase: Phase = require_protocol(choice.build(), Phase, choice)
    return phase


def build_observers(config: RunConfig) -> RunObservers:
    """Build the config's trackers; a second one of the same name gets a number."""
    observers: dict[str, object] = {}
    for choice in config.trackers:
        name = choice.name
        serial = 1
        while name in observers:
            serial += 1
            name = f"{choice.name}-{serial}"
        observers[name] = choice.build()
    return RunObservers(observers)


def require_protocol(component: Any, protocol: type, choice: Choice[Any]) -> Any:
    """Return ``component`` if it has everything that ``protocol`` asks for.

    Raises:
        ComponentError: it lacks something; everything that it lacks is named.
    """
    wanted = [name for name in dir(protocol) if not name.startswith("_")]
    absent = [name for name in wanted if not hasattr(component, name)]
    if absent:
        raise ComponentError(
            f"{choice.kind} {choice.name!r}: {type(component).__name__} does not keep the protocol "
            f"{protocol.__name__}: it lacks {', '.join(absent)}"
        )
    return component


def choices_in(value: Any) -> Iterator[Choice[Any]]:
    """Yield every component that a config names, at any depth."""
    if isinstance(value, Choice):
        yield value
        value = value.options
    if attrs.has(type(value)):
        for field in attrs.fields(type(value)):
            yield from choices_in(getattr(value, field.name))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from choices_in(item)


#: Cached: reading the metadata of torch and numpy takes milliseconds.
_version = cache(version)


def versions_of(config: Any, backend: str) -> dict[str, str]:
    """Return versions of Python, of numerical libraries, and of the distributions of ``backend``
    and of the components that ``config`` names.

    What is merely installed is not listed: it has no part in the run.
    """
    registry = manager().registry
    names = {(choice.kind, choice.name) for choice in choices_in(config)} | {("backend", backend)}
    used = {"arb-ternary-core", "torch", "numpy"}
    for kind, name in names:
        registered = registry.find(kind, name)
        if registered is not None and registered.distribution is not None:
            used.add(registered.distribution)
    versions = {"python": platform.python_version()}
    for distribution in sorted(used):
        try:
            versions[distribution] = _version(distribution)
        except PackageNotFoundError:
            versions[distribution] = "not a distribution"
    return versions
