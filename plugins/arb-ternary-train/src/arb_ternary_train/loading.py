"""Loads the config of a run: reads, overrides, checks requirements, structures."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path as FilePath
from typing import Any

from attrs import evolve

from arb_ternary import environment
from arb_ternary.config.errors import Fault, Faulty, Origin, find_origin, raise_faults
from arb_ternary.config.fields import leaves, to_plain
from arb_ternary.config.loading import read_document, value_origins
from arb_ternary.config.overrides import apply_overrides, set_value
from arb_ternary.config.short_forms import write_out_policies
from arb_ternary.config.structure import structure_with_faults
from arb_ternary.config.yaml_document import Document, LoadedConfig
from arb_ternary.errors import ArbError, EnvironmentProblem, UsageProblem
from arb_ternary.plugins.manager import Plugins, manager
from arb_ternary.plugins.registry import Registry
from arb_ternary_train.combinations import find_contradictions, policy_notes
from arb_ternary_train.config import RunConfig
from arb_ternary_train.exact import contradictions, make_exact
from arb_ternary_train.requirements import unmet_requirements


def load_config(
    path: str | os.PathLike[str], overrides: Iterable[str] = (), *, plugins: Plugins | None = None
) -> LoadedConfig[RunConfig]:
    """Load the config of a run.

    A value comes from ``overrides``, else from the environment (``ARB_TERNARY_BACKEND``), else from
    the file, or is the default. The plugin files of the config are loaded into ``plugins`` first.

    Args:
        path: a YAML file.
        overrides: ``path=value`` each, as given to ``-o``.
        plugins: where components come from; None = the plugin manager of the process.

    Raises:
        ConfigError: the file or its content is wrong; every fault is listed with file and line.
        EnvironmentProblem: the config is right, but names a plugin that is not installed or failed
            to load.
    """
    return load_document(
        apply_overrides(read_document(path), overrides), FilePath(path).parent, plugins=plugins
    )


def load_document(
    document: Document, folder: FilePath, *, plugins: Plugins | None = None
) -> LoadedConfig[RunConfig]:
    """Load a document as :func:`load_config` does; ``folder`` is the base of its plugin files."""
    host = plugins if plugins is not None else manager()
    document = _load_plugin_files(_apply_environment(document), folder, host)
    return structure_run(document, host.registry)


def in_only_phase(
    path: str | os.PathLike[str], overrides: Iterable[str], settings: Mapping[str, Any]
) -> list[str]:
    """Return overrides that give the only phase of a config the ``settings`` that are not None.

    Raises:
        ConfigError: the file cannot be read.
        UsageProblem: the config has several phases, or none.
    """
    given = {key: value for key, value in settings.items() if value is not None}
    if given:
        data = apply_overrides(read_document(path), overrides).data
        phases = data.get("phases") if isinstance(data, dict) else None
        if not isinstance(phases, list) or len(phases) != 1:
            key, value = next(iter(given.items()))
            raise UsageProblem(
                f"--{key.replace('_', '-')}: {path} has not exactly one phase",
                f"Say which: -o phases.N.{key}={str(value).lower()}",
            )
    return [f"phases.0.{key}={str(value).lower()}" for key, value in given.items()]


def structure_run(document: Document, registry: Registry) -> LoadedConfig[RunConfig]:
    """Structure the document of a run, check its requirements and components, apply ``exact``.

    Raises:
        ConfigError, EnvironmentProblem: as :func:`load_config`.
    """
    document = write_out_policies(document, registry)
    config, faults = structure_with_faults(RunConfig, document, registry)
    exact = find_origin(document.origins, ("exact",))
    faults.extend(contradictions(document.data, exact))
    unmet = unmet_requirements(_texts(document, "requires"))
    if unmet and all(fault.environment or fault.unknown_component for fault in faults):
        # An unknown component then only follows from the missing distribution.
        faults = [fault for fault in faults if not fault.unknown_component]
    if faults or unmet or config is None:
        raise_faults([*faults, *unmet], document.origins, document.source)
    try:
        resolved = make_exact(config, exact)
    except Faulty as error:
        raise_faults(error.faults, document.origins, document.source)
    refused = find_contradictions(resolved)
    if refused:
        raise_faults(refused, document.origins, document.source)

    before = dict(leaves(to_plain(config)))
    derived = Origin("derived", f"exact ({exact})")
    changed = {path: derived for path, value in leaves(to_plain(resolved)) if before[path] != value}
    phases = ", ".join(phase.name for phase in resolved.phases)
    summary = (
        f"{resolved.model.name} on {resolved.data.name}, {resolved.optimizer.name}, phases {phases}"
    )
    origins = {**value_origins(resolved, document), **changed}
    return LoadedConfig(resolved, origins, document.source, summary, policy_notes(resolved))


def _texts(document: Document, key: str) -> list[str]:
    """Return the list of texts at a top-level key; empty if it is none, which is a fault later."""
    value = document.data.get(key) if isinstance(document.data, dict) else None
    return value if isinstance(value, list) and all(isinstance(item, str) for item in value) else []


def _apply_environment(document: Document) -> Document:
    """Set the backend that the environment names, unless an override does."""
    value = environment.BACKEND.read().strip()
    origin = document.origins.get(("backend",))
    if not value or (origin is not None and origin.kind == "override"):
        return document
    return set_value(document, ("backend",), value, Origin("environment", environment.BACKEND.name))


def _load_plugin_files(document: Document, folder: FilePath, plugins: Plugins) -> Document:
    """Load the files under ``plugins:``, and make their paths absolute.

    So a resolved config works in any folder.
    """
    files = _texts(document, "plugins")
    faults = list(document.faults)
    for index, text in enumerate(files):
        origin = find_origin(document.origins, ("plugins", index))
        is_typed = origin is not None and origin.kind == "override"
        files[index] = str(((FilePath() if is_typed else folder) / text).resolve())
        try:
            plugins.load_file(FilePath(files[index]))
        except ArbError as error:
            missing = isinstance(error, EnvironmentProblem)
            faults.append(Fault(("plugins", index), error.what, error.hint, environment=missing))
    return evolve(document, faults=tuple(faults))
