"""Hook implementations of upcycling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from arb_ternary import hookimpl
from arb_ternary.specs import PhaseSpec

ARB_API_VERSION = (1, 0)


@hookimpl
def arb_plugin_info() -> Mapping[str, str]:
    return {"summary": "pretrained float models become ternary"}


@hookimpl
def arb_register_phases() -> Sequence[PhaseSpec]:
    return (
        PhaseSpec(
            name="load_teacher",
            target="arb_ternary_upcycle.load_teacher:build",
            config="arb_ternary_upcycle.load_teacher:LoadTeacherConfig",
            summary="reads a pretrained model into the run's stages, and sees that it is of use",
        ),
        PhaseSpec(
            name="fold_rotate",
            target="arb_ternary_upcycle.fold_rotate:build",
            config="arb_ternary_upcycle.fold_rotate:FoldRotateConfig",
            summary="the teacher in a basis that rounds better: gains folded, residual stream and values rotated",
        ),
    )
