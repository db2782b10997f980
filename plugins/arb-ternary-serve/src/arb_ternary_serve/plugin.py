"""Say what this distribution is for. It is used from Python."""

from __future__ import annotations

from collections.abc import Mapping

from arb_ternary import hookimpl

ARB_API_VERSION = (1, 0)


@hookimpl
def arb_plugin_info() -> Mapping[str, str]:
    return {"summary": "many sequences decoded together by one language model"}
