"""``requires:`` of a config: distributions that must be installed before anything is built."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from arb_ternary.config.errors import Fault
from arb_ternary.plugins.discovery import install_command

if TYPE_CHECKING:
    from packaging.requirements import Requirement


def parse_requirement(text: str) -> Requirement:
    """Return a requirement as pip reads it (PEP 508).

    Raises:
        ValueError: ``text`` is not one.
    """
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        return Requirement(text)
    except InvalidRequirement as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"'{text}' is not a requirement such as name>=1.0: {reason}") from None


def unmet_requirements(requirements: Sequence[str]) -> list[Fault]:
    """Return a fault for each requirement that this environment does not meet.

    Malformed requirements are left to validation.
    """
    faults = []
    for index, text in enumerate(requirements):
        try:
            requirement = parse_requirement(text)
        except ValueError:
            continue
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            problem = f"{requirement.name} is not installed"
        else:
            # A checkout has a development version of the series installed.
            if requirement.specifier.contains(installed, prereleases=True):
                continue
            problem = (
                f"{requirement.name} {installed} is installed, the config needs "
                f"{requirement.specifier}"
            )
        wanted = str(requirement).partition(";")[0].strip()
        faults.append(
            Fault(("requires", index), problem, hint=install_command(wanted), environment=True)
        )
    return faults
