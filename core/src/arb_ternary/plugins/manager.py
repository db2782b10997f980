"""The process-wide plugins: loaded once from the environment, then open to files and objects that are named by hand."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter

import pluggy
from attrs import evolve

from arb_ternary import hookspecs
from arb_ternary.environment import read_flag, read_names
from arb_ternary.errors import ComponentError, EnvironmentProblem, UsageProblem, nearest
from arb_ternary.plugins.discovery import BUILTIN, Candidate, discover
from arb_ternary.plugins.loader import (
    PluginFault,
    attach,
    describe_exception,
    implementations,
    import_file,
    import_object,
)
from arb_ternary.plugins.records import PluginRecord, Status
from arb_ternary.plugins.registry import Registry
from arb_ternary.plugins.surface import HOOKS, NOUNS

__all__ = ["Hooks", "Plugins", "manager", "reset_manager"]


class Hooks:
    """The hooks that are called on loaded plugins after registration, typed."""

    def __init__(self, relay: pluggy.PluginManager) -> None:
        self._relay = relay

    def plugin_info(self, name: str) -> Mapping[str, str]:
        """What the plugin called ``name`` says about itself; empty when it says nothing or is not loaded.

        Raises:
            ComponentError: its ``arb_plugin_info`` fails or returns something other than text by name.
        """
        plugin = self._relay.get_plugin(name)
        for implementation in self._relay.hook.arb_plugin_info.get_hookimpls():
            if plugin is None or implementation.plugin is not plugin:
                continue
            try:
                facts = implementation.function()
            except Exception as error:
                raise ComponentError(f"plugin {name!r}: arb_plugin_info failed: {describe_exception(error)}") from error
            if facts is None:
                continue
            if not isinstance(facts, Mapping) or not all(
                isinstance(part, str) for item in facts.items() for part in item
            ):
                raise ComponentError(f"plugin {name!r}: arb_plugin_info returned {facts!r}, which is not text by name")
            return facts
        return {}

    def implemented_by(self, name: str) -> tuple[str, ...]:
        """The hooks that the plugin called ``name`` implements, in the order of ``hookspecs``."""
        plugin = self._relay.get_plugin(name)
        found = implementations(self._relay, plugin) if plugin is not None else {}
        return tuple(hook for hook in HOOKS if hook in found)


class Plugins:
    """Loaded plugins and the components that they registered.

    Attributes:
        registry: components by kind and name.
        hooks: typed calls of the hooks that concern a whole plugin.
        files: the plugin files that were loaded, for a worker or a resumed run to load again.
    """

    def __init__(self) -> None:
        self._relay = pluggy.PluginManager("arb_ternary")
        self._relay.add_hookspecs(hookspecs)
        self.registry = Registry()
        self.hooks = Hooks(self._relay)
        self.files: tuple[Path, ...] = ()

    @property
    def records(self) -> tuple[PluginRecord, ...]:
        """A record of every plugin, in the order of loading."""
        return self.registry.records

    def load_environment(self) -> None:
        """Load the installed plugins that the environment allows; called once, by :func:`manager`.

        Raises:
            UsageProblem: ARB_PLUGINS or ARB_PLUGINS_DISABLED names a plugin that is not installed.
            EnvironmentProblem: a plugin cannot be loaded and ARB_PLUGINS_STRICT is set.
        """
        started, strict = perf_counter(), read_flag("ARB_PLUGINS_STRICT")
        found = discover()
        for note in found.notes:
            _trace(note)
        blocked = _blocked(found.candidates)
        for candidate in found.candidates:
            self.registry.note(self._load_candidate(candidate, found.candidates, blocked))
        for name, version, reason in found.damaged:
            record = PluginRecord(name=name, distribution=name, version=version, status=Status.FAILED, reason=reason)
            self.registry.note(record)
        self._mark_conflicts()
        _trace(f"{len(found.candidates)} plugins in {1e3 * (perf_counter() - started):.1f} ms")
        faults = [record for record in self.records if record.status not in (Status.OK, Status.BLOCKED)]
        lines = [f"plugin {record.described}: {record.status}: {record.reason}" for record in faults]
        if lines and strict:
            raise EnvironmentProblem("a plugin cannot be loaded, and ARB_PLUGINS_STRICT is set", "\n".join(lines))
        for line in lines:
            print(f"warning: {line}", file=sys.stderr)

    def register(self, plugin: object, name: str | None = None) -> PluginRecord:
        """Take in a module or an object with hook implementations, as a notebook does.

        Args:
            plugin: the module or object; it may leave out ``ARB_API_VERSION``.
            name: its name; by default that of the module or class.

        Raises:
            UsageProblem: a plugin of that name is loaded.
            EnvironmentProblem: the plugin is faulty, or provides a name that is taken; nothing of it is registered.
        """
        name = name or getattr(plugin, "__name__", None) or type(plugin).__name__
        return self._take_in(plugin, PluginRecord(name=name, module="registered object"), version_required=False)

    def unregister(self, name: str) -> None:
        """Remove a plugin that :meth:`register` took in.

        Raises:
            UsageProblem: no such plugin is registered.
        """
        record = next((found for found in self.records if found.name == name and found.distribution is None), None)
        plugin = self._relay.get_plugin(name)
        if record is None or plugin is None:
            raise UsageProblem(f"no plugin called {name!r} was registered by hand")
        self._relay.unregister(plugin)
        self.registry.forget(record)

    def load_file(self, path: str | Path) -> PluginRecord:
        """Load a plugin from a Python file; a file that is loaded already is left alone.

        Raises:
            UsageProblem: the file does not exist or cannot be a module.
            EnvironmentProblem: the plugin is faulty, or provides a name that is taken; nothing of it is registered.
        """
        resolved = Path(path).resolve()
        if resolved in self.files:
            return next(record for record in self.records if record.module == str(resolved))
        try:
            module = import_file(resolved)
        except PluginFault as fault:
            raise EnvironmentProblem(f"plugin file {path}: {fault.status}: {fault.reason}") from fault
        try:
            record = self._take_in(
                module, PluginRecord(name=resolved.stem, module=str(resolved)), version_required=True
            )
        except BaseException:
            del sys.modules[resolved.stem]
            raise
        self.files = (*self.files, resolved)
        return record

    # --- one plugin --------------------------------------------------------------------------------------------------

    def _load_candidate(
        self, candidate: Candidate, candidates: tuple[Candidate, ...], blocked: Mapping[str, str]
    ) -> PluginRecord:
        record = PluginRecord(
            name=candidate.name,
            distribution=candidate.distribution,
            version=candidate.version,
            module=candidate.module,
        )
        started = perf_counter()
        if candidate.name in blocked and not candidate.is_builtin:
            record = evolve(record, status=Status.BLOCKED, reason=blocked[candidate.name])
        elif namesakes := _namesakes(candidate, candidates):
            reason = f"{namesakes[0].distribution} {namesakes[0].version} has a plugin called {candidate.name!r} too"
            record = evolve(record, status=Status.CONFLICT, reason=reason)
        else:
            try:
                specs = attach(self._relay, import_object(candidate.module), candidate.name)
            except PluginFault as fault:
                if candidate.is_builtin:
                    raise
                record = evolve(record, status=fault.status, reason=fault.reason)
            else:
                # Whatever is installed, the commands that explain an installation keep working.
                added = self.registry.add(specs, record, reserved=["command"] if candidate.is_builtin else [])
                record = evolve(record, components=[(found.kind, found.name) for found in added])
        provided = ", ".join(f"{kind} {name}" for kind, name in record.components)
        outcome = f"{record.status}: {record.reason or provided}"
        _trace(f"{record.described} from {record.module}: {outcome} [{1e3 * (perf_counter() - started):.1f} ms]")
        return record

    def _take_in(self, plugin: object, record: PluginRecord, *, version_required: bool) -> PluginRecord:
        if self._relay.has_plugin(record.name):
            raise UsageProblem(
                f"a plugin called {record.name!r} is loaded already",
                f"give another name, or first call manager().unregister({record.name!r})",
            )
        try:
            specs = attach(self._relay, plugin, record.name, version_required=version_required)
        except PluginFault as fault:
            raise EnvironmentProblem(f"plugin {record.described}: {fault.status}: {fault.reason}") from fault
        self.registry.note(record)
        for found in self.registry.add(specs, record):
            rivals = self.registry.rivals(found)
            if rivals:
                self._relay.unregister(plugin)
                owner = self.registry.record_of(rivals[0])
                self.registry.forget(record)
                raise EnvironmentProblem(
                    f"plugin {record.described}: conflict: "
                    f"{NOUNS[found.kind]} {found.name!r} is also provided by plugin {owner.described}"
                )
        record = evolve(record, components=[(spec.kind, spec.name) for spec in specs])
        self.registry.note(record)
        _trace(f"{record.described}: ok")
        return record

    def _mark_conflicts(self) -> None:
        for record in self.records:
            for found in self.registry.of_plugin(record):
                rivals = self.registry.rivals(found)
                if rivals and not self.registry.is_reserved(found):
                    other = self.registry.record_of(rivals[0])
                    reserved = self.registry.is_reserved(rivals[0])
                    reason = f"{NOUNS[found.kind]} {found.name!r} is also provided by plugin {other.described}" + (
                        ", which keeps it" if reserved else "; neither is used"
                    )
                    self.registry.note(evolve(record, status=Status.CONFLICT, reason=reason))
                    break


def _namesakes(candidate: Candidate, candidates: tuple[Candidate, ...]) -> list[Candidate]:
    if candidate.is_builtin:
        return []
    return [other for other in candidates if other.name == candidate.name and other is not candidate]


def _blocked(candidates: tuple[Candidate, ...]) -> dict[str, str]:
    """The plugins that the environment keeps out, each with the reason."""
    installed = sorted({candidate.name for candidate in candidates})
    allowed = read_names("ARB_PLUGINS")
    disabled = read_names("ARB_PLUGINS_DISABLED")
    for variable, names in (("ARB_PLUGINS", allowed), ("ARB_PLUGINS_DISABLED", disabled)):
        for name in names:
            if name not in installed and not (variable == "ARB_PLUGINS" and name == "*"):
                close = nearest(name, installed)
                suggestion = [f"did you mean {close!r}?"] if close else []
                raise UsageProblem(
                    f"{variable}: no plugin is called {name!r}",
                    "\n".join([*suggestion, f"installed: {', '.join(installed)}"]),
                )
    if BUILTIN in disabled:
        raise UsageProblem(f"ARB_PLUGINS_DISABLED: {BUILTIN!r} is the program itself and cannot be disabled")
    blocked = {name: "ARB_PLUGINS does not list it" for name in installed if "*" not in allowed and name not in allowed}
    blocked.update((name, "ARB_PLUGINS_DISABLED lists it") for name in disabled)
    return blocked


def _trace(line: str) -> None:
    if read_flag("ARB_TRACE_PLUGINS"):
        print(f"plugins: {line}", file=sys.stderr)


# --- the process-wide instance ---------------------------------------------------------------------------------------

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
                raise RuntimeError("manager() was called by a plugin while plugins are being loaded")
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
