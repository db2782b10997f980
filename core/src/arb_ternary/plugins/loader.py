"""Takes one plugin in, or leaves no trace of it.

A plugin is taken in three steps: its hook module is imported, its interface version is checked, and what its
registration hooks return is collected. Whatever goes wrong on the way is a :class:`PluginFault` with a status, after
which neither the hook manager nor the registry knows the plugin.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pluggy

from arb_ternary.errors import ArbError, UsageProblem, nearest
from arb_ternary.plugins.api_version import ATTRIBUTE, incompatibility
from arb_ternary.plugins.records import Status
from arb_ternary.plugins.surface import HOOKS, OBSERVATION, PREFIX, REGISTRATION
from arb_ternary.specs import Spec

__all__ = [
    "PluginFault",
    "attach",
    "check_hooks",
    "describe_exception",
    "implementations",
    "import_file",
    "import_object",
]


class PluginFault(Exception):
    """Why a plugin is not taken in: the status it gets, and a sentence."""

    def __init__(self, status: Status, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


def describe_exception(error: BaseException) -> str:
    """An exception on one line: its class and what it says."""
    lines = (error.what if isinstance(error, ArbError) else str(error)).strip().splitlines()
    # pluggy says what is wrong last, everyone else first
    text = " ".join(lines) if isinstance(error, pluggy.PluginValidationError) else "".join(lines[:1])
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def import_object(value: str) -> object:
    """The hook module (or ``module:attribute``) that an entry point names.

    Raises:
        PluginFault: it cannot be imported, for whatever reason.
    """
    module_name, _, attribute = value.partition(":")
    try:
        found: object = import_module(module_name)
        for part in filter(None, attribute.split(".")):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:  # a plugin that calls sys.exit() must not end the program either
        raise PluginFault(Status.FAILED, describe_exception(error)) from error
    return found


def import_file(path: Path) -> object:
    """Import a plugin that is a single file; it becomes the module of the file's stem, so that targets can name it.

    Raises:
        UsageProblem: the path is no Python file, or its stem is no name or the name of another module.
        PluginFault: the file raises an exception.
    """
    name = path.stem
    if not path.is_file():
        raise UsageProblem(f"{path}: there is no such plugin file")
    if path.suffix != ".py" or not name.isidentifier():
        raise UsageProblem(f"{path}: a plugin file is called NAME.py, with NAME a Python identifier")
    found = None if name in sys.modules else find_spec(name)
    # The file itself may be what is found: its folder is on the path of a notebook or script beside it.
    itself = found is not None and found.origin is not None and Path(found.origin).resolve() == path
    if name in sys.modules or (found is not None and not itself):
        raise UsageProblem(f"{path}: a module called {name!r} exists already", "rename the file")
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageProblem(f"{path}: it cannot be imported as a Python module")
    module = module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise PluginFault(Status.FAILED, describe_exception(error)) from error
    except BaseException:
        del sys.modules[name]
        raise
    return module


def attach(manager: pluggy.PluginManager, plugin: object, name: str, *, version_required: bool = True) -> list[Spec]:
    """Check a plugin, register its hooks, and return everything that it provides.

    Args:
        manager: the manager that knows the hook specifications.
        plugin: a hook module, or an object with hook implementations.
        name: the plugin's name, unique in ``manager``.
        version_required: whether a missing interface version is a fault.

    Raises:
        PluginFault: the plugin cannot be taken in; ``manager`` is as before.
    """
    declared = getattr(plugin, ATTRIBUTE, None)
    if declared is not None or version_required:
        incompatible = incompatibility(declared)
        if incompatible is not None:
            raise PluginFault(Status.INCOMPATIBLE, incompatible)
    try:
        check_hooks(manager, plugin)
        _refuse_observers(manager, plugin)
        manager.register(plugin, name)
        return _collect(manager, plugin)
    except (Exception, SystemExit) as error:
        if manager.is_registered(plugin):
            manager.unregister(plugin)
        if isinstance(error, PluginFault):
            raise
        raise PluginFault(Status.FAILED, describe_exception(error)) from error


def implementations(manager: pluggy.PluginManager, plugin: object) -> dict[str, bool]:
    """The hooks that a plugin implements, each with whether it is optional (may be unknown to this program)."""
    found: dict[str, bool] = {}
    for attribute in dir(plugin):
        options = manager.parse_hookimpl_opts(plugin, attribute)
        if options is not None:
            found[options.get("specname") or attribute] = bool(options.get("optionalhook"))
    return found


def check_hooks(manager: pluggy.PluginManager, plugin: object) -> None:
    """Find what pluggy would pass over in silence.

    Raises:
        PluginFault: a function is marked as the implementation of a hook that does not exist, or a function has the
            name of a hook and no mark, or there is no implementation at all.
    """
    found = implementations(manager, plugin)
    for hook, optional in found.items():
        if hook not in HOOKS and not optional:
            close = nearest(hook, HOOKS)
            suggestion = f"; did you mean {close!r}?" if close else f"; hooks: {', '.join(HOOKS)}"
            raise PluginFault(Status.UNKNOWN_HOOK, f"no hook is called {hook!r}{suggestion}")
    for hook in HOOKS:
        if hook not in found and callable(getattr(plugin, hook, None)):
            raise PluginFault(Status.FAILED, f"{hook} is not marked with @arb_ternary.hookimpl")
    if not found:
        raise PluginFault(Status.FAILED, f"it implements no hook ({PREFIX}... marked with @arb_ternary.hookimpl)")


def _refuse_observers(manager: pluggy.PluginManager, plugin: object) -> None:
    for hook in implementations(manager, plugin):
        if hook in OBSERVATION:
            raise PluginFault(
                Status.FAILED, f"{hook} is called on the observers of a run only: register a tracker that implements it"
            )


def _collect(manager: pluggy.PluginManager, plugin: object) -> list[Spec]:
    specs: list[Spec] = []
    seen: set[tuple[str, str]] = set()
    for hook, expected in REGISTRATION.items():
        for implementation in getattr(manager.hook, hook).get_hookimpls():
            if implementation.plugin is not plugin:
                continue
            if implementation.wrapper or implementation.hookwrapper:
                raise PluginFault(Status.FAILED, f"{hook} is a wrapper; a registration hook cannot be wrapped")
            for spec in _checked(hook, expected, implementation.function()):
                if (spec.kind, spec.name) in seen:
                    raise PluginFault(Status.FAILED, f"{hook} returned two {spec.kind}s called {spec.name!r}")
                seen.add((spec.kind, spec.name))
                specs.append(spec)
    return specs


def _checked(hook: str, expected: type[Spec], result: Any) -> Sequence[Spec]:
    if result is None:
        return ()
    if not isinstance(result, Sequence) or isinstance(result, str):
        raise PluginFault(
            Status.FAILED, f"{hook} returned {result!r}; it must return a sequence of {expected.__name__}"
        )
    for spec in result:
        if not isinstance(spec, expected):
            raise PluginFault(Status.FAILED, f"{hook} returned {spec!r}; every item must be a {expected.__name__}")
    return result
