"""Hook implementations of upcycling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from arb_ternary import hookimpl
from arb_ternary.specs import CheckSpec, CommandSpec, PhaseSpec
from arb_ternary_train.openmp import VARIABLES

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
            config="arb_ternary_upcycle.stage_options:LoadTeacherConfig",
            summary="reads a pretrained model into the run's stages, and sees that it is of use",
        ),
        PhaseSpec(
            name="fold_rotate",
            target="arb_ternary_upcycle.fold_rotate:build",
            config="arb_ternary_upcycle.stage_options:FoldRotateConfig",
            summary="the teacher in a basis that rounds better: gains folded, residual stream and "
            "values rotated",
        ),
        PhaseSpec(
            name="surgery",
            target="arb_ternary_upcycle.surgery.phase:build",
            config="arb_ternary_upcycle.stage_options:SurgeryConfig",
            summary="the teacher with decoupled attention: a smaller cache of keys, what it "
            "learned kept",
        ),
        PhaseSpec(
            name="projection",
            target="arb_ternary_upcycle.projection.phase:build",
            config="arb_ternary_upcycle.projection.config:ProjectionConfig",
            summary="the newest stage's weights become trits, each layer fitted to what the layers "
            "before it left",
        ),
        PhaseSpec(
            name="blockwise",
            target="arb_ternary_upcycle.blockwise:build",
            config="arb_ternary_upcycle.training_options:BlockwiseConfig",
            variables=VARIABLES,
            summary="each block of the student in turn learns to give what the teacher's block "
            "gives",
        ),
        PhaseSpec(
            name="global",
            target="arb_ternary_upcycle.global_phase:build",
            config="arb_ternary_upcycle.training_options:GlobalConfig",
            variables=VARIABLES,
            summary="all of the student learns the next token, and the teacher's predictions where "
            "asked to",
        ),
        PhaseSpec(
            name="verify",
            target="arb_ternary_upcycle.verification.phase:build",
            config="arb_ternary_upcycle.verification.config:VerifyConfig",
            summary="checks in the middle of a run, which end it where they fail",
        ),
        PhaseSpec(
            name="benchmark",
            target="arb_ternary_upcycle.benchmark.phase:build",
            config="arb_ternary_upcycle.benchmark.config:BenchmarkConfig",
            summary="teacher against student in quality, time and memory, and a report",
        ),
        PhaseSpec(
            name="export",
            target="arb_ternary_upcycle.export_phase:build",
            config="arb_ternary_upcycle.export_config:ExportConfig",
            summary="writes the model in another form into the run directory",
        ),
    )


@hookimpl
def arb_register_checks() -> Sequence[CheckSpec]:
    return (
        CheckSpec(
            name="compare",
            target="arb_ternary_upcycle.verification.compare:build",
            config="arb_ternary_upcycle.verification.config:CompareConfig",
            summary="attention and logits of student and teacher are at most so far apart",
        ),
        CheckSpec(
            name="fidelity",
            target="arb_ternary_upcycle.verification.fidelity:build",
            config="arb_ternary_upcycle.verification.config:FidelityConfig",
            summary="the student's loss and perplexity exceed the teacher's by so much at most",
        ),
        CheckSpec(
            name="eval",
            target="arb_ternary_upcycle.verification.answers:build",
            config="arb_ternary_upcycle.verification.config:EvalConfig",
            summary="the student answers enough questions rightly, beside its teacher",
        ),
        CheckSpec(
            name="kvcache",
            target="arb_ternary_upcycle.verification.kv_cache:build",
            config="arb_ternary_upcycle.verification.config:KvCacheConfig",
            summary="the student keeps so much fewer bytes of each token than the teacher",
        ),
    )


@hookimpl
def arb_register_commands() -> Sequence[CommandSpec]:
    return (
        CommandSpec(
            name="upcycle",
            target="arb_ternary_upcycle.cli.upcycle:upcycle",
            summary="Make a pretrained model ternary.",
        ),
    )
