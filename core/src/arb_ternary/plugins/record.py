"""The records of plugins and of the components that they register."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from attrs import define, field, frozen

from arb_ternary.plugins.metadata import canonical
from arb_ternary.specs import CommandSpec, resolve

#: Name and hook module of the plugin through which the program registers its own components.
BUILTIN: Final = "builtin"
BUILTIN_MODULE: Final = "arb_ternary.builtin.plugin"


def written(kind: str, name: str) -> str:
    """Return the name of a component as users write it: ``plugins.check`` is ``plugins check``."""
    return name.replace(".", " ") if kind == CommandSpec.kind else name


@define(kw_only=True, eq=False)
class PluginRecord:
    """A plugin, and whether it is loaded.

    Attributes:
        name: the name of the entry point, or the stem of the file, or the name given to
            ``register``.
        distribution: the distribution that it comes from; None for a file or a registered object.
        version: the version of the distribution.
        module: the import name of the hook module, or the path of the file.
        loaded: whether its components can be used.
        disabled: whether the user keeps it out (``ARB_PLUGINS``, ``ARB_PLUGINS_DISABLED``); its
            module was not imported.
        reason: why it is not loaded, or why one of its components cannot be used; empty if nothing
            is wrong.
        results: what its registration hooks returned, by hook.
        components: the components that it provides, in the order of registration.
        hook_module: the module or object that implements its hooks, once it is imported.
    """

    name: str
    distribution: str | None = None
    version: str | None = None
    module: str = ""
    loaded: bool = False
    disabled: bool = False
    reason: str = ""
    results: Mapping[str, tuple[Any, ...]] = field(factory=dict, repr=False)
    components: tuple[Registered, ...] = ()
    hook_module: object = field(default=None, repr=False)

    @property
    def described(self) -> str:
        """Name and origin for messages: ``'x' (arb-ternary-x 1.0)``."""
        origin = f"{self.distribution} {self.version}" if self.distribution else self.module
        return f"{self.name!r} ({origin})"

    @property
    def status(self) -> str:
        """Whether it is loaded, in a word: ``loaded``, ``disabled`` or ``failed``."""
        if self.loaded:
            return "loaded"
        return "disabled" if self.disabled else "failed"

    @property
    def failed(self) -> bool:
        """Whether it, or a component of it, cannot be used although the user wants it."""
        return bool(self.reason) and not self.disabled

    @property
    def fault(self) -> str:
        """Why it is not loaded, or what is wrong with it, on one line."""
        what = f"plugin {self.described}"
        if not self.loaded:
            what += " is disabled" if self.disabled else " is not loaded"
        return f"{what}: {self.reason}"

    @property
    def is_core(self) -> bool:
        """Whether it registers the program's own components."""
        return self.module == BUILTIN_MODULE

    def comes_from(self, distribution: str | None) -> bool:
        """Whether it comes from the distribution of that name, given in its normal form."""
        return self.distribution is not None and canonical(self.distribution) == distribution

    def to_json(self) -> dict[str, Any]:
        """The record as JSON values."""
        return {
            "name": self.name,
            "distribution": self.distribution,
            "version": self.version,
            "module": self.module,
            "status": self.status,
            "reason": self.reason,
            "components": [{"kind": each.kind, "name": each.name} for each in self.components],
        }


@frozen(eq=False)
class Registered:
    """A component and the plugin that it comes from; ``spec`` is of the class of its kind."""

    spec: Any
    plugin: PluginRecord = field(repr=False)

    @property
    def kind(self) -> str:
        """The kind of component, e.g. ``optimizer``."""
        return str(self.spec.kind)

    @property
    def name(self) -> str:
        """The name by which a config names it."""
        return str(self.spec.name)

    @property
    def distribution(self) -> str | None:
        """The distribution of its plugin; None for a file or an object."""
        return self.plugin.distribution

    @property
    def described(self) -> str:
        """Kind, name and plugin for messages."""
        return f"{self.kind} {written(self.kind, self.name)!r} of plugin {self.plugin.described}"

    def load(self) -> Any:
        """Import the target of the spec, as :func:`arb_ternary.specs.resolve` does."""
        return resolve(self.spec.target)
