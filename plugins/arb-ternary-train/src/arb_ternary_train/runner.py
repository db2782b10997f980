"""From a config to a trained model: build, restore, run the phases, judge, report."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from attrs import field, frozen

from arb_ternary import hookspecs
from arb_ternary.backends.select import use_backend
from arb_ternary.config.fields import to_plain
from arb_ternary.config.yaml_document import dump_yaml
from arb_ternary.errors import ArbError, CheckpointError, Interrupted, UsageProblem
from arb_ternary.protocols.runs import Check, CheckResult, ModelChangingPhase, Phase, PhaseResult
from arb_ternary_train.build import RunParts, build_parts, require_protocol, versions_of
from arb_ternary_train.checkpoint import Checkpoint, CheckpointStore, read_checkpoint
from arb_ternary_train.config import RunConfig
from arb_ternary_train.context import RunContext
from arb_ternary_train.directory import RunDirectory, write_json
from arb_ternary_train.identity import differences, run_identity
from arb_ternary_train.init_from import load_state, load_weights
from arb_ternary_train.metrics import MetricsWriter
from arb_ternary_train.progress import LogFile, Reporter, make_reporter
from arb_ternary_train.report import RunReport, make_report
from arb_ternary_train.seeding import deterministic_algorithms, restore_global_rng
from arb_ternary_train.signals import StopRequest

__all__ = ["RunRequest", "train"]

_LOG = logging.getLogger(__name__)


@frozen(kw_only=True)
class RunRequest:
    """What the caller of :func:`train` wants beside the config.

    Attributes:
        directory: where to write; None = ``runs/<name>``, made unique, or the newest of them on a resume.
        resume: None = a new run; ``"auto"`` = from the newest good checkpoint, or from the start where there is none
            yet; a path = from that checkpoint, or from the newest of that run directory, or not at all.
        init_from: run directory or checkpoint whose weights the run starts from.
        backend: kernel backend, over what the environment and the config say.
        reporter: what a person sees; by default a progress bar on a terminal and plain lines elsewhere.
        faults: see ``CheckpointStore``.
    """

    directory: Path | None = None
    resume: str | Path | None = None
    init_from: Path | None = None
    backend: str | None = None
    reporter: Callable[[LogFile], Reporter] = make_reporter
    faults: Callable[[str], None] | None = field(default=None)


def train(config: RunConfig, request: RunRequest | None = None) -> RunReport:
    """Run ``config``; returns the report of the finished run.

    Raises:
        Interrupted: SIGINT or SIGTERM came; a checkpoint has been saved.
        ArbError: anything that the user can act on; a failed check does not raise, see ``RunReport.failed_checks``.
    """
    request = RunRequest() if request is None else request
    if request.resume is not None and request.init_from is not None:
        raise UsageProblem("--init-from: a resumed run goes on with its own weights", "Give --resume or --init-from.")
    directory, named = _locate(config, request)
    parts = build_parts(config, backend=request.backend)
    identity = run_identity(config, parts.data)
    if not directory.exists():
        record = {
            "name": config.name,
            "seed": config.seed,
            "device": str(parts.device),
            "backend": {"name": parts.backend.name, "source": parts.backend.source},
            "data": {"name": parts.data.name, "fingerprint": parts.data.fingerprint()},
            "vocabulary_size": parts.data.tokenizer.vocabulary_size,
            "versions": versions_of(config, parts.backend.name),
            "init_from": None if request.init_from is None else str(request.init_from),
        }
        directory.create(dump_yaml(to_plain(config)), record, parts.data.tokenizer.to_json())
    with ExitStack() as stack:
        stack.enter_context(directory.locked())
        store = CheckpointStore(directory.checkpoints, keep=config.checkpoint.keep)
        if request.faults is not None:
            store = CheckpointStore(store.root, keep=store.keep, faults=request.faults)
        checkpoint = _checkpoint(store, request, named)
        if checkpoint is not None:
            _refuse_foreign(checkpoint, identity)
        stack.enter_context(use_backend(parts.backend.name))
        stack.enter_context(deterministic_algorithms(config.deterministic))
        context = _context(config, request, directory, parts, identity, store, checkpoint, stack)
        return _run(context, checkpoint, request)


def _locate(config: RunConfig, request: RunRequest) -> tuple[RunDirectory, Path | None]:
    """The run's directory, and the checkpoint that the caller named."""
    if request.resume is None:
        return (RunDirectory.unused(config.name) if request.directory is None else _vacant(request.directory)), None
    if request.resume == "auto":
        if request.directory is not None:
            return RunDirectory(request.directory), None
        return RunDirectory.newest(config.name) or RunDirectory.unused(config.name), None
    path = Path(request.resume)
    if RunDirectory(path).exists():
        directory, named = RunDirectory.existing(path), CheckpointStore(RunDirectory(path).checkpoints).latest()
    else:
        if not path.is_dir():
            raise CheckpointError(f"{path}: there is no checkpoint folder and no run directory of this name")
        directory, named = RunDirectory.existing(path.resolve().parent.parent), path
    if request.directory is not None and request.directory.resolve() != directory.path.resolve():
        raise UsageProblem(
            f"--resume {path}: that checkpoint belongs to {directory.path}, not to {request.directory}",
            "Leave --run-dir out; to start another run from its weights use --init-from.",
        )
    return directory, named


def _vacant(path: Path) -> RunDirectory:
    directory = RunDirectory(path)
    if directory.exists():
        raise UsageProblem(
            f"{path}: a run was started here already",
            f"Continue it with --resume, or choose another directory: --run-dir {path}-2",
        )
    return directory


