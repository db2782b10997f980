"""Import the hook module of a plugin, and check the interface version that it was written for."""

from __future__ import annotations

import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from typing import TYPE_CHECKING, Any, Final

from arb_ternary import API_VERSION
from arb_ternary.errors import UsageProblem
from arb_ternary.plugins.hooks import PluginFault, as_faults
from arb_ternary.specs import resolve

if TYPE_CHECKING:
    from pathlib import Path

#: The attribute of a hook module that declares the interface version it was written for.
ATTRIBUTE: Final = "ARB_API_VERSION"


def import_object(value: str) -> object:
    """Import the hook module, or ``module:attribute``, that an entry point names.

    Raises:
        PluginFault: it cannot be imported.
    """
    with as_faults():
        found: object = resolve(value)
    return found


def import_file(path: Path) -> object:
    """Import a plugin that is a single file.

    It becomes a module with the stem of the file as its name, so that targets can name it.

    Raises:
        UsageProblem: the path is no Python file, or its stem is not usable as a module name.
        PluginFault: the file raises an exception.
    """
    name = path.stem
    if not path.is_file():
        raise UsageProblem(f"{path}: there is no such plugin file")
    if path.suffix != ".py" or not name.isidentifier():
        raise UsageProblem(
            f"{path}: a plugin file is called NAME.py, with NAME a Python identifier"
        )
    if name in sys.modules or _is_taken(name, path):
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


def _is_taken(name: str, path: Path) -> bool:
    """Whether a module of that name can be imported that is not the file at ``path``.

    The file itself is found if its folder is on ``sys.path``, as for a notebook in that folder.
    """
    found = find_spec(name)
    if found is None:
        return False
    if found.origin is None:
        return True
    return type(path)(found.origin).resolve() != path


def check_version(plugin: object) -> None:
    """Refuse a plugin whose declared interface version does not fit this program.

    Raises:
        PluginFault: it does not fit.
    """
    reason = incompatibility(getattr(plugin, ATTRIBUTE, None))
    if reason is not None:
        raise PluginFault(reason)


def incompatibility(declared: Any, *, provided: tuple[int, int] = API_VERSION) -> str | None:
    """Return why a plugin that declares ``declared`` cannot be loaded, or None if it can.

    The same major version and a minor version no newer than ours loads: minor versions only add
    hooks and arguments. ``declared`` is None for a plugin that declares nothing.
    """
    if declared is None:
        return (
            f"it declares no plugin interface version; add `{ATTRIBUTE} = {provided}` to its "
            f"hook module"
        )
    is_pair = isinstance(declared, tuple) and [type(part) for part in declared] == [int, int]
    if not is_pair:
        return f"its {ATTRIBUTE} is {declared!r}; it must be a pair of integers such as {provided}"
    if declared[0] == provided[0] and declared[1] <= provided[1]:
        return None
    remedy = "install a newer release"
    if declared > provided:
        remedy = "upgrade arb-ternary-core or install an older release"
    return (
        f"it is written for plugin interface {declared[0]}.{declared[1]}, this program provides "
        f"{provided[0]}.{provided[1]}; {remedy} of the plugin"
    )
