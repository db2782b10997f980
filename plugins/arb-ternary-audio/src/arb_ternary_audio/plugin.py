"""Register the components of arb-ternary-audio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from arb_ternary import hookimpl
from arb_ternary.specs import DataSpec, GeneratorSpec

ARB_API_VERSION = (1, 0)


@hookimpl
def arb_plugin_info() -> Mapping[str, str]:
    return {"summary": "audio: sound data, mel features, audio codes for language models"}


@hookimpl
def arb_register_datasets() -> Sequence[DataSpec]:
    return (
        DataSpec(
            name="formants",
            target="arb_ternary_audio.data.formants:build",
            config="arb_ternary_audio.data.formants:FormantsConfig",
            summary="built-in synthetic words as labelled spectrograms",
        ),
        DataSpec(
            name="sounds",
            target="arb_ternary_audio.data.sounds:build",
            config="arb_ternary_audio.data.sounds:SoundsConfig",
            summary="labelled wav, flac and ogg files as spectrograms",
            libraries=("soundfile",),
        ),
        DataSpec(
            name="audio_codes",
            target="arb_ternary_audio.codes.source:build",
            config="arb_ternary_audio.codes.source:AudioCodesConfig",
            summary="the sounds of another source as codes, for a language model",
        ),
    )


@hookimpl
def arb_register_generators() -> Sequence[GeneratorSpec]:
    return (
        GeneratorSpec(
            name="sound",
            target="arb_ternary_audio.cli.generate:sound",
            data=("audio_codes",),
            summary="draws sounds, or continues one, with a model of audio codes",
        ),
        GeneratorSpec(
            name="listen",
            target="arb_ternary_audio.cli.listen:listen",
            masking=("labels",),
            data=("formants", "sounds"),
            summary="classifies sound files with a model that was trained on labelled sounds",
        ),
    )
