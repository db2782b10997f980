"""Hook implementations of the progressive training plugin."""

from __future__ import annotations

from collections.abc import Sequence

from arb_ternary import hookimpl
from arb_ternary.specs import CommandSpec, DataSpec, ExporterSpec, MaskingSpec, PhaseSpec

ARB_API_VERSION = (1, 0)


@hookimpl
def arb_register_phases() -> Sequence[PhaseSpec]:
    return (
        PhaseSpec(
            name="progressive",
            target="arb_ternary_progressive.phase:ProgressivePhase",
            config="arb_ternary_progressive.config:ProgressivePhaseConfig",
            summary="grow the model stack by stack, on a trunk that is frozen or learns through "
            "adapters",
        ),
    )


@hookimpl
def arb_register_masking() -> Sequence[MaskingSpec]:
    return (
        MaskingSpec(
            name="mlm",
            target="arb_ternary_progressive.masking:MlmMasking",
            config="arb_ternary_progressive.masking_config:MlmConfig",
            summary="predict hidden tokens, a fixed share of each row",
        ),
        MaskingSpec(
            name="progressive",
            target="arb_ternary_progressive.masking:ProgressiveMasking",
            config="arb_ternary_progressive.masking_config:ProgressiveMaskingConfig",
            summary="predict hidden tokens, a share of each row that grows with depth",
        ),
        MaskingSpec(
            name="time_step",
            target="arb_ternary_progressive.masking:TimeStepMasking",
            config="arb_ternary_progressive.masking_config:TimeStepConfig",
            summary="predict hidden tokens, a share of each row that grows with diffusion time",
        ),
    )


@hookimpl
def arb_register_datasets() -> Sequence[DataSpec]:
    return (
        DataSpec(
            name="with_mask_token",
            target="arb_ternary_progressive.masked_source:build",
            config="arb_ternary_progressive.masked_source:WithMaskTokenConfig",
            summary="another data source with one more id, the last, for hidden tokens",
        ),
    )


@hookimpl
def arb_register_exporters() -> Sequence[ExporterSpec]:
    return (
        ExporterSpec(
            name="merged",
            target="arb_ternary_progressive.exporter:build",
            summary="safetensors of a model grown with adapters, merged into its weights",
            suffix=".safetensors",
        ),
    )


@hookimpl
def arb_register_commands() -> Sequence[CommandSpec]:
    return (
        CommandSpec(
            name="progressive",
            target="arb_ternary_progressive.cli:progressive",
            summary="Plan runs that grow a model stack by stack.",
        ),
    )
