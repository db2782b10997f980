"""Say what this distribution is for. Its names are entry points of ``arb_ternary.names``."""

from __future__ import annotations

from collections.abc import Mapping

from arb_ternary import hookimpl

ARB_API_VERSION = (1, 0)


@hookimpl
def arb_plugin_info() -> Mapping[str, str]:
    return {"summary": "ternary weights in any torch model and in your own training loop"}
