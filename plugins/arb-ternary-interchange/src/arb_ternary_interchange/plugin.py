"""Register commands, exporters and importers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from arb_ternary import hookimpl
from arb_ternary.specs import CommandSpec, ExporterSpec, ImporterSpec

ARB_API_VERSION = (1, 0)


@hookimpl
def arb_plugin_info() -> Mapping[str, str]:
    return {"summary": "models out and in: safetensors, GGUF, folders of Hugging Face transformers"}


@hookimpl
def arb_register_commands() -> Sequence[CommandSpec]:
    return (
        CommandSpec(
            name="export",
            target="arb_ternary_interchange.cli.export:export",
            summary="Write a model in another form.",
        ),
        CommandSpec(
            name="import",
            target="arb_ternary_interchange.cli.import_model:import_command",
            summary="Make a run of a model that another program has written.",
        ),
        CommandSpec(
            name="inspect",
            target="arb_ternary_interchange.cli.inspect:inspect",
            summary="Say what is in a model file or a run.",
        ),
        CommandSpec(
            name="push",
            target="arb_ternary_interchange.cli.push:push",
            summary="Publish a model on the Hugging Face Hub.",
        ),
    )


@hookimpl
def arb_register_model_readers() -> Sequence[str]:
    return ("arb_ternary_interchange.importing:read_model",)


@hookimpl
def arb_register_exporters() -> Sequence[ExporterSpec]:
    return (
        ExporterSpec(
            name="safetensors",
            target="arb_ternary_interchange.safetensors.exporter:build",
            suffix=".safetensors",
            summary="packed weights in one safetensors file",
        ),
        ExporterSpec(
            name="gguf",
            target="arb_ternary_interchange.gguf.exporter:GgufExporter",
            config="arb_ternary_interchange.options:GgufConfig",
            summary="a GGUF file for llama.cpp and what is built on it; ternary weights exactly",
            suffix=".gguf",
        ),
        ExporterSpec(
            name="hf",
            target="arb_ternary_interchange.huggingface.exporter:HfExporter",
            config="arb_ternary_interchange.options:HfExportConfig",
            summary="a folder that transformers loads: Llama, Qwen3, Arcee or BitNet, packed or "
            "dense",
        ),
    )


@hookimpl
def arb_register_importers() -> Sequence[ImporterSpec]:
    return (
        ImporterSpec(
            name="safetensors",
            target="arb_ternary_interchange.safetensors.importer:build",
            summary="a file of the exporter of this name, with accumulators: the same bits",
        ),
        ImporterSpec(
            name="gguf",
            target="arb_ternary_interchange.gguf.importer:GgufImporter",
            config="arb_ternary_interchange.options:ImportConfig",
            summary="GGUF files of llama, qwen3, arcee and bitnet: ternary (TQ1_0, TQ2_0, Q2_0) "
            "and float",
        ),
        ImporterSpec(
            name="hf",
            target="arb_ternary_interchange.huggingface.importer:HfImporter",
            config="arb_ternary_interchange.options:ImportConfig",
            schemes=("hf",),
            summary="a folder of transformers, the hub's cache, or hf://org/name: packed, dense "
            "ternary and float",
        ),
    )
