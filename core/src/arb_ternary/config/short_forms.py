"""The short form of a step policy in a config, written out before the config is structured.

If the options of a phase include a ``policy``, a key of the phase that is the name of a policy, and
not an option of the phase, stands for it: ``{name: standard, orchestrator: {decision_interval:
100}}`` means ``{name: standard, policy: {name: orchestrator, decision_interval: 100}}``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, get_args

from attrs import evolve

from arb_ternary.config.errors import Fault, Origin, Path, find_origin
from arb_ternary.config.fields import config_fields, shape_of
from arb_ternary.config.structure import GIVEN, options_class
from arb_ternary.config.yaml_document import Document
from arb_ternary.errors import ArbError
from arb_ternary.plugins.registry import Registry
from arb_ternary.specs import PolicySpec, Spec

#: The option of a phase that names its policy.
POLICY: Final = "policy"


def has_policy(spec: Spec) -> bool:
    """Whether the options of a phase include a step policy."""
    cls = options_class(spec)
    if cls is None:
        return False
    for field in config_fields(cls):
        if field.alias == POLICY:
            return _takes_policy(field.type)
    return False


def _takes_policy(t: Any) -> bool:
    """Whether a policy is a value of the type: an option called ``policy`` may be of another."""
    arms = get_args(t) if shape_of(t) == "union" else (t,)
    return any(shape_of(arm) == "choice" and arm.kind == PolicySpec.kind for arm in arms)


def write_out_policies(document: Document, registry: Registry) -> Document:
    """Return the document of a run with every policy under its key; each value keeps its line.

    Faults are collected in the document: two policies in one phase, or one that is not a mapping.
    """
    phases = document.data.get("phases") if isinstance(document.data, dict) else None
    if not isinstance(phases, list):
        return document
    written = list(phases)
    origins = dict(document.origins)
    faults = list(document.faults)
    for index, phase in enumerate(phases):
        names = _policies_in(phase, registry)
        if not names:
            continue
        place: Path = ("phases", index)
        source = (*place, names[0])
        target = (*place, POLICY)
        line = find_origin(document.origins, source)
        faults += _faults_of(phase, names, source, line)
        options = phase[names[0]]
        if not isinstance(options, dict):
            options = {}
        rewritten = {key: value for key, value in phase.items() if key not in names}
        rewritten[POLICY] = {"name": names[0], **options}
        written[index] = rewritten
        origins = {_moved(path, source, target): origin for path, origin in origins.items()}
        if line is not None:
            origins[(*target, "name")] = line
    if written == phases and len(faults) == len(document.faults):
        return document
    data = {**document.data, "phases": written}
    return evolve(document, data=data, origins=origins, faults=tuple(faults))


def _policies_in(phase: Any, registry: Registry) -> list[str]:
    """Return the keys of ``phase`` that stand for a policy.

    Whatever else is wrong with the phase is reported when it is structured.
    """
    name = phase.get("name") if isinstance(phase, dict) else None
    if not isinstance(name, str):
        return []
    try:
        spec = registry.get("phase", name).spec
        cls = options_class(spec) if has_policy(spec) else None
    except ArbError:
        return []
    if cls is None:
        return []
    known = {field.alias for field in config_fields(cls)}
    known |= {"name", GIVEN}
    others = [key for key in phase if key not in known]
    if not others:
        return []
    policies = {*registry.names(PolicySpec.kind), *registry.not_installed(PolicySpec.kind)}
    return [key for key in others if key in policies]


def _faults_of(
    phase: Mapping[str, Any], names: list[str], path: Path, line: Origin | None
) -> list[Fault]:
    """Return the faults of a phase with the policies ``names``, the first of them at ``path``."""
    faults = []
    policies = list(names)
    if POLICY in phase:
        policies.append(POLICY)
    if len(policies) > 1:
        listed = " and ".join(map(repr, policies))
        text = f"the phase has several policies, {listed}; keep one of them"
        faults.append(Fault(path, text, origin=line))
    options = phase[names[0]]
    if options is not None and not isinstance(options, dict):
        text = f"must be a mapping with the options of the policy, not {options!r}"
        faults.append(Fault(path, text, origin=line))
    return faults


def _moved(path: Path, source: Path, target: Path) -> Path:
    """Return ``path`` with its beginning ``source`` replaced by ``target``."""
    if path[: len(source)] != source:
        return path
    return (*target, *path[len(source) :])
