"""From a manifest to the configs of its runs, with every fault at its line of the manifest."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any, Final

from attrs import evolve, frozen

from arb_ternary.config.errors import Fault, Faulty, Origin, Path, find_origin, raise_faults
from arb_ternary.config.fields import config_fields, leaves
from arb_ternary.config.loading import value_origins
from arb_ternary.config.short_forms import POLICY, has_policy
from arb_ternary.config.yaml_document import Document, LoadedConfig
from arb_ternary.errors import ArbError, EnvironmentProblem
from arb_ternary.plugins.manager import manager
from arb_ternary.specs import load_target
from arb_ternary_manifests.document import Manifest, ManifestFile, Run, System, read_manifest
from arb_ternary_manifests.language_model import decoder_section
from arb_ternary_manifests.standard import TargetRun
from arb_ternary_manifests.train_keys import TrainSection, read_train_section
from arb_ternary_manifests.trainers import find_trainer
from arb_ternary_train.config import RunConfig
from arb_ternary_train.loading import load_document

#: Settings of a run's config that a manifest has keys of its own for.
_DECIDED: Final = ("name", "seed", "device", "model", "phases", "checks")


@frozen(eq=False, kw_only=True)
class PlannedRun:
    """A run of a manifest, ready to be trained.

    Attributes:
        target: name of the target that it belongs to.
        id: name of the run in its target.
        directory: where it writes.
        config: the config, as of ``arb train``.
        previous: directory of the run whose weights it starts from; None for the first of a target.
        notes: sentences for the user.
    """

    target: str
    id: str
    directory: FilePath
    config: RunConfig
    previous: FilePath | None
    notes: tuple[str, ...]


def load_manifest(
    path: str | os.PathLike[str], overrides: Sequence[str] = ()
) -> LoadedConfig[Manifest]:
    """Load a manifest for ``arb config``: check the keys of every ``train:``, but build nothing.

    Raises:
        ConfigError, EnvironmentProblem: something is wrong; every fault is listed with its line.
    """
    file = read_manifest(path, overrides)
    check_keys(file)
    manifest = file.manifest
    runs = sum(len(target.runs) for target in manifest.targets)
    summary = f"targets {', '.join(target.name for target in manifest.targets)}; runs: {runs}"
    origins = value_origins(manifest, file.document)
    return LoadedConfig(manifest, origins, file.document.source, summary)


def check_keys(file: ManifestFile) -> dict[tuple[int, int], TrainSection]:
    """Check the keys of every chosen target and of its runs' ``train:``, but build nothing.

    Returns:
        The ``train:`` section of each run, by the positions of target and run.

    Raises:
        ConfigError, EnvironmentProblem: something is wrong; every fault is listed with its line.
    """
    settings = {str(field.alias) for field in config_fields(RunConfig)} - set(_DECIDED)
    sections: dict[tuple[int, int], TrainSection] = {}
    faults: list[Fault] = []
    for t in file.targets:
        target = file.manifest.targets[t]
        at: Path = ("targets", t)
        try:
            trainer = find_trainer(target.trainer)
        except Faulty as error:
            faults += _below((*at, "trainer"), error)
            continue
        for r, run in enumerate(target.runs):
            try:
                sections[t, r] = read_train_section(trainer, run.train)
            except Faulty as error:
                faults += _below((*at, "runs", r, "train"), error)
        text = f"unknown key; the keys here are {', '.join(sorted(settings))}"
        unknown = [key for key in target.config if key not in settings]
        faults += [Fault((*at, "config", key), text) for key in unknown]
    if faults:
        raise_faults(faults, file.document.origins, file.document.source)
    return sections


def plan(
    file: ManifestFile, directory: FilePath, *, dry: bool, files: Callable[[str], FilePath]
) -> list[PlannedRun]:
    """Return the runs of the chosen targets, in order.

    Args:
        file: the manifest.
        directory: where the targets' folders are.
        dry: whether nothing will be trained.
        files: returns the folder in which the runs of a target, by its name, share files.

    Raises:
        ConfigError, EnvironmentProblem: something is wrong with a run; all faults that can be found
            are listed.
        ArbError: an error of a trainer.
    """
    sections = check_keys(file)
    planned: list[PlannedRun] = []
    faults: list[Fault] = []
    for t in file.targets:
        target = file.manifest.targets[t]
        try:
            model = _model_section(target.system)
        except Faulty as error:
            faults += _below(("targets", t, "system"), error)
            continue

        previous: FilePath | None = None
        cache: dict[str, Any] = {}
        for r, run in enumerate(target.runs):
            request = TargetRun(
                section=sections[t, r],
                first=sections[t, 0],
                steps=run.steps,
                model=model,
                config=target.config,
                files=files(target.name),
                dry=dry,
                cache=cache,
            )
            here = directory / target.name / run.id
            try:
                config = _run_config(file, (t, r), request)
            except Faulty as error:
                faults += error.faults
            else:
                if config.checkpoint.every == 0 and run is not target.runs[-1]:
                    text = (
                        "must be at least 1: the run that follows starts from the checkpoint at "
                        "the end of this one"
                    )
                    faults.append(Fault(("targets", t, "config", "checkpoint", "every"), text))
                notes = (*request.section.notes, *request.notes)
                planned.append(
                    PlannedRun(
                        target=target.name,
                        id=run.id,
                        directory=here,
                        config=config,
                        previous=previous,
                        notes=notes,
                    )
                )
            previous = here
    if faults:
        raise_faults(faults, file.document.origins, file.document.source)
    return planned


def _model_section(system: System | None) -> Mapping[str, Any] | None:
    """Return the ``model:`` section that a system stands for.

    ``system.language_model`` is the decoder, also as a topology of layers. ``system.NAME`` of any
    other model takes the model's options.
    """
    if system is None:
        return None
    prefix, _, name = system.ref.partition(".")
    if prefix != "system" or not name:
        text = f"must be the name of a system, system.NAME, not {system.ref!r}"
        raise Faulty(Fault(("ref",), text, "For example: system.language_model"))
    if name == "language_model":
        try:
            return decoder_section(system.config)
        except Faulty as error:
            raise Faulty(*_below(("config",), error)) from error
    registry = manager().registry
    if registry.find("model", name) is None:
        problem = registry.problem("model", name)
        text = f"no system is called {name!r}: {problem.what}"
        hint = f"The usual system is system.language_model.\n{problem.hint}"
        missing = isinstance(problem, EnvironmentProblem)
        raise Faulty(Fault(("ref",), text, hint, environment=missing))
    return {"name": name, **system.config}


def _run_config(file: ManifestFile, position: tuple[int, int], request: TargetRun) -> RunConfig:
    """Return the config of the run at ``position``: target and run.

    Raises:
        Faulty: with paths of the manifest, or with faults that have their line.
    """
    t, r = position
    target = file.manifest.targets[t]
    run = target.runs[r]
    trainer = find_trainer(target.trainer)
    try:
        run_settings = load_target(f"{target.trainer}:", trainer.settings)
        settings = _with_policy(run_settings(request), request.section)
        checks = _checks(run)
    except Faulty as error:
        raise Faulty(*_below(("targets", t, "runs", r), error)) from error

    data = {**settings, "name": f"{target.name}-{run.id}", "seed": run.seed}
    if checks:
        data["checks"] = checks
    data |= target.config
    origins = _origins(file, position, data, request.section)
    document = Document(data, file.document.source, origins)
    try:
        return load_document(document, FilePath(file.document.source).parent).config
    except ArbError as error:
        if not error.faults:
            raise
        prefix = f"{target.name}/{run.id}: "
        faults = []
        for fault in error.faults:
            path = _written_path(file, _source_path(file, position, fault.path, request.section))
            faults.append(evolve(fault, path=path, message=prefix + fault.message))
        raise Faulty(*faults) from error


def _with_policy(settings: dict[str, Any], section: TrainSection) -> dict[str, Any]:
    """Give the run's step policy to every phase that can have one.

    Raises:
        Faulty: no phase of the run can have one.
    """
    if section.policy is None:
        return settings
    name, options = section.policy
    phases = []
    for phase in settings["phases"]:
        spec = manager().registry.get("phase", phase["name"]).spec
        policy = {POLICY: {"name": name, **options}} if has_policy(spec) else {}
        phases.append({**phase, **policy})
    if phases == settings["phases"]:
        text = (
            f"no phase of the run trains by steps that a policy could decide over; remove the "
            f"{name}_ keys"
        )
        raise Faulty(Fault(("train",), text))
    return {**settings, "phases": phases}


def _checks(run: Run) -> list[dict[str, Any]]:
    """Return ``verify:`` of a run as ``checks:`` of a config."""
    single = isinstance(run.verify, Mapping)
    entries = [run.verify] if isinstance(run.verify, Mapping) else run.verify or []
    checks = []
    for index, entry in enumerate(entries):
        path: Path = ("verify",) if single else ("verify", index)
        if "name" in entry:
            raise Faulty(Fault((*path, "name"), "unknown key; did you mean 'type'?"))
        if "type" not in entry:
            names = ", ".join(manager().registry.names("check"))
            raise Faulty(Fault(path, f"needs the 'type' of the check: {names}"))
        options = {key: value for key, value in entry.items() if key != "type"}
        checks.append({"name": entry["type"], **options})
    return checks


# --- lines


def _origins(
    file: ManifestFile, position: tuple[int, int], data: Mapping[str, Any], section: TrainSection
) -> dict[Path, Origin]:
    """Return, by path, the line of the manifest that each value of a run's config comes from."""
    # What encloses a value has a line too, for faults of missing and unknown keys.
    paths = {path[:end] for path, _ in leaves(dict(data)) for end in range(len(path) + 1)}
    found: dict[Path, Origin] = {}
    for path in paths:
        source = _source_path(file, position, path, section)
        origin = find_origin(file.document.origins, source)
        if origin is not None:
            found[path] = origin
    return found


