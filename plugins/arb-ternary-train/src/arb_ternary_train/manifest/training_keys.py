"""Whose each key of ``train:`` is: the trainer's, or that of a plugin that brings all keys with a
prefix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from attrs import field, frozen

from arb_ternary.config.errors import Fault, Faulty, Path
from arb_ternary.config.fields import config_fields, default_of
from arb_ternary.config.structure import options_class, structure_with_faults
from arb_ternary.config.yaml_document import Document
from arb_ternary.errors import ArbError, EnvironmentProblem
from arb_ternary.plugins.registry import Registry
from arb_ternary_train.specs import TrainerSpec, TrainKeysSpec

#: The key of a family, behind its prefix, that says whether its plugin takes part.
ENABLED = "enabled"


@frozen(kw_only=True)
class TrainingKeys:
    """The keys of a run's ``train:``.

    Attributes:
        keys: those of the trainer, an instance of its class.
        given: those of them that the user wrote.
        families: those with a plugin's prefix, where the user wrote any: the plugin's component and
            an instance of its class.
        notes: what was left unread, a sentence each.
    """

    keys: Any
    given: frozenset[str]
    families: tuple[tuple[TrainKeysSpec, Any], ...] = ()
    notes: tuple[str, ...] = field(default=())


def find_component(registry: Registry, kind: str, reference: str) -> Any:
    """The spec that ``reference``, ``KIND.NAME``, names.

    Raises:
        Faulty: there is none, or it is not installed.
    """
    prefix, _, name = reference.partition(".")
    if prefix != kind or not name:
        names = ", ".join(f"{kind}.{each}" for each in registry.names(kind)) or "none"
        raise Faulty(
            Fault((), f"must be the name of a {kind}, {kind}.NAME, not {reference!r}: {names}")
        )
    try:
        return registry.get(kind, name).spec
    except ArbError as error:
        missing = isinstance(error, EnvironmentProblem)
        fault = Fault(
            (), error.what, error.hint, environment=missing, unknown_component=not missing
        )
        raise Faulty(fault) from error


def read_training_keys(
    registry: Registry, trainer: TrainerSpec, train: Mapping[str, Any]
) -> TrainingKeys:
    """The keys of ``train``, structured.

    Keys of a plugin that is not installed may stand where ``PREFIX_enabled`` is false, which leaves
    them unread. Keys of another trainer may stand at their defaults, which ask for nothing.

    Raises:
        Faulty: a key is unknown, of another trainer, of a plugin that is not installed, or has a
            wrong value.
    """
    cls: Any = options_class(trainer)
    own = {str(option.alias) for option in config_fields(cls)}
    rest: dict[str, Any] = {}
    families: dict[str, dict[str, Any]] = {}
    prefixes = {*registry.names("train_keys"), *registry.not_installed("train_keys")}
    for key, value in train.items():
        prefix = next((each for each in sorted(prefixes) if str(key).startswith(f"{each}_")), None)
        if prefix is None or key in own:
            rest[key] = value
        else:
            families.setdefault(prefix, {})[str(key).removeprefix(f"{prefix}_")] = value
    faults: list[Fault] = []
    notes: list[str] = []
    read: list[tuple[TrainKeysSpec, Any]] = []
    for prefix, keys in families.items():
        try:
            spec = find_component(registry, "train_keys", f"train_keys.{prefix}")
        except Faulty as error:
            if keys.get(ENABLED) is False:
                notes.append(f"{prefix}_{ENABLED} is false: no key with {prefix}_ was read")
            else:
                first = next(iter(keys))
                faults += [
                    Fault((f"{prefix}_{first}",), f.message, f.hint, environment=True)
                    for f in error.faults
                ]
            continue
        instance, wrong = structure_with_faults(_class_of(spec), Document(keys), registry)
        faults += (_prefixed(fault, prefix) for fault in wrong)
        read.append((spec, instance))
    for key, fault in list(_of_others(registry, trainer, own, rest)):
        del rest[key]
        faults += [] if fault is None else [fault]
    instance, wrong = structure_with_faults(cls, Document(rest), registry)
    faults += (_with_absent(fault, registry) for fault in wrong)
    if faults:
        raise Faulty(*faults)
    return TrainingKeys(
        keys=instance, given=frozenset(rest), families=tuple(read), notes=tuple(notes)
    )


def _of_others(
    registry: Registry, trainer: TrainerSpec, own: set[str], train: Mapping[str, Any]
) -> Iterator[tuple[str, Fault | None]]:
    """Keys that only other trainers have, each with what is wrong with it: nothing at its
    default.
    """
    for found in registry.all("trainer"):
        if found.name == trainer.name:
            continue
        for option in config_fields(_class_of(found.spec)):
            key = str(option.alias)
            if key not in train or key in own:
                continue
            own = own | {key}
            same = default_of(option) == train[key] and type(default_of(option)) is type(train[key])
            message = (
                f"is a key of trainer.{found.name}, and this target has trainer.{trainer.name}"
            )
            yield key, None if same else Fault((key,), message)


def _class_of(spec: Any) -> Any:
    return options_class(spec)


def _prefixed(fault: Fault, prefix: str) -> Fault:
    path: Path = (f"{prefix}_{fault.path[0]}", *fault.path[1:]) if fault.path else ()
    return Fault(path, fault.message, fault.hint, environment=fault.environment)


def _with_absent(fault: Fault, registry: Registry) -> Fault:
    """An unknown key may be one of a trainer that is not installed."""
    absent = registry.not_installed("trainer")
    if not absent or not fault.message.startswith("unknown key"):
        return fault
    listed = ", ".join(f"trainer.{name} (pip install {source})" for name, source in absent.items())
    return Fault(
        fault.path, fault.message, f"Trainers that are not installed may have it: {listed}"
    )
