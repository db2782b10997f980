"""The plugin module: it registers no component.

``arb_ternary_train.world`` asks for ``arb_ternary_distributed.launch`` if a launcher has started
several processes.
"""

from __future__ import annotations

from collections.abc import Mapping

from arb_ternary import hookimpl

ARB_API_VERSION = (1, 0)


@hookimpl
def arb_plugin_info() -> Mapping[str, str]:
    return {"summary": "training by several processes with the bytes of one"}
