"""Call hooks through pluggy, and say what a plugin gets wrong about them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final

import pluggy

from arb_ternary import hookspecs
from arb_ternary.errors import ArbError, ComponentError, nearest
from arb_ternary.specs import KINDS, Spec, keeping_default_dtype

#: Prefix of the name of every hook.
PREFIX: Final = "arb_"
#: Prefix of the name of every hook that registers something.
REGISTRATION_PREFIX: Final = "arb_register_"
#: The hook that adds hooks.
HOOKS_HOOK: Final = hookspecs.arb_register_hooks.__name__
_RUN_HOOKS: Final = frozenset(hook.__name__ for hook in hookspecs.RUN_HOOKS)


def specified_in(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """Return the hooks that a module specifies, by name."""
    named = {name: value for name, value in vars(module).items() if name.startswith(PREFIX)}
    return {name: value for name, value in named.items() if hasattr(value, "arb_ternary_spec")}


def group_of(hook: Callable[..., Any]) -> str:
    """Return ``registration``, ``information``, ``selection`` or ``observer``."""
    name = hook.__name__
    if name.startswith(REGISTRATION_PREFIX):
        return "registration"
    if name not in _RUN_HOOKS:
        return "information"
    decides = hook.arb_ternary_spec["firstresult"]  # type: ignore[attr-defined]
    return "selection" if decides else "observer"


class PluginFault(Exception):
    """Why a plugin is not loaded, in a sentence."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def describe_exception(error: BaseException) -> str:
    """Return an exception on one line: its class and the first line of its message."""
    name = type(error).__name__
    message = error.what if isinstance(error, ArbError) else str(error)
    lines = message.strip().splitlines()
    if not lines:
        return name
    return f"{name}: {lines[0]}"


@contextmanager
def as_faults() -> Iterator[None]:
    """Turn whatever the code of a plugin raises, ``sys.exit()`` included, into a PluginFault.

    Closing standard output and changing torch's default dtype are faults too. Both are put back,
    if that is possible.
    """
    output = sys.stdout
    had_output = _has_output()
    try:
        with keeping_default_dtype("it"):
            yield
    except (PluginFault, KeyboardInterrupt):
        raise
    except ComponentError as error:
        raise PluginFault(error.what) from error
    except BaseException as error:
        raise PluginFault(describe_exception(error)) from error
    if had_output and not _has_output():
        sys.stdout = output
        raise PluginFault("it closes standard output")


def _has_output() -> bool:
    """Return whether standard output is open, as far as Python knows."""
    return sys.stdout is not None and not getattr(sys.stdout, "closed", False)


class HookManager(pluggy.PluginManager):
    """pluggy's manager for a set of hooks.

    Attributes:
        specifications: the functions that specify the hooks, by name.
        failed: names of plugins that failed to load; they may specify more hooks.
    """

    def __init__(self, specifications: Iterable[Callable[..., Any]]) -> None:
        super().__init__("arb_ternary")
        self.failed: list[str] = []
        self.specifications: dict[str, Callable[..., Any]] = {}
        self.specify(specifications)

    def specify(self, hooks: Iterable[Callable[..., Any]]) -> None:
        """Add hooks; their names are new."""
        added = {hook.__name__: hook for hook in hooks}
        if added:
            self.add_hookspecs(type("Specifications", (), added))
            self.specifications.update(added)

    def parse_hookimpl_opts(self, plugin: object, name: str) -> Any:
        """Return the options of a hook implementation, or None; see pluggy."""
        # Most names of a module are not functions. Leaving them out here saves pluggy's look-up,
        # which is slow because it also serves objects that compute their attributes.
        if isinstance(plugin, ModuleType):
            value = vars(plugin).get(name)
            if not inspect.isroutine(value):
                return None
        return super().parse_hookimpl_opts(plugin, name)

    def implementations(self, plugin: object) -> dict[str, Any]:
        """Return pluggy's options of every hook implementation of ``plugin``, by hook."""
        found = {}
        for attribute in dir(plugin):
            options = self.parse_hookimpl_opts(plugin, attribute)
            if options is not None:
                hook = options.get("specname") or attribute
                found[hook] = options
        return found

    def check(self, plugin: object) -> None:
        """Refuse what pluggy ignores.

        That is an implementation of an unknown hook, a function with the name of a hook but without
        the mark, and a plugin without any hook.

        Raises:
            PluginFault: the plugin has one of these.
        """
        found = self.implementations(plugin)
        names = tuple(self.specifications)
        for hook, options in found.items():
            if hook in self.specifications or options.get("optionalhook"):
                continue
            close = nearest(hook, names)
            suggestion = f"hooks: {', '.join(names)}"
            if close:
                suggestion = f"did you mean {close!r}?"
            if self.failed:
                failed = ", ".join(self.failed)
                suggestion = f"it may need plugin {failed}, which failed to load; {suggestion}"
            raise PluginFault(f"no hook is called {hook!r}; {suggestion}")
        for hook in names:
            if hook not in found and callable(getattr(plugin, hook, None)):
                raise PluginFault(f"{hook} is not marked with @arb_ternary.hookimpl")
        if not found:
            raise PluginFault(
                f"it implements no hook ({PREFIX}... marked with @arb_ternary.hookimpl)"
            )

    def register(self, plugin: object, name: str | None = None) -> str | None:
        """Register a plugin as pluggy does, but raise a PluginFault if pluggy refuses it."""
        try:
            return super().register(plugin, name)
        except pluggy.PluginValidationError as error:
            # The line that says what is wrong comes last, under several that say where.
            text = " ".join(str(error).strip().splitlines())
            raise PluginFault(f"{type(error).__name__}: {text}") from error

    def call_alone(self, plugin: object, hook: str) -> list[Any]:
        """Call a hook without arguments on one plugin only, so that a failure is that plugin's."""
        others = [other for other in self.get_plugins() if other is not plugin]
        results: list[Any] = self.subset_hook_caller(hook, others)()
        return results


