"""What diffusion registers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from arb_ternary import hookimpl
from arb_ternary.specs import MaskingSpec
from arb_ternary_train.specs import GeneratorSpec

ARB_API_VERSION = (1, 0)


@hookimpl
def arb_plugin_info() -> Mapping[str, str]:
    return {"summary": "diffusion: ternary U-Net and DiT, noise schedules, samplers, masked diffusion of text"}


@hookimpl
def arb_register_masking() -> Sequence[MaskingSpec]:
    return (
        MaskingSpec(
            name="absorbing",
            target="arb_ternary_diffusion.absorbing:build",
            config="arb_ternary_diffusion.absorbing_config:AbsorbingConfig",
            summary="masked diffusion: tokens hidden by a uniform time, a loss that bounds the likelihood",
        ),
    )


@hookimpl
def arb_register_generators() -> Sequence[GeneratorSpec]:
    return (
        GeneratorSpec(
            name="text_diffusion",
            target="arb_ternary_diffusion.text_generate:generate",
            summary="fills the gaps of a text and continues it, with a model that was trained on hidden tokens",
            masking=("absorbing",),
        ),
    )
