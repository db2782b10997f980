"""Hook implementations of the plugin for GGUF."""

from __future__ import annotations

from collections.abc import Sequence

from arb_ternary import hookimpl
from arb_ternary_train.specs import ExporterSpec, ImporterSpec

ARB_API_VERSION = (1, 0)


@hookimpl
def arb_register_exporters() -> Sequence[ExporterSpec]:
    return (
        ExporterSpec(
            name="gguf",
            target="arb_ternary_gguf.exporter:build",
            config="arb_ternary_gguf.config:GgufConfig",
            summary="a GGUF file for llama.cpp and what is built on it; ternary weights exactly",
            suffix=".gguf",
        ),
    )


@hookimpl
def arb_register_importers() -> Sequence[ImporterSpec]:
    return (
        ImporterSpec(
            name="gguf",
            target="arb_ternary_gguf.importer:build",
            config="arb_ternary_text.interchange.config:ImportConfig",
            summary="GGUF files of llama, qwen3, arcee and bitnet: ternary (TQ1_0, TQ2_0, Q2_0) "
            "and float",
        ),
    )