class PluginHooks(HookManager):
    """The hooks of plugins: those of the program, and those that plugins add."""

    def __init__(self) -> None:
        hooks = specified_in(hookspecs)
        super().__init__(hook for name, hook in hooks.items() if name not in _RUN_HOOKS)

    def add_hooks(self, plugin: object) -> None:
        """Let plugins implement the hooks that a plugin adds."""
        if not hasattr(plugin, HOOKS_HOOK):
            return
        with as_faults():
            modules = list(getattr(plugin, HOOKS_HOOK)() or ())
        for module in modules:
            hooks = specified_in(module) if isinstance(module, ModuleType) else {}
            if not hooks:
                raise PluginFault(
                    f"{HOOKS_HOOK} returned {module!r}; every item must be a module with functions"
                    f" {REGISTRATION_PREFIX}... marked with @arb_ternary.hookspecs.hookspec"
                )
            for name, hook in hooks.items():
                arguments = inspect.signature(hook).parameters
                if not name.startswith(REGISTRATION_PREFIX) or arguments or not hook.__doc__:
                    raise PluginFault(
                        f"{module.__name__}.{name}: a hook of a plugin is called "
                        f"{REGISTRATION_PREFIX}..., has a docstring and takes no arguments"
                    )
                if name in self.specifications:
                    raise PluginFault(f"there is a hook {name} already")
            self.specify(hooks.values())

    def take_in(self, plugin: object, name: str) -> dict[str, tuple[Any, ...]]:
        """Register a plugin and return what its registration hooks return, by hook.

        Raises:
            PluginFault: the plugin is faulty; nothing of it is registered.
        """
        implemented = self.implementations(plugin)
        for hook, options in implemented.items():
            if hook in _RUN_HOOKS:
                raise PluginFault(
                    f"{hook} is called on the observers of a run only: register a tracker that "
                    f"implements it"
                )
            if options.get("wrapper") or options.get("hookwrapper"):
                raise PluginFault(f"{hook} is a wrapper; only hooks of a run can be wrapped")
        self.check(plugin)
        try:
            with as_faults():
                self.register(plugin, name)
                return self._collect(plugin, implemented)
        except PluginFault:
            if self.is_registered(plugin):
                self.unregister(plugin)
            raise

    def _collect(
        self, plugin: object, implemented: Mapping[str, Any]
    ) -> dict[str, tuple[Any, ...]]:
        """Call the registration hooks that a plugin implements."""
        classes = {kind.hook: kind for kind in KINDS}
        collected: dict[str, tuple[Any, ...]] = {}
        for hook in self.specifications:
            if hook not in implemented or not hook.startswith(REGISTRATION_PREFIX):
                continue
            items: list[Any] = []
            for result in self.call_alone(plugin, hook):
                if not isinstance(result, Sequence) or isinstance(result, str):
                    wanted = "a sequence"
                    if hook in classes:
                        wanted = f"a sequence of {classes[hook].__name__}"
                    raise PluginFault(f"{hook} returned {result!r}; it must return {wanted}")
                items.extend(result)
            if hook in classes:
                _check_specs(hook, classes[hook], items)
            collected[hook] = tuple(items)
        return collected


def _check_specs(hook: str, kind: type[Spec], specs: Sequence[Any]) -> None:
    """Refuse items that are not specs of the kind, and names that are given twice."""
    names = set()
    for spec in specs:
        if not isinstance(spec, kind):
            raise PluginFault(f"{hook} returned {spec!r}; every item must be a {kind.__name__}")
        if spec.name in names:
            raise PluginFault(f"{hook} returned two {kind.kind}s called {spec.name!r}")
        names.add(spec.name)
