"""Takes one plugin in, or leaves no trace of it.

A plugin is taken in in steps: its hook module is imported, its interface version is checked, and its registration hooks
are called. Whatever goes wrong on the way is a :class:`PluginFault` with a status, after which neither the hook manager
nor the registry knows the plugin.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pluggy

from arb_ternary import hookspecs
from arb_ternary.errors import ArbError, UsageProblem, nearest
from arb_ternary.plugins.api_version import ATTRIBUTE, incompatibility
from arb_ternary.plugins.records import Status
from arb_ternary.plugins.surface import OBSERVATION, PREFIX, STATED, registration_hooks
from arb_ternary.specs import Spec

__all__ = [
    "HookManager",
    "PluginFault",
    "attach",
    "check_version",
    "describe_exception",
    "import_file",
    "import_object",
    "kinds_of",
]

_KINDS_HOOK = "arb_register_kinds"


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


class HookManager(pluggy.PluginManager):
    """pluggy's manager with the hooks of this program; what pluggy would pass over in silence is a fault.

    Attributes:
        kinds: the kinds of component whose registration hooks exist, by name.
    """

    def __init__(self) -> None:
        super().__init__("arb_ternary")
        self.add_hookspecs(hookspecs)
        self.kinds: dict[str, type[Spec]] = {}

    @property
    def hooks(self) -> tuple[str, ...]:
        """The names of all hooks: registration first."""
        return (*(kind.hook for kind in self.kinds.values()), *STATED)

    def add_kinds(self, kinds: Sequence[type[Spec]]) -> None:
        """Let plugins register components of these kinds.

        Raises:
            PluginFault: a kind or its hook exists.
        """
        for kind in kinds:
            if kind.kind in self.kinds or kind.hook in self.hooks:
                raise PluginFault(Status.CONFLICT, f"there is a kind {kind.kind!r} or a hook {kind.hook} already")
        self.kinds.update((kind.kind, kind) for kind in kinds)
        if kinds:
            self.add_hookspecs(type("Registration", (), registration_hooks(kinds)))

    def implementations(self, plugin: object) -> dict[str, Any]:
        """pluggy's options of every hook implementation of ``plugin``, by hook."""
        found = ((name, self.parse_hookimpl_opts(plugin, name)) for name in dir(plugin))
        return {options.get("specname") or name: options for name, options in found if options is not None}

    def check(self, plugin: object) -> None:
        """Look for what pluggy would ignore.

        Raises:
            PluginFault: a function is marked as the implementation of a hook that does not exist, or a function has the
                name of a hook and no mark, or there is no implementation at all.
        """
        found, hooks = self.implementations(plugin), self.hooks
        for hook, options in found.items():
            if hook not in hooks and not options.get("optionalhook"):
                close = nearest(hook, hooks)
                suggestion = f"; did you mean {close!r}?" if close else f"; hooks: {', '.join(hooks)}"
                raise PluginFault(Status.UNKNOWN_HOOK, f"no hook is called {hook!r}{suggestion}")
        for hook in hooks:
            if hook not in found and callable(getattr(plugin, hook, None)):
                raise PluginFault(Status.FAILED, f"{hook} is not marked with @arb_ternary.hookimpl")
        if not found:
            raise PluginFault(Status.FAILED, f"it implements no hook ({PREFIX}... marked with @arb_ternary.hookimpl)")

    def call_alone(self, plugin: object, hook: str) -> list[Any]:
        """Call a hook without arguments on one plugin only, so that a failure is that plugin's."""
        others = [other for other in self.get_plugins() if other is not plugin]
        results: list[Any] = self.subset_hook_caller(hook, others)()
        return results


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
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, Exception | SystemExit):
            raise PluginFault(Status.FAILED, describe_exception(error)) from error
        raise
    return module


def check_version(plugin: object) -> None:
    """Hold the interface version that ``plugin`` declares against this program's.

    Raises:
        PluginFault: it does not fit, or there is none.
    """
    incompatible = incompatibility(getattr(plugin, ATTRIBUTE, None))
    if incompatible is not None:
        raise PluginFault(Status.INCOMPATIBLE, incompatible)


def kinds_of(manager: HookManager, plugin: object, name: str) -> list[type[Spec]]:
    """The kinds of component that a plugin adds; ``manager`` does not know the plugin yet.

    Raises:
        PluginFault: its hook fails, or returns what is no kind.
    """
    if _KINDS_HOOK not in manager.implementations(plugin):
        return []
    scout = HookManager()  # of its own: the hooks of other kinds, which the plugin may implement, are not known yet
    try:
        scout.register(plugin, name)
        kinds = [kind for result in scout.call_alone(plugin, _KINDS_HOOK) for kind in result]
    except (Exception, SystemExit) as error:
        raise PluginFault(Status.FAILED, describe_exception(error)) from error
    for kind in kinds:
        stated = isinstance(kind, type) and issubclass(kind, Spec) and kind.__dict__.keys() >= {"kind", "hook", "noun"}
        if not stated or not kind.hook.startswith(f"{PREFIX}register_"):
            raise PluginFault(
                Status.FAILED,
                f"{_KINDS_HOOK} returned {kind!r}; every item must be a subclass of Spec with a kind, a noun, and a "
                f"hook {PREFIX}register_...",
            )
    return kinds


def attach(manager: HookManager, plugin: object, name: str) -> list[Spec]:
    """Register a plugin's hooks and return every component that it provides.

    Args:
        manager: knows the hooks, and the kinds of component.
        plugin: a hook module, or an object with hook implementations.
        name: the plugin's name, unique in ``manager``.

    Raises:
        PluginFault: the plugin cannot be taken in; ``manager`` is as before.
    """
    try:
        manager.check(plugin)
        for hook, options in manager.implementations(plugin).items():
            if hook in OBSERVATION:
                raise PluginFault(
                    Status.FAILED,
                    f"{hook} is called on the observers of a run only: register a tracker that implements it",
                )
            if options.get("wrapper") or options.get("hookwrapper"):
                raise PluginFault(Status.FAILED, f"{hook} is a wrapper; only hooks of a run can be wrapped")
        manager.register(plugin, name)
        return _collect(manager, plugin)
    except (Exception, SystemExit) as error:
        if manager.is_registered(plugin):
            manager.unregister(plugin)
        if isinstance(error, PluginFault):
            raise
        raise PluginFault(Status.FAILED, describe_exception(error)) from error


def _collect(manager: HookManager, plugin: object) -> list[Spec]:
    specs: dict[tuple[str, str], Spec] = {}
    for kind in manager.kinds.values():
        for result in manager.call_alone(plugin, kind.hook):
            for spec in _checked(kind, result):
                if (spec.kind, spec.name) in specs:
                    raise PluginFault(Status.FAILED, f"{kind.hook} returned two {spec.kind}s called {spec.name!r}")
                specs[spec.kind, spec.name] = spec
    return list(specs.values())


def _checked(kind: type[Spec], result: Any) -> Sequence[Spec]:
    if not isinstance(result, Sequence) or isinstance(result, str):
        raise PluginFault(
            Status.FAILED, f"{kind.hook} returned {result!r}; it must return a sequence of {kind.__name__}"
        )
    for spec in result:
        if not isinstance(spec, kind):
            raise PluginFault(Status.FAILED, f"{kind.hook} returned {spec!r}; every item must be a {kind.__name__}")
    return result
