"""The hooks: which there are, how they are called through pluggy, and what a plugin gets wrong
about them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final

import pluggy
from attrs import frozen

from arb_ternary import hookspecs
from arb_ternary.errors import ArbError, nearest
from arb_ternary.plugins.discovery import Status
from arb_ternary.specs import Spec, resolve

#: What the name of every hook begins with.
PREFIX: Final = "arb_"
_KINDS_HOOK: Final = hookspecs.arb_register_kinds.__name__


def specified_in(module: object) -> dict[str, Any]:
    """The hooks that a module specifies, by name."""
    return {name: value for name, value in vars(module).items() if name.startswith(PREFIX)}


#: The hooks of the core, by name, that no kind of component brings.
STATED: Final = specified_in(hookspecs)


@frozen
class HookFacts:
    """A hook for listings; ``group`` is ``registration``, ``information``, ``selection`` or
    ``observer``.
    """

    name: str
    group: str
    arguments: tuple[str, ...]
    documentation: str


def describe_hooks(kinds: Iterable[type[Spec]]) -> tuple[HookFacts, ...]:
    """Every hook of a program that knows ``kinds``: of registration, of ``hookspecs``, and of the
    kinds' components.
    """
    kinds = tuple(kinds)
    registration = _registration_hooks(kinds)
    observation = _observation_hooks(kinds)
    groups = {
        **dict.fromkeys((*registration, _KINDS_HOOK), "registration"),
        hookspecs.arb_plugin_info.__name__: "information",
        **{
            name: "selection"
            for name, hook in observation.items()
            if hook.arb_ternary_spec["firstresult"]
        },
    }
    return tuple(
        HookFacts(
            name,
            groups.get(name, "observer"),
            tuple(inspect.signature(hook).parameters),
            inspect.getdoc(hook) or "",
        )
        for name, hook in {**registration, **STATED, **observation}.items()
    )


def _observation_hooks(kinds: Iterable[type[Spec]]) -> dict[str, Any]:
    """The hooks that components of these kinds implement, by name."""
    modules = [resolve(kind.hookspecs) for kind in kinds if kind.hookspecs is not None]
    return {name: hook for module in modules for name, hook in specified_in(module).items()}


def _registration_hooks(kinds: Iterable[type[Spec]]) -> dict[str, Callable[..., Any]]:
    """The hook specifications of kinds of component, by name."""

    def specification(kind: type[Spec]) -> Callable[[], None]:
        def hook() -> None: ...

        hook.__doc__ = (
            f"Components of the kind `{kind.kind}` ({kind.noun}): a sequence of `{kind.__name__}`. "
            "Called once at load; an empty sequence or None means none."
        )
        return hookspecs.hookspec(hook)

    return {kind.hook: specification(kind) for kind in kinds}


class PluginFault(Exception):
    """Why a plugin is not taken in: the status it gets, and a sentence."""

    def __init__(self, status: Status, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


def _failed(reason: str) -> PluginFault:
    return PluginFault(Status.FAILED, reason)


def describe_exception(error: BaseException) -> str:
    """An exception on one line: its class and the first line of what it says."""
    lines = (error.what if isinstance(error, ArbError) else str(error)).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@contextmanager
def as_faults() -> Iterator[None]:
    """Whatever the code of a plugin raises within the block, ``sys.exit()`` included, is a
    :class:`PluginFault`.
    """
    try:
        yield
    except PluginFault:
        raise
    except (Exception, SystemExit) as error:
        raise _failed(describe_exception(error)) from error


class HookManager(pluggy.PluginManager):
    """pluggy's manager with the hooks of this program; whatever is wrong with a plugin is a
    :class:`PluginFault`.

    ``specifications`` is the module of its first hooks; ``kinds`` are the kinds of component whose
    registration hooks exist too, by name.
    """

    def __init__(self, specifications: ModuleType = hookspecs) -> None:
        super().__init__("arb_ternary")
        self.add_hookspecs(specifications)
        self._stated = tuple(specified_in(specifications))
        self._observation: set[str] = set()
        self.kinds: dict[str, type[Spec]] = {}

    @property
    def hooks(self) -> tuple[str, ...]:
        """The names of all hooks: registration first."""
        return (*(kind.hook for kind in self.kinds.values()), *self._stated)

    def implementations(self, plugin: object) -> dict[str, Any]:
        """pluggy's options of every hook implementation of ``plugin``, by hook."""
        found = ((name, self.parse_hookimpl_opts(plugin, name)) for name in dir(plugin))
        return {
            options.get("specname") or name: options
            for name, options in found
            if options is not None
        }

    def check(self, plugin: object) -> None:
        """Refuse what pluggy ignores: an implementation of no hook, a hook's name without the mark,
        no hook at all.
        """
        found = self.implementations(plugin)
        hooks = self.hooks
        for hook, options in found.items():
            if hook not in hooks and not options.get("optionalhook"):
                close = nearest(hook, hooks)
                suggestion = (
                    f"; did you mean {close!r}?" if close else f"; hooks: {', '.join(hooks)}"
                )
                raise PluginFault(Status.UNKNOWN_HOOK, f"no hook is called {hook!r}{suggestion}")
        for hook in hooks:
            if hook not in found and callable(getattr(plugin, hook, None)):
                raise _failed(f"{hook} is not marked with @arb_ternary.hookimpl")
        if not found:
            raise _failed(f"it implements no hook ({PREFIX}... marked with @arb_ternary.hookimpl)")

    def register(self, plugin: object, name: str | None = None) -> str | None:
        """As pluggy does, but what it refuses is a :class:`PluginFault`."""
        try:
            return super().register(plugin, name)
        except pluggy.PluginValidationError as error:
            # The line that says what is wrong comes last, under several that say where.
            text = " ".join(str(error).strip().splitlines())
            raise _failed(f"{type(error).__name__}: {text}") from error

    def call_alone(self, plugin: object, hook: str) -> list[Any]:
        """Call a hook without arguments on one plugin only, so that a failure is that plugin's."""
        others = [other for other in self.get_plugins() if other is not plugin]
        results: list[Any] = self.subset_hook_caller(hook, others)()
        return results

    def kinds_of(self, plugin: object) -> list[type[Spec]]:
        """The kinds of component that a plugin adds; it is not registered yet."""
        if _KINDS_HOOK not in self.implementations(plugin):
            return []
        # of its own: the hooks of other kinds, which the plugin may implement, are not known yet
        scout = HookManager()
        with as_faults():
            scout.register(plugin)
            kinds = [kind for result in scout.call_alone(plugin, _KINDS_HOOK) for kind in result]
        for kind in kinds:
            own = vars(kind) if isinstance(kind, type) and issubclass(kind, Spec) else {}
            if not own.keys() >= {"kind", "hook", "noun"} or not kind.hook.startswith(
                f"{PREFIX}register_"
            ):
                raise _failed(
                    f"{_KINDS_HOOK} returned {kind!r}; every item must be a subclass of Spec with "
                    f"a kind, a noun, and a hook {PREFIX}register_...",
                )
        return kinds

    def add_kinds(self, kinds: Sequence[type[Spec]]) -> None:
        """Let plugins register components of these kinds, which are new."""
        for kind in kinds:
            if kind.kind in self.kinds or kind.hook in self.hooks:
                raise PluginFault(
                    Status.CONFLICT, f"there is a kind {kind.kind!r} or a hook {kind.hook} already"
                )
        with as_faults():
            self._observation.update(_observation_hooks(kinds))
        self.kinds.update((kind.kind, kind) for kind in kinds)
        if kinds:
            self.add_hookspecs(type("Registration", (), _registration_hooks(kinds)))

    def take_in(self, plugin: object, name: str) -> list[Spec]:
        """Register a plugin and return every component that it provides; after a
        :class:`PluginFault` it is unknown.
        """
        for hook, options in self.implementations(plugin).items():
            if hook in self._observation:
                raise _failed(
                    f"{hook} is called on the observers of a run only: register a tracker that "
                    f"implements it"
                )
            if options.get("wrapper") or options.get("hookwrapper"):
                raise _failed(f"{hook} is a wrapper; only hooks of a run can be wrapped")
        self.check(plugin)
        try:
            with as_faults():
                self.register(plugin, name)
                specs = self._collect(plugin)
        except PluginFault:
            if self.is_registered(plugin):
                self.unregister(plugin)
            raise
        return specs

    def _collect(self, plugin: object) -> list[Spec]:
        specs: dict[tuple[str, str], Spec] = {}
        for kind in self.kinds.values():
            for result in self.call_alone(plugin, kind.hook):
                if not isinstance(result, Sequence) or isinstance(result, str):
                    raise _failed(
                        f"{kind.hook} returned {result!r}; it must return a sequence of "
                        f"{kind.__name__}"
                    )
                for spec in result:
                    if not isinstance(spec, kind):
                        raise _failed(
                            f"{kind.hook} returned {spec!r}; every item must be a {kind.__name__}"
                        )
                    if (kind.kind, spec.name) in specs:
                        raise _failed(f"{kind.hook} returned two {kind.kind}s called {spec.name!r}")
                    specs[kind.kind, spec.name] = spec
        return list(specs.values())
