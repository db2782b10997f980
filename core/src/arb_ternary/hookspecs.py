"""The hooks that the program calls. The docstring of a hook is its reference.

Registration hooks are called once, when the plugins are loaded, and must be pure and cheap: no
torch, no file, no network. There is one for each kind of component, without arguments, named by its
``Spec`` class (``Spec.hook``): it returns a sequence of such specs, and an empty sequence or None
means that the plugin has none. A kind may have hooks of its own besides, which its components
implement (``Spec.hookspecs``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from arb_ternary.specs import Spec

hookspec = pluggy.HookspecMarker("arb_ternary")


@hookspec
def arb_register_kinds() -> Sequence[type[Spec]]:
    """Kinds of component that the plugin adds: subclasses of ``Spec``.

    Called once at load, on installed plugins only and before any other registration hook: the hooks
    of the kinds then exist for all plugins. An implementation of such a hook in a plugin that can
    do without the kind is marked ``@hookimpl(optionalhook=True)``. An empty sequence or None means
    none.
    """
    return ()


@hookspec
def arb_plugin_info() -> Mapping[str, str]:
    """Facts about the plugin for ``arb plugins show`` (``summary``, ``homepage``, ...).

    Called when a plugin is shown, never in a run. None means that the distribution's metadata says
    it all.
    """
    return {}
