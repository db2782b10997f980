"""The short form of a step policy in a config, written out before the config is structured.

If the options of a phase include a ``policy``, a key of the phase that is the name of a policy, and
not an option of the phase, stands for it: ``{name: standard, orchestrator: {decision_interval:
100}}`` means ``{name: standard, policy: {name: orchestrator, decision_interval: 100}}``.
"""

from __future__ import annotations

from typing import Any, Final

from attrs import evolve

from arb_ternary.config.choice import Choice
from arb_ternary.config.errors import Fault, Path, find_origin
from arb_ternary.config.fields import config_fields
from arb_ternary.config.structure import options_class
from arb_ternary.config.yaml_document import Document
from arb_ternary.errors import ArbError
from arb_ternary.plugins.registry import Registry
from arb_ternary.specs import PolicySpec, Spec

#: The option of a phase that names its policy.
POLICY: Final = "policy"
_POLICY_TYPES: Final = (Choice[PolicySpec], Choice[PolicySpec] | None)


def has_policy(spec: Spec) -> bool:
    """Whether the options of a phase include a step policy."""
    cls = options_class(spec)
    fields = () if cls is None else config_fields(cls)
    # An option called `policy` may be of another type.
    return any(field.alias == POLICY and field.type in _POLICY_TYPES for field in fields)


def write_out_policies(document: Document, registry: Registry) -> Document:
    """Return the document of a run with every policy under its key; each value keeps its line.

    Faults are collected in the document: two policies in one phase, or one that is not a mapping.
    """
    phases = document.data.get("phases") if isinstance(document.data, dict) else None
    if not isinstance(phases, list):
        return document
    for index, phase in enumerate(phases):
        names = _policies_in(phase, registry)
        if names:
            document = _written_out(document, index, names)
    return document


def _policies_in(phase: Any, registry: Registry) -> list[str]:
    """Return the keys of ``phase`` that stand for a policy.

    Whatever else is wrong with the phase is reported when it is structured.
    """
    policies = {*registry.names(PolicySpec.kind), *registry.not_installed(PolicySpec.kind)}
    names = [key for key in phase if key in policies] if isinstance(phase, dict) else []
    if not names or not isinstance(phase.get("name"), str):
        return []
    try:
        spec = registry.get("phase", phase["name"]).spec
        cls = options_class(spec) if has_policy(spec) else None
    except ArbError:
        return []
    options = {field.alias for field in config_fields(cls)} if cls else set(names)
    return [name for name in names if name not in options]


def _written_out(document: Document, index: int, names: list[str]) -> Document:
    """Return the document with the policies ``names`` of a phase written out."""
    phases = list(document.data["phases"])
    phase = phases[index]
    source: Path = ("phases", index, names[0])
    target: Path = ("phases", index, POLICY)
    line = find_origin(document.origins, source)
    faults = list(document.faults)
    policies = [*names, POLICY] if POLICY in phase else names
    if len(policies) > 1:
        listed = " and ".join(map(repr, policies))
        text = f"the phase has several policies, {listed}; keep one of them"
        faults.append(Fault(source, text, origin=line))
    options = phase[names[0]]
    if options is not None and not isinstance(options, dict):
        text = f"must be a mapping with the options of the policy, not {options!r}"
        faults.append(Fault(source, text, origin=line))
        options = None

    others = {key: value for key, value in phase.items() if key not in names}
    phases[index] = {**others, POLICY: {"name": names[0], **(options or {})}}
    origins = {}
    for path, origin in document.origins.items():
        is_option = path[:3] == source
        origins[(*target, *path[3:]) if is_option else path] = origin
    if line is not None:
        origins[(*target, "name")] = line
    data = {**document.data, "phases": phases}
    return evolve(document, data=data, origins=origins, faults=tuple(faults))