def _checkpoint(store: CheckpointStore, request: RunRequest, named: Path | None) -> Checkpoint | None:
    if request.resume is None:
        return None
    if named is not None:
        checkpoint = read_checkpoint(named)
        store.set_aside_newer(named)
        return checkpoint
    return store.newest_good()[0]


def _refuse_foreign(checkpoint: Checkpoint, identity: Mapping[str, Any]) -> None:
    if lines := differences(checkpoint.identity, identity):
        raise CheckpointError(
            f"{checkpoint.path}: it belongs to another run: {len(lines)} settings differ",
            "\n".join(
                [*lines[:8], "Resume with the run's own config.yaml; to start anew from its weights use --init-from."]
            ),
        )


def _context(
    config: RunConfig,
    request: RunRequest,
    directory: RunDirectory,
    parts: RunParts,
    identity: Mapping[str, Any],
    store: CheckpointStore,
    checkpoint: Checkpoint | None,
    stack: ExitStack,
) -> RunContext:
    log_file = LogFile(directory.log_file)
    stack.callback(log_file.close)
    if checkpoint is None:
        metrics = MetricsWriter(directory.metrics_file, resume_at=0)
    else:
        length = checkpoint.state["metrics_length"]
        metrics = MetricsWriter(directory.metrics_file, resume_at=length, resume_step=checkpoint.step)
    stack.enter_context(metrics)
    return RunContext(
        config=config,
        directory=directory,
        device=parts.device,
        backend=parts.backend,
        model=parts.model,
        data=parts.data,
        masking=parts.masking,
        observers=parts.observers,
        metrics=metrics,
        reporter=request.reporter(log_file),
        stop=stack.enter_context(StopRequest()),
        store=store,
        identity=identity,
    )


def _run(context: RunContext, checkpoint: Checkpoint | None, request: RunRequest) -> RunReport:
    reporter = context.reporter
    reporter.note(
        f"{context.directory.path}: backend {context.backend.name} ({context.backend.source}), {context.device}"
    )
    try:
        if checkpoint is None:
            _start(context, request)
        restored = None if checkpoint is None else _restore(context, checkpoint)
        context.observers.call(hookspecs.arb_run_start, context)
        if checkpoint is not None:
            context.observers.call(hookspecs.arb_checkpoint_load, context, checkpoint.state["observers"])
            reporter.note(f"continuing from {checkpoint.path.name}, step {checkpoint.step}")
        _run_phases(context, restored)
        report = _finish(context)
    except BaseException as error:
        reporter.stop()
        status = "interrupted" if isinstance(error, Interrupted | KeyboardInterrupt) else "failed"
        try:
            context.observers.call(hookspecs.arb_run_end, context, status)
        except ArbError as further:  # what ended the run matters more
            reporter.note(further.what)
        raise
    reporter.stop()
    context.observers.call(hookspecs.arb_run_end, context, "finished")
    return report


def _start(context: RunContext, request: RunRequest) -> None:
    """The run begins at step 0: whatever a killed attempt left here before its first checkpoint does not count."""
    init_from = request.init_from
    if init_from is None and (recorded := context.directory.record().get("init_from")) is not None:
        init_from = Path(recorded)
    if init_from is not None:
        path = load_weights(context.model, init_from, seed=context.seed)
        context.reporter.note(f"weights from {path}")


def _restore(context: RunContext, checkpoint: Checkpoint) -> Phase | None:
    """Put everything back as it was when ``checkpoint`` was written; the phase that was running, if one was."""
    state = checkpoint.state
    context.step, context.tokens = state["step"], state["tokens"]
    context.evaluation_shape = state["evaluation_shape"]
    context.finished = [PhaseResult(result["steps"], result["metrics"]) for result in state["finished"]]
    structures = state["structures"]
    context.structures = list(structures[: len(context.finished)])
    phase = None if state["phase"] is None else _build_phase(context)
    for index, structure in enumerate(structures):
        if structure is not None:
            maker = phase if index == len(context.finished) else context.config.phases[index].build()
            if not isinstance(maker, ModelChangingPhase):
                raise CheckpointError(f"{checkpoint.path}: phases[{index}] changed the model and cannot do so again")
            context.model = maker.restore_structure(context.model, structure).to(context.device)
    load_state(context.model, checkpoint.model, str(checkpoint.path / "model.safetensors"))
    if phase is not None:
        phase.load_state_dict(state["phase"])
    restore_global_rng(state["rng"], context.device)
    context.saved_as(checkpoint.path)
    return phase


def _build_phase(context: RunContext) -> Phase:
    choice = context.config.phases[context.phase_index]
    phase: Phase = require_protocol(choice.build(), Phase, choice)
    return phase


def _run_phases(context: RunContext, restored: Phase | None) -> None:
    for _ in range(context.phase_index, len(context.config.phases)):
        phase = _build_phase(context) if restored is None else restored
        restored = None
        context.enter_phase(phase)
        context.observers.call(hookspecs.arb_phase_start, context, phase.name)
        result = phase.run(context)
        context.leave_phase(phase, result)
        context.observers.call(hookspecs.arb_phase_end, context, phase.name)
        context.stop_if_requested()


def _finish(context: RunContext) -> RunReport:
    """Evaluate on all validation tokens, run the checks, write ``result.json``."""
    context.evaluate()
    results: list[tuple[str, CheckResult]] = []
    for choice in context.config.checks:
        check: Check = require_protocol(choice.build(), Check, choice)
        result = check.check(context)
        results.append((choice.name, result))
        context.reporter.note(f"check {choice.name}: {'passed' if result.passed else 'FAILED'}: {result.summary}")
    report = make_report(context, results)
    try:
        write_json(context.directory.result_file, report.to_json())
    except OSError as error:
        raise ArbError(f"{context.directory.result_file}: cannot be written: {error}") from error
    return report
