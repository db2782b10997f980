"""Keys of a manifest's ``train:`` that begin with ``orchestrator_``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from attrs import frozen

from arb_ternary.config.errors import Fault, Faulty
from arb_ternary.config.fields import config_fields, to_plain
from arb_ternary.config.options import option
from arb_ternary.plugins.manager import manager
from arb_ternary_orchestrator.config import OrchestratorConfig
from arb_ternary_train.short_forms import POLICY, has_policy

_NAME: Final = "orchestrator"


@frozen(kw_only=True)
class OrchestratorKeys(OrchestratorConfig):
    """Every option of the policy ``orchestrator``, and whether it takes part."""

    enabled: bool | None = option(
        None,
        "whether the run is orchestrated; false = the other keys ask for nothing, null = true "
        "where there are any",
    )


def orchestrate(keys: OrchestratorKeys, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The target of the keys: the orchestrator in every phase that has steps to decide over.

    Raises:
        Faulty: there is no such phase in the run.
    """
    if keys.enabled is False:
        return settings
    asked = {
        str(each.alias): to_plain(value)
        for each in config_fields(OrchestratorConfig)
        if (value := getattr(keys, each.name)) != each.default
    }
    phases = [_phase(phase, {"name": _NAME, **asked}) for phase in settings["phases"]]
    if phases == settings["phases"]:
        text = (
            "no phase of the run trains by steps that a policy could decide over; remove the "
            "orchestrator_ keys"
        )
        raise Faulty(Fault(("train",), text))
    return {**settings, "phases": phases}


def _phase(phase: Any, policy: Mapping[str, Any]) -> Any:
    """``phase`` with the policy, where it takes one."""
    written = {"name": phase} if isinstance(phase, str) else phase
    spec = manager().registry.get("phase", written["name"]).spec
    return {**written, POLICY: dict(policy)} if has_policy(spec) else phase
