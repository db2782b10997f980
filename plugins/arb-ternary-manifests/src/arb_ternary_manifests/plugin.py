"""Hook implementations of manifests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from arb_ternary import hookimpl
from arb_ternary.specs import CommandSpec, DocumentSpec

ARB_API_VERSION = (1, 0)


@hookimpl
def arb_plugin_info() -> Mapping[str, str]:
    return {"summary": "manifests: several runs in one file, and arb run"}


@hookimpl
def arb_register_documents() -> Sequence[DocumentSpec]:
    return (
        DocumentSpec(
            name="manifest",
            target="arb_ternary_manifests.plan:load_manifest",
            config="arb_ternary_manifests.document:Manifest",
            command="arb run",
            summary="experiments: targets, each with runs that follow one another",
        ),
    )


@hookimpl
def arb_register_commands() -> Sequence[CommandSpec]:
    return (
        CommandSpec(
            name="run",
            target="arb_ternary_manifests.cli:run",
            summary="Run the experiments of a manifest.",
        ),
    )
