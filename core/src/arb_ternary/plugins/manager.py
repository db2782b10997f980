"""The plugins of this process: loaded once from the environment, then open to files and objects."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

from arb_ternary import environment
from arb_ternary.environment import Variable
from arb_ternary.errors import ComponentError, EnvironmentProblem, UsageProblem, nearest
from arb_ternary.hookspecs import RUN_HOOKS
from arb_ternary.plugins.discovery import announced, discover
from arb_ternary.plugins.hooks import HOOKS_HOOK, PluginFault, PluginHooks, describe_exception
from arb_ternary.plugins.loader import ATTRIBUTE, check_version, import_file, import_object
from arb_ternary.plugins.record import BUILTIN, PluginRecord, Registered, written
from arb_ternary.plugins.registry import Registry
from arb_ternary.specs import KINDS

if TYPE_CHECKING:
    from pathlib import Path


#: How many faulty plugins are named with their reasons.
_LISTED: Final = 2


class Plugins:
    """Loaded plugins and the components that they registered.

    Attributes:
        registry: components by kind and name.
        files: the plugin files that were loaded, for a worker or a resumed run to load again.
    """

    def __init__(self) -> None:
        self._hooks = PluginHooks()
        self.registry = Registry()
        self.files: tuple[Path, ...] = ()

    @property
    def records(self) -> tuple[PluginRecord, ...]:
        """A record of every plugin, in the order of loading."""
        return tuple(self.registry.records)

    @property
    def hooks(self) -> tuple[Callable[..., Any], ...]:
        """The specification of every hook: of plugins, then of trackers."""
        return (*self._hooks.specifications.values(), *RUN_HOOKS)

    @property
    def variables(self) -> tuple[Variable, ...]:
        """The environment variables of the core and of every registered component, each once."""
        by_name = {variable.name: variable for variable in environment.VARIABLES}
        for found in self.registry.everything():
            by_name.update((variable.name, variable) for variable in found.spec.variables)
        return tuple(by_name.values())

    def records_called(self, name: str) -> list[PluginRecord]:
        """Return the records of the plugins of that name.

        There are several if distributions are in conflict over the name.

        Raises:
            UsageProblem: there is none.
        """
        found = [record for record in self.records if record.name == name]
        if not found:
            raise _no_plugin(name, sorted(record.name for record in self.records))
        return found

    def plugin_info(self, name: str) -> Mapping[str, str]:
        """Return the facts that the plugin called ``name`` states about itself.

        They are empty if it states none or is not loaded.

        Raises:
            ComponentError: its hook fails, or returns something else.
        """
        plugin = self._hooks.get_plugin(name)
        if plugin is None:
            return {}
        try:
            found = self._hooks.call_alone(plugin, "arb_plugin_info")
        except Exception as error:
            raise ComponentError(
                f"plugin {name!r}: arb_plugin_info failed: {describe_exception(error)}"
            ) from error
        facts: Mapping[str, str] = found[0] if found else {}
        is_text = isinstance(facts, Mapping) and all(
            isinstance(key, str) and isinstance(value, str) for key, value in facts.items()
        )
        if not is_text:
            raise ComponentError(
                f"plugin {name!r}: arb_plugin_info returned {facts!r}, which is not text by name"
            )
        return facts

    def implemented_by(self, name: str) -> tuple[str, ...]:
        """The hooks that the plugin called ``name`` implements, in the order of the listing."""
        plugin = self._hooks.get_plugin(name)
        if plugin is None:
            return ()
        found = self._hooks.implementations(plugin)
        return tuple(hook for hook in self._hooks.specifications if hook in found)

    # --- loading

    def load_environment(self) -> None:
        """Load the installed plugins that the environment allows; called once, by :func:`manager`.

        Each plugin is imported and registered alone: if one fails, the reason goes into its record
        and a warning is printed, and the others are loaded.

        Raises:
            UsageProblem: ARB_PLUGINS or ARB_PLUGINS_DISABLED names a plugin that is not installed.
            EnvironmentProblem: a plugin cannot be loaded and ARB_PLUGINS_STRICT is set.
        """
        started = perf_counter()
        strict = environment.PLUGINS_STRICT.flag()
        found, notes = discover()
        for note in notes:
            _trace(note)
        _apply_lists(found)
        _refuse_shared_names(found)
        self.registry.records.extend(found)

        # All hooks exist before any plugin is registered, the core's before any other.
        core_first = sorted(found, key=lambda record: not record.is_core)
        for step in (self._import, self._register):
            for record in core_first:
                if not record.reason:
                    _run_step(step, record)
                    if record.reason:
                        self._hooks.failed.append(record.name)
        for record in found:
            self._note_conflict(record)
        for record in found:
            provided = ", ".join(f"{one.kind} {one.name}" for one in record.components)
            outcome = record.reason or provided
            _trace(f"{record.described} from {record.module}: {record.status}: {outcome}")
        _trace(f"{len(found)} plugins in {1e3 * (perf_counter() - started):.1f} ms")
        faults = [record.fault for record in found if record.failed]
        if faults and strict:
            raise EnvironmentProblem(
                "a plugin cannot be loaded, and ARB_PLUGINS_STRICT is set", "\n".join(faults)
            )
        if len(faults) > _LISTED:
            names = ", ".join(record.name for record in found if record.failed)
            summary = f"{len(faults)} plugins have faults: {names}\n  the first: {faults[0]}"
            faults = [f"{summary}\n  all reasons: arb plugins list"]
        for fault in faults:
            print(f"warning: {fault}", file=sys.stderr)

    def register(self, plugin: object, name: str | None = None) -> PluginRecord:
        """Load a module or an object with hook implementations, as a notebook does.

        It may leave out ``ARB_API_VERSION``. Its default name is that of the module or class.

        Raises:
            UsageProblem: a plugin of that name is loaded.
            EnvironmentProblem: the plugin is faulty, or provides a name that is taken; nothing of
                it is registered.
        """
        name = name or getattr(plugin, "__name__", None) or type(plugin).__name__
        record = PluginRecord(name=name, module="registered object", hook_module=plugin)
        return self._load_by_hand(record, versioned=hasattr(plugin, ATTRIBUTE))

    def load_file(self, path: str | Path) -> PluginRecord:
        """Load a plugin from a Python file; a file that is loaded already is left alone.

        Raises:
            UsageProblem: the file does not exist or cannot be a module.
            EnvironmentProblem: the plugin is faulty, or provides a name that is taken; nothing of
                it is registered.
        """
        from pathlib import Path  # not at start-up: it imports the parser of addresses

        # Not Path.resolve, which raises RuntimeError for a link that leads to itself.
        resolved = Path(os.path.realpath(path))
        if resolved in self.files:
            return next(record for record in self.records if record.module == str(resolved))
        try:
            module = import_file(resolved)
        except PluginFault as fault:
            raise EnvironmentProblem(f"plugin file {path} failed: {fault.reason}") from fault
        record = PluginRecord(name=resolved.stem, module=str(resolved), hook_module=module)
        try:
            self._load_by_hand(record, versioned=True)
        except BaseException:
            del sys.modules[resolved.stem]
            raise
        self.files = (*self.files, resolved)
        return record

    # --- one plugin

    def _import(self, record: PluginRecord) -> None:
        """Import a plugin, check its version, and add the hooks that it brings."""
        started = perf_counter()
        record.hook_module = import_object(record.module)
        _trace(f"{record.module} imported [{1e3 * (perf_counter() - started):.1f} ms]")
        check_version(record.hook_module)
        self._hooks.add_hooks(record.hook_module)

    def _register(self, record: PluginRecord, *, by_hand: bool = False) -> None:
        """Register a plugin and its components; by hand, it provides no name that is taken."""
        record.results = self._hooks.take_in(record.hook_module, record.name)
        components = []
        for kind in KINDS:
            components += [Registered(spec, record) for spec in record.results.get(kind.hook, ())]
        for found in components:
            claims = self.registry.claims(found.kind, found.name)
            if by_hand and claims:
                self._hooks.unregister(name=record.name)
                raise PluginFault(f"{_also_provided(found, claims[0])}, which keeps it")

        record.components = tuple(components)
        record.loaded = True
        self.registry.add(record.components)

    def _note_conflict(self, record: PluginRecord) -> None:
        """State in the record of a plugin the first of its names that another plugin has too."""
        for found in record.components:
            claims = self.registry.claims(found.kind, found.name)
            if len(claims) < 2:
                continue
            rivals = [claim for claim in claims if claim is not found]
            keeper = self.registry.keeper(found.kind, found.name)
            if keeper is not found:
                fate = ", which keeps it" if keeper else "; neither is used"
                record.reason = (
                    f"{_also_provided(found, keeper or rivals[0])}{fate}; rename it, or disable a "
                    f"plugin: ARB_PLUGINS_DISABLED={record.name}"
                )
                return

    def _load_by_hand(self, record: PluginRecord, *, versioned: bool) -> PluginRecord:
        """Register a plugin that is not installed."""
        if self._hooks.has_plugin(record.name):
            raise UsageProblem(
                f"a plugin called {record.name!r} is loaded already", "give another name"
            )
        try:
            if versioned:
                check_version(record.hook_module)
            if hasattr(record.hook_module, HOOKS_HOOK):
                raise PluginFault("hooks come from installed plugins only")
            self._register(record, by_hand=True)
        except PluginFault as fault:
            record.reason = fault.reason
            raise EnvironmentProblem(record.fault) from fault
        self.registry.records.append(record)
        _trace(f"{record.described}: loaded")
        return record


def _also_provided(found: Registered, rival: Registered) -> str:
    """Say that another plugin provides a component of that name too."""
    name = written(found.kind, found.name)
    return f"{found.spec.noun} {name!r} is also provided by plugin {rival.plugin.described}"


def _run_step(step: Callable[[PluginRecord], None], record: PluginRecord) -> None:
    """Run a step of loading; a fault is the reason why the plugin is not loaded."""
    try:
        step(record)
    except PluginFault as fault:
        if record.is_core:
            raise
        record.reason = fault.reason


def _no_plugin(name: str, installed: Collection[str], where: str = "") -> UsageProblem:
    close = nearest(name, installed)
    suggestion = f"did you mean {close!r}?\n" if close else ""
    return UsageProblem(
        f"{where}no plugin is called {name!r}", f"{suggestion}installed: {', '.join(installed)}"
    )


def _apply_lists(found: Sequence[PluginRecord]) -> None:
    """Disable the plugins that the environment does not allow."""
    installed = sorted({record.name for record in found})
    allowed = environment.PLUGINS.names()
    disabled = environment.PLUGINS_DISABLED.names()
    for variable, names in (("ARB_PLUGINS", allowed), ("ARB_PLUGINS_DISABLED", disabled)):
        for name in names:
            is_wildcard = name == "*" and variable == "ARB_PLUGINS"
            if name not in installed and not is_wildcard:
                raise _no_plugin(name, installed, f"{variable}: ")
    if BUILTIN in disabled:
        raise UsageProblem(
            f"ARB_PLUGINS_DISABLED: {BUILTIN!r} is the program itself and cannot be disabled"
        )
    for record in found:
        if record.is_core or record.reason:
            continue
        if record.name in disabled:
            record.disabled = True
            record.reason = "ARB_PLUGINS_DISABLED lists it"
        elif "*" not in allowed and record.name not in allowed:
            record.disabled = True
            record.reason = "ARB_PLUGINS does not list it"


def _refuse_shared_names(found: Sequence[PluginRecord]) -> None:
    """Keep out plugins that share a name.

    None of them is loaded, unless it is the core's or comes from a distribution that announces its
    components.
    """
    for record in found:
        rivals = [other for other in found if other.name == record.name and other is not record]
        if not rivals or record.is_core or record.reason:
            continue
        announcing = set(announced().values())
        known = [
            rival for rival in rivals if rival.is_core or any(map(rival.comes_from, announcing))
        ]
        if any(map(record.comes_from, announcing)) and not known:
            continue
        rival = (known or rivals)[0]
        record.reason = (
            f"{rival.distribution} {rival.version} has a plugin called {record.name!r} too; rename "
            "the entry point, or uninstall one of them"
        )


def _trace(line: str) -> None:
    if environment.TRACE_PLUGINS.flag():
        print(f"plugins: {line}", file=sys.stderr)


# --- the process-wide instance

_lock = threading.RLock()
_plugins: Plugins | None = None
_loading = False


def manager() -> Plugins:
    """Return the plugins of this process, loaded from the environment on the first call.

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
    """Forget the loaded plugins; the next :func:`manager` call loads them again. For tests."""
    global _plugins  # noqa: PLW0603
    with _lock:
        if _plugins is not None:
            for path in _plugins.files:
                sys.modules.pop(path.stem, None)
        _plugins = None
