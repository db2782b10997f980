"""Hook implementations of the plugin of Hugging Face's formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from arb_ternary import hookimpl
from arb_ternary_train.specs import ExporterSpec, ImporterSpec

ARB_API_VERSION = (1, 0)


@hookimpl
def arb_plugin_info() -> Mapping[str, str]:
    return {"summary": "model folders of transformers, out and in"}


@hookimpl
def arb_register_exporters() -> Sequence[ExporterSpec]:
    return (
        ExporterSpec(
            name="hf",
            target="arb_ternary_hf.exporter:build",
            config="arb_ternary_hf.config:HfExportConfig",
            summary="a folder that transformers loads: Llama, Qwen3, Arcee or BitNet, packed or "
            "dense",
        ),
    )


@hookimpl
def arb_register_importers() -> Sequence[ImporterSpec]:
    return (
        ImporterSpec(
            name="hf",
            target="arb_ternary_hf.importer:build",
            config="arb_ternary_text.interchange.config:ImportConfig",
            schemes=("hf",),
            summary="a folder of transformers, the hub's cache, or hf://org/name: packed, dense "
            "ternary and float",
        ),
    )
