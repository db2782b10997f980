"""Imports a hook module, or a plugin that is a single file, and checks what interface it was
written for.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from arb_ternary import API_VERSION
from arb_ternary.errors import UsageProblem
from arb_ternary.plugins.discovery import Status
from arb_ternary.plugins.hooks import PluginFault, as_faults
from arb_ternary.specs import resolve

#: The attribute of a hook module that declares the version it was written for.
ATTRIBUTE = "ARB_API_VERSION"


def import_object(value: str) -> object:
    """The hook module (or ``module:attribute``) that an entry point names; else a
    :class:`PluginFault`.
    """
    with as_faults():
        found: object = resolve(value)
    return found


def import_file(path: Path) -> object:
    """Import a plugin that is a single file; it becomes the module of the file's stem, so that
    targets can name it.

    Raises:
        UsageProblem: the path is no Python file, or its stem is no name or the name of another
            module.
        PluginFault: the file raises an exception.
    """
    name = path.stem
    if not path.is_file():
        raise UsageProblem(f"{path}: there is no such plugin file")
    if path.suffix != ".py" or not name.isidentifier():
        raise UsageProblem(
            f"{path}: a plugin file is called NAME.py, with NAME a Python identifier"
        )
    found = None if name in sys.modules else find_spec(name)
    # The file itself may be what is found: its folder is on the path of a notebook or script beside
    # it.
    itself = found is not None and found.origin is not None and Path(found.origin).resolve() == path
    if name in sys.modules or (found is not None and not itself):
        raise UsageProblem(f"{path}: a module called {name!r} exists already", "rename the file")
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageProblem(f"{path}: it cannot be imported as a Python module")
    module = module_from_spec(spec)
    sys.modules[name] = module
    try:
        with as_faults():
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def check_version(plugin: object) -> None:
    """Raise a :class:`PluginFault` unless the interface version that ``plugin`` declares fits this
    program's.
    """
    reason = incompatibility(getattr(plugin, ATTRIBUTE, None))
    if reason is not None:
        raise PluginFault(Status.INCOMPATIBLE, reason)


def incompatibility(declared: Any, *, provided: tuple[int, int] = API_VERSION) -> str | None:
    """Why a plugin that declares ``declared`` (None: nothing) cannot be loaded, or None when it
    can.

    The same major version and a minor version no newer than ours loads: minor versions only add
    hooks and arguments.
    """
    if declared is None:
        return (
            f"it declares no plugin interface version; add `{ATTRIBUTE} = {provided}` to its "
            f"hook module"
        )
    if not (isinstance(declared, tuple) and [type(part) for part in declared] == [int, int]):
        return f"its {ATTRIBUTE} is {declared!r}; it must be a pair of integers such as {provided}"
    if declared[0] == provided[0] and declared[1] <= provided[1]:
        return None
    newer = declared > provided
    remedy = (
        "upgrade arb-ternary-core or install an older release"
        if newer
        else "install a newer release"
    )
    return (
        f"it is written for plugin interface {declared[0]}.{declared[1]}, this program provides "
        f"{provided[0]}.{provided[1]}; {remedy} of the plugin"
    )
