"""The components that the text plugin registers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from arb_ternary import hookimpl
from arb_ternary.specs import (
    CommandSpec,
    DataSpec,
    GeneratorSpec,
    MaskingSpec,
    ModelSpec,
    StarterSpec,
)

ARB_API_VERSION = (1, 0)


@hookimpl
def arb_plugin_info() -> Mapping[str, str]:
    return {
        "summary": "the decoder, data sources of text and tokens, causal masking and generation"
    }


@hookimpl
def arb_register_masking() -> Sequence[MaskingSpec]:
    return (
        MaskingSpec(
            name="causal",
            target="arb_ternary_text.data.masking:build_causal",
            summary="every position predicts the token that follows it",
        ),
        MaskingSpec(
            name="answers",
            target="arb_ternary_text.data.masking:build_answers",
            summary="positions predict the tokens of answers, and those that end them",
        ),
    )


@hookimpl
def arb_register_models() -> Sequence[ModelSpec]:
    return (
        ModelSpec(
            name="decoder",
            target="arb_ternary_text.models.decoder:Decoder",
            config="arb_ternary_text.models.config:DecoderConfig",
            summary="decoder transformer of ternary linears, embeddings and norms",
        ),
    )


@hookimpl
def arb_register_datasets() -> Sequence[DataSpec]:
    return (
        DataSpec(
            name="chat",
            target="arb_ternary_text.chat.source:build",
            config="arb_ternary_text.chat.source:ChatConfig",
            summary="conversations in JSON, CSV or Parquet files",
        ),
        DataSpec(
            name="shakespeare",
            target="arb_ternary_text.data.shakespeare:build",
            config="arb_ternary_text.data.shakespeare:ShakespeareConfig",
            summary="the plays and poems of Shakespeare, part of the package",
        ),
        DataSpec(
            name="text",
            target="arb_ternary_text.data.files:build",
            config="arb_ternary_text.data.files:TextConfig",
            summary="a text file, or the text files of a folder",
        ),
        DataSpec(
            name="tokens",
            target="arb_ternary_text.data.tokens:build",
            config="arb_ternary_text.data.tokens:TokensConfig",
            summary="token ids in .bin or .npy files, memory-mapped",
        ),
    )


@hookimpl
def arb_register_starters() -> Sequence[StarterSpec]:
    return (
        StarterSpec(
            name="small",
            target="arb_ternary_text.starters:SMALL",
            priority=20,
            summary="A small pure-ternary decoder on Shakespeare: minutes on a laptop's CPU.",
        ),
        StarterSpec(
            name="mixed",
            target="arb_ternary_text.starters:MIXED",
            summary="Ternary linears, trained by votes, with float embedding, norms and head, "
            "trained by AdamW.",
        ),
        StarterSpec(
            name="exact",
            target="arb_ternary_text.starters:EXACT",
            summary="A small pure-ternary decoder whose ternary products are integers, with the "
            "same bits on every backend.",
        ),
        StarterSpec(
            name="float",
            target="arb_ternary_text.starters:FLOAT",
            summary="The same architecture in float32, trained by AdamW, as a baseline.",
        ),
    )


@hookimpl
def arb_register_generators() -> Sequence[GeneratorSpec]:
    return (
        GeneratorSpec(
            name="text",
            target="arb_ternary_text.cli.generate:generate",
            summary="continue a prompt with a model that has new_cache() or unroll()",
        ),
    )


@hookimpl
def arb_register_commands() -> Sequence[CommandSpec]:
    return (
        CommandSpec(
            name="bench",
            target="arb_ternary_text.cli.bench:bench",
            summary="Measure how fast a model reads and writes.",
        ),
    )