def _source_path(
    file: ManifestFile, position: tuple[int, int], path: Path, section: TrainSection
) -> Path:
    """Return the path in the manifest of the value at ``path`` of a run's config."""
    t, r = position
    target = file.manifest.targets[t]
    run = target.runs[r]
    at: Path = ("targets", t, "runs", r)
    if not path:
        return at
    if path[0] == "model":
        return at if target.system is None else ("targets", t, "system", "config", *path[1:])
    if path[0] == "checks":
        inside = path[2:] if isinstance(run.verify, Mapping) else path[1:]
        written = ["type" if part == "name" else part for part in inside]
        return (*at, "verify", *written)
    if path[0] in target.config:
        return ("targets", t, "config", *path)
    keys = [path[-1]]
    if section.policy is not None:
        keys.append(f"{section.policy[0]}_{path[-1]}")
    for key in keys:
        if key in run.train:
            return (*at, "train", key)
    return (*at, path[-1])


def _written_path(file: ManifestFile, path: Path) -> Path:
    """Return the longest beginning of ``path`` that is written in the manifest."""
    while path and path not in file.document.origins:
        path = path[:-1]
    return path


def _below(path: Path, error: Faulty) -> list[Fault]:
    """Return the faults with ``path`` before their own; those that have their line as they are."""
    return [
        fault if fault.origin else evolve(fault, path=(*path, *fault.path))
        for fault in error.faults
    ]
