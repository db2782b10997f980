"""What the conformance kit registers."""

from __future__ import annotations

from collections.abc import Mapping

from arb_ternary import hookimpl

ARB_API_VERSION = (1, 3)


@hookimpl
def arb_plugin_info() -> Mapping[str, str]:
    return {"summary": "conformance suites for components, and a scaffold for new plugins"}
