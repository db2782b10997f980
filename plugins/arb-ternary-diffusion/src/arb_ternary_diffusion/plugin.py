"""Register the components of arb-ternary-diffusion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from arb_ternary import hookimpl
from arb_ternary.specs import CommandSpec, GeneratorSpec, MaskingSpec, ModelSpec, TrackerSpec

ARB_API_VERSION = (1, 0)


@hookimpl
def arb_plugin_info() -> Mapping[str, str]:
    return {
        "summary": "diffusion: ternary U-Net and DiT, noise schedules, samplers, masked diffusion "
        "of text"
    }


@hookimpl
def arb_register_models() -> Sequence[ModelSpec]:
    return (
        ModelSpec(
            name="dit",
            target="arb_ternary_diffusion.models.dit:build",
            config="arb_ternary_diffusion.models.config:DiTConfig",
            summary="diffusion transformer of ternary linears: removes noise from images",
        ),
        ModelSpec(
            name="unet",
            target="arb_ternary_diffusion.models.unet:build",
            config="arb_ternary_diffusion.models.config:UNetConfig",
            summary="U-Net of ternary convolutions: removes noise from images",
        ),
    )


@hookimpl
def arb_register_masking() -> Sequence[MaskingSpec]:
    return (
        MaskingSpec(
            name="absorbing",
            target="arb_ternary_diffusion.absorbing:build",
            config="arb_ternary_diffusion.absorbing_config:AbsorbingConfig",
            summary="masked diffusion: hides a random share of the tokens; the loss bounds the "
            "likelihood",
        ),
        MaskingSpec(
            name="noise",
            target="arb_ternary_diffusion.noise_masking:build",
            config="arb_ternary_diffusion.noise_config:NoiseConfig",
            summary="adds noise to images; the model predicts the image, the noise, or v",
        ),
    )


@hookimpl
def arb_register_trackers() -> Sequence[TrackerSpec]:
    return (
        TrackerSpec(
            name="sample_grid",
            target="arb_ternary_diffusion.sample_grid:build",
            config="arb_ternary_diffusion.sample_grid:SampleGridConfig",
            summary="draws images at every evaluation, as a PNG in the run directory",
        ),
    )


@hookimpl
def arb_register_generators() -> Sequence[GeneratorSpec]:
    return (
        GeneratorSpec(
            name="image_diffusion",
            target="arb_ternary_diffusion.cli.generate_images:draw",
            masking=("noise",),
            summary="draws images from noise, in one PNG",
        ),
        GeneratorSpec(
            name="text_diffusion",
            target="arb_ternary_diffusion.cli.generate_text:generate",
            summary="fills the gaps of a text and continues it, with a model that was trained on "
            "hidden tokens",
            masking=("absorbing",),
        ),
    )


@hookimpl
def arb_register_commands() -> Sequence[CommandSpec]:
    return (
        CommandSpec(
            name="diffusion",
            target="arb_ternary_diffusion.cli.frechet:diffusion",
            summary="Measure what a diffusion model draws.",
        ),
    )
