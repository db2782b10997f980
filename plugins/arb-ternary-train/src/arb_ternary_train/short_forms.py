"""Short forms of a config file, written out before it is structured.

In a phase whose options have a ``policy``, a key that is the name of a policy and no option of the
phase stands for it: ``{name: standard, orchestrator: {decision_interval: 100}}`` is ``{name:
standard, policy: {name: orchestrator, decision_interval: 100}}``.
"""

from __future__ import annotations

from typing import Any, Final, get_args

from attrs import evolve

from arb_ternary.config.errors import Fault, Path, find_origin
from arb_ternary.config.fields import config_fields, shape_of
from arb_ternary.config.structure import GIVEN, options_class
from arb_ternary.config.yaml_document import Document
from arb_ternary.errors import ArbError
from arb_ternary.plugins.registry import Registry
from arb_ternary.specs import PolicySpec, Spec

#: The option of a phase.
POLICY: Final = "policy"


def has_policy(spec: Spec) -> bool:
    """Whether a phase's options say what decides its steps; an option of that name may be of
    another type.
    """
    cls = options_class(spec)
    types = (
        [field.type for field in config_fields(cls) if field.alias == POLICY]
        if cls is not None
        else []
    )
    arms = [arm for t in types for arm in (get_args(t) if shape_of(t) == "union" else (t,))]
    return any(shape_of(arm) == "choice" and arm.kind == PolicySpec.kind for arm in arms)


def write_out_policies(document: Document, registry: Registry) -> Document:
    """``document``, that of a run, with every policy at its key; each value keeps its line.

    Faults are collected in the document: two policies in one phase, or one that is no mapping.
    """
    phases = document.data.get("phases") if isinstance(document.data, dict) else None
    if not isinstance(phases, list):
        return document
    written = list(phases)
    origins = dict(document.origins)
    faults = list(document.faults)
    for index, phase in enumerate(phases):
        names = _names_in(phase, registry)
        if not names:
            continue
        at: Path = ("phases", index)
        name = names[0]
        line = find_origin(document.origins, (*at, names[0]))
        others = [key for key in (*names, POLICY) if key in phase]
        if len(others) > 1:
            text = (
                f"the phase has several policies, {' and '.join(map(repr, others))}; keep one "
                f"of them"
            )
            faults.append(Fault((*at, name), text, origin=line))
        options = phase[name]
        if options is not None and not isinstance(options, dict):
            text = f"must be a mapping with the options of the policy, not {options!r}"
            faults.append(Fault((*at, name), text, origin=line))
            options = None
        rest = {key: value for key, value in phase.items() if key not in names}
        written[index] = {**rest, POLICY: {"name": name, **(options or {})}}
        origins = {
            _moved(path, (*at, name), (*at, POLICY)): origin for path, origin in origins.items()
        }
        if line is not None:
            origins[(*at, POLICY, "name")] = line
    if written == phases and len(faults) == len(document.faults):
        return document
    return evolve(
        document, data={**document.data, "phases": written}, origins=origins, faults=tuple(faults)
    )


def _names_in(phase: Any, registry: Registry) -> list[str]:
    """The keys of ``phase`` that stand for a policy; what else is wrong with it, structuring
    says.
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
    known = {"name", GIVEN, *(field.alias for field in config_fields(cls))}
    others = [key for key in phase if key not in known]
    if not others:
        return []
    policies = {*registry.names(PolicySpec.kind), *registry.not_installed(PolicySpec.kind)}
    return [key for key in others if key in policies]


def _moved(path: Path, source: Path, target: Path) -> Path:
    return (*target, *path[len(source) :]) if path[: len(source)] == source else path
