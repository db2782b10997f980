"""Announce the plugin. ``arb eval --tasks`` finds it by its public name."""

from __future__ import annotations

from collections.abc import Mapping

from arb_ternary import hookimpl

ARB_API_VERSION = (1, 0)


@hookimpl
def arb_plugin_info() -> Mapping[str, str]:
    return {"summary": "tasks of lm-evaluation-harness: arb eval SOURCE --tasks"}
