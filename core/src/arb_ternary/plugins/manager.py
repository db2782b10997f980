"""The process-wide plugins: loaded once from the environment, then open to files and objects that
are named by hand.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from arb_ternary import environment
from arb_ternary.environment import Variable
from arb_ternary.errors import ComponentError, EnvironmentProblem, UsageProblem, nearest
from arb_ternary.hookspecs import RUN_HOOKS
from arb_ternary.plugins.discovery import BUILTIN, PluginRecord, Registered, Status, discover
from arb_ternary.plugins.hooks import PluginFault, PluginHooks, describe_exception
from arb_ternary.plugins.loader import ATTRIBUTE, check_version, import_file, import_object
from arb_ternary.plugins.registry import Registry


class Plugins:
    """Loaded plugins and the components that they registered.

    Attributes:
        registry: components by kind and name.
        files: the plugin files that were loaded, for a worker or a resumed run to load again.
    """

    def __init__(self) -> None:
        self._relay = PluginHooks()
        self.registry = Registry(self._relay.kinds)
        self.files: tuple[Path, ...] = ()

    @property
    def records(self) -> tuple[PluginRecord, ...]:
        """A record of every plugin, in the order of loading."""
        return tuple(self.registry.records)

    @property
    def hooks(self) -> tuple[Callable[..., Any], ...]:
        """The specification of every hook: of plugins, then of trackers."""
        return (*self._relay.specifications.values(), *RUN_HOOKS)

    @property
    def variables(self) -> tuple[Variable, ...]:
        """The environment variables of the core and of every registered component, each once."""
        declared = (
            variable for found in self.registry.everything() for variable in found.spec.variables
        )
        return tuple(
            {variable.name: variable for variable in (*environment.VARIABLES, *declared)}.values()
        )

    def records_called(self, name: str) -> list[PluginRecord]:
        """The records of the plugins of that name: several where distributions are in conflict over
        it.
        """
        found = [record for record in self.records if record.name == name]
        if not found:
            raise _no_plugin(name, sorted(record.name for record in self.records))
        return found

    def plugin_info(self, name: str) -> Mapping[str, str]:
        """What the plugin called ``name`` says about itself; empty when it says nothing or is not
        loaded.
        """
        plugin = self._relay.get_plugin(name)
        try:
            found = [] if plugin is None else self._relay.call_alone(plugin, "arb_plugin_info")
        except Exception as error:
            raise ComponentError(
                f"plugin {name!r}: arb_plugin_info failed: {describe_exception(error)}"
            ) from error
        facts: Mapping[str, str] = found[0] if found else {}
        if not isinstance(facts, Mapping) or not all(
            isinstance(part, str) for item in facts.items() for part in item
        ):
            raise ComponentError(
                f"plugin {name!r}: arb_plugin_info returned {facts!r}, which is not text by name"
            )
        return facts

    def implemented_by(self, name: str) -> tuple[str, ...]:
        """The hooks that the plugin called ``name`` implements, in the order of ``arb plugins
        hooks``.
        """
        plugin = self._relay.get_plugin(name)
        found = {} if plugin is None else self._relay.implementations(plugin)
        return tuple(hook for hook in self._relay.specifications if hook in found)

    def load_environment(self) -> None:
        """Load the installed plugins that the environment allows; called once, by :func:`manager`.

        Raises:
            UsageProblem: ARB_PLUGINS or ARB_PLUGINS_DISABLED names a plugin that is not installed.
            EnvironmentProblem: a plugin cannot be loaded and ARB_PLUGINS_STRICT is set.
        """
        started = perf_counter()
        strict = environment.PLUGINS_STRICT.flag()
        found, notes = discover()
        for note in notes:
            _trace(note)
        _keep_out(found)
        self.registry.records.extend(found)
        # The core's kinds are there before any other: nobody can take their names.
        core_first = sorted(found, key=lambda record: not record.is_core)
        for step in (self._import, self._add):
            for record in core_first:
                try:
                    if record.status is Status.OK:
                        step(record)
                except PluginFault as fault:
                    if record.is_core:
                        raise
                    record.refuse(fault.status, fault.reason)
        for record in found:
            provided = ", ".join(f"{one.kind} {one.name}" for one in record.components)
            _trace(
                f"{record.described} from {record.module}: {record.status}: "
                f"{record.reason or provided}"
            )
            self._mark_conflict(record)
        _trace(f"{len(found)} plugins in {1e3 * (perf_counter() - started):.1f} ms")
        faults = [
            record.fault for record in found if record.status not in (Status.OK, Status.BLOCKED)
        ]
        if faults and strict:
            raise EnvironmentProblem(
                "a plugin cannot be loaded, and ARB_PLUGINS_STRICT is set", "\n".join(faults)
            )
        for line in faults:
            print(f"warning: {line}", file=sys.stderr)

    def register(self, plugin: object, name: str | None = None) -> PluginRecord:
        """Take in a module or an object with hook implementations, as a notebook does.

        It may leave out ``ARB_API_VERSION``; its name is by default that of the module or class.

        Raises:
            UsageProblem: a plugin of that name is loaded.
            EnvironmentProblem: the plugin is faulty, or provides a name that is taken; nothing of
                it is registered.
        """
        name = name or getattr(plugin, "__name__", None) or type(plugin).__name__
        record = PluginRecord(name=name, module="registered object", hook_module=plugin)
        return self._take_in(record, versioned=hasattr(plugin, ATTRIBUTE))

    def unregister(self, name: str) -> None:
        """Remove a plugin that :meth:`register` took in."""
        record = next(
            (found for found in self.records if found.name == name and found.distribution is None),
            None,
        )
        if record is None:
            raise UsageProblem(f"no plugin called {name!r} was registered by hand")
        self._remove(record)

    def load_file(self, path: str | Path) -> PluginRecord:
        """Load a plugin from a Python file; a file that is loaded already is left alone.

        Raises:
            UsageProblem: the file does not exist or cannot be a module.
            EnvironmentProblem: the plugin is faulty, or provides a name that is taken; nothing of
                it is registered.
        """
        resolved = Path(path).resolve()
        if resolved in self.files:
            return next(record for record in self.records if record.module == str(resolved))
        try:
            module = import_file(resolved)
        except PluginFault as fault:
            raise EnvironmentProblem(
                f"plugin file {path}: {fault.status}: {fault.reason}"
            ) from fault
        try:
            record = PluginRecord(name=resolved.stem, module=str(resolved), hook_module=module)
            self._take_in(record, versioned=True)
        except BaseException:
            del sys.modules[resolved.stem]
            raise
        self.files = (*self.files, resolved)
        return record

    # --- one plugin

    def _import(self, record: PluginRecord) -> None:
        started = perf_counter()
        record.hook_module = import_object(record.module)
        _trace(f"{record.module} imported [{1e3 * (perf_counter() - started):.1f} ms]")
        check_version(record.hook_module)
        modules, kinds = self._relay.additions(record.hook_module)
        self._relay.add_hooks(modules)
        self._relay.add_kinds(kinds)

    def _add(self, record: PluginRecord) -> None:
        record.results = self._relay.take_in(record.hook_module, record.name)
        record.components = tuple(
            Registered(spec, record)
            for kind in self._relay.kinds.values()
            for spec in record.results.get(kind.hook, ())
        )

    def _take_in(self, record: PluginRecord, *, versioned: bool) -> PluginRecord:
        if self._relay.has_plugin(record.name):
            raise UsageProblem(
                f"a plugin called {record.name!r} is loaded already",
                f"give another name, or first call manager().unregister({record.name!r})",
            )
        try:
            if versioned:
                check_version(record.hook_module)
            if any(self._relay.additions(record.hook_module)):
                raise PluginFault(
                    Status.FAILED, "hooks and kinds of component come from installed plugins only"
                )
            self._add(record)
        except PluginFault as fault:
            record.refuse(fault.status, fault.reason)
            raise EnvironmentProblem(record.fault) from fault
        self.registry.records.append(record)
        self._mark_conflict(record, by_hand=True)
        if record.status is not Status.OK:
            self._remove(record)
            raise EnvironmentProblem(record.fault)
        _trace(f"{record.described}: ok")
        return record

    def _remove(self, record: PluginRecord) -> None:
        self._relay.unregister(name=record.name)
        self.registry.records.remove(record)

    def _mark_conflict(self, record: PluginRecord, *, by_hand: bool = False) -> None:
        for found in record.components:
            rivals = [
                claim
                for claim in self.registry.claims(found.kind, found.name)
                if claim is not found
            ]
            if rivals and not found.reserved:
                fate = ", which keeps it" if by_hand or rivals[0].reserved else "; neither is used"
                what = (
                    f"{found.spec.noun} {found.name!r} is also provided by plugin "
                    f"{rivals[0].plugin.described}"
                )
                record.refuse(Status.CONFLICT, f"{what}{fate}")
                return


def _no_plugin(name: str, installed: Collection[str], where: str = "") -> UsageProblem:
    close = nearest(name, installed)
    suggestion = f"did you mean {close!r}?\n" if close else ""
    return UsageProblem(
        f"{where}no plugin is called {name!r}", f"{suggestion}installed: {', '.join(installed)}"
    )


def _keep_out(found: Sequence[PluginRecord]) -> None:
    """Refuse what the environment does not allow, and plugins that share a name."""
    installed = sorted({record.name for record in found})
    allowed = environment.PLUGINS.names()
    disabled = environment.PLUGINS_DISABLED.names()
    for variable, names in (
        ("ARB_PLUGINS", set(allowed) - {"*"}),
        ("ARB_PLUGINS_DISABLED", disabled),
    ):
        for name in names:
            if name not in installed:
                raise _no_plugin(name, installed, f"{variable}: ")
    if BUILTIN in disabled:
        raise UsageProblem(
            f"ARB_PLUGINS_DISABLED: {BUILTIN!r} is the program itself and cannot be disabled"
        )
    for record in found:
        rivals = [other for other in found if other.name == record.name and other is not record]
        if record.is_core or record.status is not Status.OK:
            continue
        if record.name in disabled:
            record.refuse(Status.BLOCKED, "ARB_PLUGINS_DISABLED lists it")
        elif "*" not in allowed and record.name not in allowed:
            record.refuse(Status.BLOCKED, "ARB_PLUGINS does not list it")
        elif rivals:
            reason = (
                f"{rivals[0].distribution} {rivals[0].version} has a plugin called "
                f"{record.name!r} too"
            )
            record.refuse(Status.CONFLICT, reason)


def _trace(line: str) -> None:
    if environment.TRACE_PLUGINS.flag():
        print(f"plugins: {line}", file=sys.stderr)


# --- the process-wide instance

_lock = threading.RLock()
_plugins: Plugins | None = None
_loading = False


def manager() -> Plugins:
    """The plugins of this process, loaded from the environment on the first call.

    Raises:
        UsageProblem, EnvironmentProblem: see :meth:`Plugins.load_environment`.
    """
    global _plugins, _loading  # noqa: PLW0603  (one per process is the point)
    with _lock:
        if _plugins is None:
            if _loading:
                raise RuntimeError(
                    "manager() was called by a plugin while plugins are being loaded"
                )
            _loading = True
            try:
                plugins = Plugins()
                plugins.load_environment()
            finally:
                _loading = False
            _plugins = plugins
        return _plugins


def reset_manager() -> None:
    """Forget the loaded plugins; the next :func:`manager` call loads them anew. For tests."""
    global _plugins  # noqa: PLW0603
    with _lock:
        if _plugins is not None:
            for path in _plugins.files:
                sys.modules.pop(path.stem, None)
        _plugins = None
