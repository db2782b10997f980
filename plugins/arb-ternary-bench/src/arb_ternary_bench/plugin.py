"""Registration of the bench's commands and recipes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from arb_ternary import hookimpl
from arb_ternary.specs import CommandSpec

ARB_API_VERSION = (1, 0)


@hookimpl
def arb_plugin_info() -> Mapping[str, str]:
    return {"summary": "measurements of kernels, training and generation; studies"}


@hookimpl
def arb_register_commands() -> Sequence[CommandSpec]:
    return (
        CommandSpec(
            name="bench",
            target="arb_ternary_bench.cli.bench:bench",
            summary="Measure kernels, training, generation and configs.",
        ),
        CommandSpec(
            name="backends.roofline",
            target="arb_ternary_bench.cli.roofline:roofline",
            summary="Say whose kernel an op is, and the least time it takes.",
        ),
    )
