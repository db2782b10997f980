"""From a manifest to the configs of its runs, with every fault at the line of the manifest that it
comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any, Final

import attrs
from attrs import frozen

from arb_ternary.config.errors import Fault, Faulty, Origin, Path, find_origin, raise_faults
from arb_ternary.config.fields import config_fields, leaves
from arb_ternary.config.yaml_document import Document
from arb_ternary.errors import ArbError
from arb_ternary.plugins.manager import manager
from arb_ternary.specs import load_target
from arb_ternary_train.config import RunConfig
from arb_ternary_train.loading import load_document
from arb_ternary_train.manifest.document import ManifestFile, Run, Target
from arb_ternary_train.manifest.protocol import EarlierRun, TargetRun
from arb_ternary_train.manifest.training_keys import (
    TrainingKeys,
    find_component,
    read_training_keys,
)

#: Settings of a run's config that the manifest has keys of its own for.
_DECIDED: Final = ("name", "seed", "device", "model", "phases", "checks")


@frozen(eq=False, kw_only=True)
class PlannedRun:
    """A run of a manifest, ready to be trained.

    Attributes:
        target, id: where it stands in the manifest.
        directory: where it writes.
        config: of ``arb train``.
        previous: the run whose weights it starts from; None for the first of a target.
        notes: for the person who runs it, a sentence each.
    """

    target: str
    id: str
    directory: FilePath
    config: RunConfig
    previous: FilePath | None
    notes: tuple[str, ...]


def check_keys(file: ManifestFile) -> dict[tuple[int, int], TrainingKeys]:
    """The keys of every run's ``train:``, by the positions of target and run. Nothing is built.

    Raises:
        ConfigError, EnvironmentProblem: something is wrong with one; every fault is listed.
    """
    found: dict[tuple[int, int], TrainingKeys] = {}
    faults: list[Fault] = []
    registry = manager().registry
    for t in file.targets:
        target = file.manifest.targets[t]
        at: Path = ("targets", t)
        try:
            trainer = find_component(registry, "trainer", target.trainer)
        except Faulty as error:
            faults += _below((*at, "trainer"), error)
            continue
        for r, run in enumerate(target.runs):
            try:
                found[t, r] = read_training_keys(registry, trainer, run.train)
            except Faulty as error:
                faults += _below((*at, "runs", r, "train"), error)
        known = {str(option.alias) for option in config_fields(RunConfig)} - set(_DECIDED)
        faults += (
            Fault(
                (*at, "config", key), f"unknown key; the keys here are {', '.join(sorted(known))}"
            )
            for key in target.config
            if key not in known
        )
    if faults:
        raise_faults(faults, file.document.origins, file.document.source)
    return found


def plan(
    file: ManifestFile, directory: FilePath, *, dry: bool, files: Callable[[str], FilePath]
) -> list[PlannedRun]:
    """The runs of the chosen targets, in order.

    Args:
        file: the manifest.
        directory: where the targets' folders are.
        dry: whether nothing is going to be trained.
        files: where the runs of a target, by its name, keep what they share.

    Raises:
        ConfigError, EnvironmentProblem: something is wrong with a run; all faults that can be seen
            are listed.
        ArbError: what a trainer or a system raises.
    """
    keys = check_keys(file)
    planned: list[PlannedRun] = []
    faults: list[Fault] = []
    for t in file.targets:
        target = file.manifest.targets[t]
        try:
            model = _system_model(target)
        except Faulty as error:
            faults += _below(("targets", t, "system"), error)
            continue
        earlier: list[EarlierRun] = []
        shared: dict[str, Any] = {}
        for r, run in enumerate(target.runs):
            here = directory / target.name / run.id
            read = keys[t, r]
            request = TargetRun(
                steps=run.steps,
                given=read.given,
                model=model,
                config=target.config,
                earlier=tuple(earlier),
                files=files(target.name),
                dry=dry,
                shared=shared,
            )
            previous = earlier[-1].directory if earlier else None
            earlier.append(EarlierRun(id=run.id, keys=read.keys, directory=here))
            try:
                config = _run_config(file, (t, r), request, read, here)
            except Faulty as error:
                faults += error.faults
                continue
            if config.checkpoint.every == 0 and run is not target.runs[-1]:
                text = (
                    "must be at least 1: the run that follows starts from the checkpoint at the "
                    "end of this one"
                )
                faults.append(Fault(("targets", t, "config", "checkpoint", "every"), text))
            planned.append(
                PlannedRun(
                    target=target.name,
                    id=run.id,
                    directory=here,
                    config=config,
                    previous=previous,
                    notes=(*read.notes, *request.notes),
                )
            )
    if faults:
        raise_faults(faults, file.document.origins, file.document.source)
    return planned


def _system_model(target: Target) -> Mapping[str, Any] | None:
    if target.system is None:
        return None
    try:
        spec = find_component(manager().registry, "system", target.system.ref)
    except Faulty as error:
        raise Faulty(*_below(("ref",), error)) from error
    try:
        section: Mapping[str, Any] = load_target(f"system '{spec.name}':", spec.target)(
            target.system.config
        )
    except Faulty as error:
        raise Faulty(*_below(("config",), error)) from error
    return section


def _run_config(
    file: ManifestFile,
    place: tuple[int, int],
    request: TargetRun,
    read: TrainingKeys,
    directory: FilePath,
) -> RunConfig:
    """The config of a run; Faulty with paths of the manifest, or with faults that know their
    place.
    """
    t, r = place
    target = file.manifest.targets[t]
    run = target.runs[r]
    at = ("targets", t, "runs", r)
    spec = find_component(manager().registry, "trainer", target.trainer)
    try:
        settings = load_target(f"trainer '{spec.name}':", spec.target)(read.keys, request)
        for family, keys in read.families:
            settings = load_target(f"train_keys '{family.name}':", family.target)(keys, settings)
        checks = list(_checks(run))
    except Faulty as error:
        raise Faulty(*_below(at, error)) from error
    name = f"{target.name}-{run.id}"
    data = {
        **settings,
        "name": name,
        "seed": run.seed,
        **({"checks": checks} if checks else {}),
        **target.config,
    }
    prefixes = [family.name for family, _ in read.families]
    document = Document(data, file.document.source, _origins(file, place, data, prefixes))
    try:
        return load_document(document, FilePath(file.document.source).parent).config
    except ArbError as error:
        if not error.faults:
            raise
        shown = f"{target.name}/{run.id}: "
        raise Faulty(
            *(attrs.evolve(each, message=shown + each.message) for each in error.faults)
        ) from error


def _checks(run: Run) -> Iterator[dict[str, Any]]:
    """``verify:`` as a config has its ``checks:``."""
    entries: Sequence[Mapping[str, Any]] = (
        [run.verify] if isinstance(run.verify, Mapping) else run.verify or []
    )
    for index, entry in enumerate(entries):
        path: Path = ("verify",) if isinstance(run.verify, Mapping) else ("verify", index)
        if "name" in entry:
            raise Faulty(Fault((*path, "name"), "unknown key; did you mean 'type'?"))
        if "type" not in entry:
            names = ", ".join(manager().registry.names("check"))
            raise Faulty(Fault(path, f"needs the 'type' of the check: {names}"))
        yield {
            "name": entry["type"],
            **{key: value for key, value in entry.items() if key != "type"},
        }


def _origins(
    file: ManifestFile, place: tuple[int, int], data: Mapping[str, Any], prefixes: Sequence[str]
) -> dict[Path, Origin]:
    """The line of the manifest behind each value of a run's config; ``prefixes`` of keys that
    plugins have brought.
    """
    t, r = place
    at: Path = ("targets", t, "runs", r)
    target = file.manifest.targets[t]
    run = target.runs[r]
    found: dict[Path, Origin] = {}
    for path in ((), *_paths(data)):
        last = path[-1] if path else ""
        keys = (last, *(f"{prefix}_{last}" for prefix in prefixes))
        if path[:1] == ("model",):
            behind: Path = ("targets", t, "system") if target.system is not None else at
        elif path[:1] == ("checks",):
            inside = path[2:] if isinstance(run.verify, Mapping) else path[1:]
            behind = (*at, "verify", *("type" if part == "name" else part for part in inside))
        elif path and path[0] in target.config:
            behind = ("targets", t, "config", *path)
        elif key := next((key for key in keys if key in run.train), None):
            behind = (*at, "train", key)
        else:
            behind = (*at, last)
        origin = find_origin(file.document.origins, behind)
        if origin is not None:
            found[path] = origin
    return found


def _paths(data: Mapping[str, Any]) -> Iterator[Path]:
    """Every path in a config: those of its values, and of what they stand in."""
    seen: dict[Path, None] = {}
    for path, _ in leaves(dict(data)):
        seen |= dict.fromkeys(path[:end] for end in range(1, len(path) + 1))
    return iter(seen)


def _below(path: Path, error: Faulty) -> list[Fault]:
    return [
        fault if fault.origin else attrs.evolve(fault, path=(*path, *fault.path))
        for fault in error.faults
    ]
