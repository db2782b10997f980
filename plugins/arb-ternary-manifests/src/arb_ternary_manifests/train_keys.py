"""The ``train:`` section of a run: what its keys may be, and which part of a config each decides.

A key is an option of something that has a config class already, so nothing is declared here: an
option of the run (``device``), of AdamW, of the phase that trains, or a key that only the trainer
has. A key ``NAME_KEY``, where ``NAME`` is a step policy, is the policy's option ``KEY``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import attrs
from attrs import evolve, frozen

from arb_ternary.config.errors import Fault, Faulty
from arb_ternary.config.fields import config_fields, default_of
from arb_ternary.config.structure import options_class, structure_with_faults
from arb_ternary.config.yaml_document import Document
from arb_ternary.errors import ArbError
from arb_ternary.plugins.manager import manager
from arb_ternary_manifests.trainers import TRAINERS, Trainer, missing_phase
from arb_ternary_train.config import RunConfig
from arb_ternary_train.optim.config import AdamWConfig

Fields = Mapping[str, "attrs.Attribute[Any]"]

#: The training guide's defaults, for options that have another default of their own.
GUIDE_DEFAULTS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "batch_size": 32,
        "block_size": 512,
        "lr": 3e-4,
        "min_lr": 0.0,
        "grad_clip": 1.0,
        "convergence_max_steps": None,
    }
)
#: Keys that are options of the run, and of AdamW, which trains float parameters.
RUN_KEYS: Final = ("device",)
ADAMW_KEYS: Final = ("weight_decay", "beta1", "beta2")
#: Options of a phase that are not keys: a run has ``steps``, and a policy's keys have its name.
_NOT_KEYS: Final = frozenset({"steps", "policy"})
#: The key of a policy, after its prefix, that says whether it takes part.
ENABLED: Final = "enabled"


@frozen(kw_only=True)
class TrainSection:
    """A checked ``train:`` section.

    Attributes:
        phase: name of the phase that trains.
        values: every key that the user wrote, and the guide's defaults of the phase's options.
        written: the keys that the user wrote.
        phase_keys: the keys that are options of the phase.
        policy: name and options of the step policy that decides the run's steps; None for no
            policy.
        notes: sentences for the user.
    """

    phase: str
    values: Mapping[str, Any]
    written: frozenset[str]
    phase_keys: frozenset[str]
    policy: tuple[str, Mapping[str, Any]] | None
    notes: tuple[str, ...]


def read_train_section(trainer: Trainer, train: Mapping[str, Any]) -> TrainSection:
    """Check the keys of a run's ``train:`` section.

    Keys of a policy that is not installed are allowed next to ``NAME_enabled: false``. Keys of
    another trainer or phase are allowed at their defaults, where they ask for nothing.

    Raises:
        Faulty: a key is unknown, belongs to another trainer or phase, needs a distribution that is
            not installed, or has a wrong value.
    """
    phase = train.get("phase", trainer.phases[0])
    if phase not in trainer.phases:
        phase = trainer.phases[0]  # structuring reports the wrong name
    fields = _all_fields(trainer, phase)
    policies, keys = _split_policies(train, fields)
    faults: list[Fault] = []
    notes: list[str] = []

    policy: tuple[str, Mapping[str, Any]] | None = None
    for name, options in policies.items():
        try:
            enabled = _read_policy(name, options, notes)
        except Faulty as error:
            faults += error.faults
            continue
        if enabled and policy is not None:
            text = f"a run has one step policy, and {policy[0]} is one already"
            faults.append(Fault((f"{name}_{ENABLED}",), text))
        elif enabled:
            policy = name, {key: value for key, value in options.items() if key != ENABLED}

    for key in [key for key in keys if key not in fields]:
        owner = _other_owner(key, trainer, phase)
        if owner is not None:
            default, text = owner
            value = keys.pop(key)
            if value != default or type(value) is not type(default):
                faults.append(Fault((key,), text))

    cls = _section_class(fields)
    _, wrong = structure_with_faults(cls, Document(keys), manager().registry)
    faults += (_with_missing_trainers(fault) for fault in wrong)
    if faults:
        raise Faulty(*faults)
    phase_keys = frozenset(_phase_fields(phase))
    defaults = {key: value for key, value in GUIDE_DEFAULTS.items() if key in phase_keys}
    return TrainSection(
        phase=phase,
        values=MappingProxyType({**defaults, **keys}),
        written=frozenset(keys),
        phase_keys=phase_keys,
        policy=policy,
        notes=tuple(notes),
    )


# --- which keys there are


def _fields(cls: Any) -> Fields:
    return {str(field.alias): field for field in config_fields(cls)}


def _phase_fields(phase: str) -> Fields:
    """Return the options of a phase that are keys of ``train:``."""
    fields = _fields(options_class(manager().registry.get("phase", phase).spec))
    return {key: field for key, field in fields.items() if key not in _NOT_KEYS}


def _all_fields(trainer: Trainer, phase: str) -> Fields:
    """Return every key of ``train:``, with the option that it is."""
    run = _fields(RunConfig)
    adamw = _fields(AdamWConfig)
    return {
        **{key: run[key] for key in RUN_KEYS},
        **{key: adamw[key] for key in ADAMW_KEYS},
        **_phase_fields(phase),
        **_fields(trainer.keys),
    }


def _section_class(fields: Fields) -> type[Any]:
    """Return the config class of a ``train:`` section with these keys."""
    options = {
        key: attrs.field(
            default=field.default,
            validator=field.validator,
            converter=field.converter,
            metadata=field.metadata,
            type=field.type,
        )
        for key, field in fields.items()
    }
    return attrs.make_class("TrainKeys", options, frozen=True, kw_only=True)


def _other_owner(key: str, trainer: Trainer, phase: str) -> tuple[Any, str] | None:
    """Return the default of a key that only another phase or trainer has, and what to say of it."""
    for other in sorted(TRAINERS.values(), key=lambda each: each is not trainer):
        if missing_phase(other) is not None:
            continue
        for other_phase in other.phases:
            field = _all_fields(other, other_phase).get(key)
            if field is None:
                continue
            default = GUIDE_DEFAULTS.get(key, default_of(field))
            if other is trainer:
                return default, f"is of the phase {other_phase}, and this run's phase is {phase}"
            return (
                default,
                f"is a key of trainer.{other.name}, and this target has trainer.{trainer.name}",
            )
    return None


def _with_missing_trainers(fault: Fault) -> Fault:
    """Add to the fault of an unknown key which trainers, not installed, may have it."""
    if not fault.message.startswith("unknown key"):
        return fault
    problems = {name: missing_phase(trainer) for name, trainer in TRAINERS.items()}
    missing = [f"trainer.{name} ({error.hint})" for name, error in problems.items() if error]
    if not missing:
        return fault
    return evolve(fault, hint=f"Trainers that are not installed may have it: {', '.join(missing)}")


# --- keys of policies


def _split_policies(
    train: Mapping[str, Any], known: Fields
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Split ``train`` into the options of each policy, by its name, and all other keys."""
    registry = manager().registry
    names = sorted({*registry.names("policy"), *registry.not_installed("policy")})
    policies: dict[str, dict[str, Any]] = {}
    rest: dict[str, Any] = {}
    for key, value in train.items():
        name = next((name for name in names if str(key).startswith(f"{name}_")), None)
        if name is None or key in known:
            rest[key] = value
        else:
            policies.setdefault(name, {})[str(key).removeprefix(f"{name}_")] = value
    return policies, rest


@frozen
class _NoOptions:
    """The options of a policy that has none."""


def _read_policy(name: str, keys: Mapping[str, Any], notes: list[str]) -> bool:
    """Check the keys of a policy, and return whether it takes part.

    Raises:
        Faulty: the policy is not installed, or an option is wrong.
    """
    registry = manager().registry
    try:
        cls: Any = options_class(registry.get("policy", name).spec)
    except ArbError as error:
        if keys.get(ENABLED) is False:
            notes.append(f"{name}_{ENABLED} is false: no key with {name}_ was read")
            return False
        path = (f"{name}_{next(iter(keys))}",)
        raise Faulty(Fault(path, error.what, error.hint, environment=True)) from error

    options = dict(keys)
    enabled = options.pop(ENABLED, None)
    _, faults = structure_with_faults(cls or _NoOptions, Document(options), registry)
    if enabled is not None and not isinstance(enabled, bool):
        faults.append(Fault((ENABLED,), f"must be true, false or null, not {enabled!r}"))
    if faults:
        placed = [evolve(each, path=(f"{name}_{each.path[0]}", *each.path[1:])) for each in faults]
        raise Faulty(*placed)
    return enabled is not False
