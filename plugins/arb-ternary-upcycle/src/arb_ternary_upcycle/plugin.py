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
            target="arb_ternary_upcycle.load_teacher:LoadTeacherPhase",
            config="arb_ternary_upcycle.stage_options:LoadTeacherConfig",
            summary="reads a pretrained model into the run's stages and tests its loss",
        ),
        PhaseSpec(
            name="fold_rotate",
            target="arb_ternary_upcycle.fold_rotate:FoldRotatePhase",
            config="arb_ternary_upcycle.stage_options:FoldRotateConfig",
            summary="puts the teacher into a basis that rounds better: gains folded, stream and "
            "values rotated",
        ),
        PhaseSpec(
            name="surgery",
            target="arb_ternary_upcycle.surgery.phase:SurgeryPhase",
            config="arb_ternary_upcycle.stage_options:SurgeryConfig",
            summary="gives the teacher decoupled attention, which has a smaller cache of keys",
        ),
        PhaseSpec(
            name="projection",
            target="arb_ternary_upcycle.projection.phase:ProjectionPhase",
            config="arb_ternary_upcycle.projection.config:ProjectionConfig",
            summary="rounds the newest stage's weights to trits; each layer compensates for the "
            "errors of earlier ones",
        ),
        PhaseSpec(
            name="blockwise",
            target="arb_ternary_upcycle.blockwise:BlockwisePhase",
            config="arb_ternary_upcycle.training_options:BlockwiseConfig",
            variables=VARIABLES,
            summary="trains each block of the student in turn to give the outputs of the teacher's "
            "block",
        ),
        PhaseSpec(
            name="global",
            target="arb_ternary_upcycle.global_phase:GlobalPhase",
            config="arb_ternary_upcycle.training_options:GlobalConfig",
            variables=VARIABLES,
            summary="trains the whole student on the next token, and optionally on the teacher's "
            "predictions",
        ),
        PhaseSpec(
            name="verify",
            target="arb_ternary_upcycle.verification.phase:VerifyPhase",
            config="arb_ternary_upcycle.verification.config:VerifyConfig",
            summary="makes checks in the middle of a run, which may end it",
        ),
        PhaseSpec(
            name="benchmark",
            target="arb_ternary_upcycle.benchmark.phase:BenchmarkPhase",
            config="arb_ternary_upcycle.benchmark.config:BenchmarkConfig",
            summary="measures teacher and student in quality, time and memory, and writes a report",
        ),
        PhaseSpec(
            name="export",
            target="arb_ternary_upcycle.export_phase:ExportPhase",
            config="arb_ternary_upcycle.export_config:ExportConfig",
            summary="writes the model in another form into the run directory",
        ),
    )


@hookimpl
def arb_register_checks() -> Sequence[CheckSpec]:
    return (
        CheckSpec(
            name="compare",
            target="arb_ternary_upcycle.verification.compare:CompareCheck",
            config="arb_ternary_upcycle.verification.config:CompareConfig",
            summary="limits the differences between student and teacher in attention and logits",
        ),
        CheckSpec(
            name="fidelity",
            target="arb_ternary_upcycle.verification.fidelity:FidelityCheck",
            config="arb_ternary_upcycle.verification.config:FidelityConfig",
            summary="limits the student's loss and perplexity against the teacher's",
        ),
        CheckSpec(
            name="eval",
            target="arb_ternary_upcycle.verification.answers:EvalCheck",
            config="arb_ternary_upcycle.verification.config:EvalConfig",
            summary="limits the student's share of right answers in tasks of "
            "lm-evaluation-harness, alone and against the teacher's",
        ),
        CheckSpec(
            name="kvcache",
            target="arb_ternary_upcycle.verification.kv_cache:KvCacheCheck",
            config="arb_ternary_upcycle.verification.config:KvCacheConfig",
            summary="limits the student's bytes of keys and values per token against the teacher's",
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


@hookimpl
def arb_register_report_sections() -> Sequence[str]:
    return ("arb_ternary_upcycle.report.sections:contribute",)
