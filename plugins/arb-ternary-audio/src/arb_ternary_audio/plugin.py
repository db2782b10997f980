"""What audio registers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from arb_ternary import hookimpl
from arb_ternary.specs import DataSpec, GeneratorSpec

ARB_API_VERSION = (1, 0)


@hookimpl
def arb_plugin_info() -> Mapping[str, str]:
    return {"summary": "audio: sound data, mel features, a model of audio codes"}


@hookimpl
def arb_register_datasets() -> Sequence[DataSpec]:
    return (
        DataSpec(
            name="formants",
            target="arb_ternary_audio.data.formants:build",
            config="arb_ternary_audio.data.formants:FormantsConfig",
            summary="synthetic words of formants, made by the package, as spectrograms by class",
        ),
        DataSpec(
            name="sounds",
            target="arb_ternary_audio.data.sounds:build",
            config="arb_ternary_audio.data.sounds:SoundsConfig",
            summary="wav, flac and ogg files in a folder by class, as spectrograms",
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
            summary="says what is in sound files, with a model that was trained on sounds by class",
        ),
    )
