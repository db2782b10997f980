"""Whether a plugin's declared version of the plugin interface fits this program."""

from __future__ import annotations

from typing import Any

from arb_ternary import API_VERSION

__all__ = ["ATTRIBUTE", "incompatibility", "spelled"]

#: The attribute of a hook module that declares the version it was written for.
ATTRIBUTE = "ARB_API_VERSION"


def spelled(version: tuple[int, int]) -> str:
    """``(1, 0)`` as ``1.0``."""
    return f"{version[0]}.{version[1]}"


def incompatibility(declared: Any, *, provided: tuple[int, int] = API_VERSION) -> str | None:
    """Why a plugin that declares ``declared`` cannot be loaded, or None when it can.

    The same major version and a minor version no newer than ours loads: minor versions only add hooks and arguments.
    ``declared`` is None when the module has no :data:`ATTRIBUTE`.
    """
    if declared is None:
        return f"it declares no plugin interface version; add `{ATTRIBUTE} = {provided}` to its hook module"
    if not (
        isinstance(declared, tuple)
        and len(declared) == 2
        and all(isinstance(part, int) and not isinstance(part, bool) for part in declared)
    ):
        return f"its {ATTRIBUTE} is {declared!r}; it must be a pair of integers such as {provided}"
    written_for = f"it is written for plugin interface {spelled(declared)}, this program provides {spelled(provided)}"
    if declared[0] > provided[0] or (declared[0] == provided[0] and declared[1] > provided[1]):
        return f"{written_for}; upgrade arb-ternary-core or install an older release of the plugin"
    if declared[0] < provided[0]:
        return f"{written_for}; install a newer release of the plugin"
    return None
