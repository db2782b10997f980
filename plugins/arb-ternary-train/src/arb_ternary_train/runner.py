"""From a config to a trained model: build, restore, run the phases, judge, report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from attrs import frozen

from arb_ternary.backends.select import use_backend
from arb_ternary.config.errors import raise_faults
from arb_ternary.config.fields import to_plain
from arb_ternary.config.yaml_document import dump_yaml
from arb_ternary.errors import ArbError, CheckpointError, Interrupted, UsageProblem
from arb_ternary_train import hookspecs
from arb_ternary_train.build import RunParts, build_parts, build_phase, require_protocol, versions_of
from arb_ternary_train.checkpoint import Checkpoint, CheckpointStore, no_fault, read_checkpoint
from arb_ternary_train.checkpointer import Checkpointer, restore_run
from arb_ternary_train.combinations import find_contradictions
from arb_ternary_train.config import RunConfig
from arb_ternary_train.context import TrainingContext
from arb_ternary_train.directory import RunDirectory, write_json
from arb_ternary_train.identity import differences, run_identity
from arb_ternary_train.init_from import load_weights, run_of
from arb_ternary_train.logbook import Logbook
from arb_ternary_train.metrics import MetricsWriter
from arb_ternary_train.progress import LogFile, Reporter, make_reporter
from arb_ternary_train.protocols import Attachments, Check, CheckResult, LeavesModel
from arb_ternary_train.report import RunReport, make_report
from arb_ternary_train.seeding import deterministic_algorithms
from arb_ternary_train.signals import StopRequest
from arb_ternary_train.standard import LogOptions
from arb_ternary_train.threads import recorded_threads

__all__ = ["RunRequest", "train"]


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
    faults: Callable[[str], None] = no_fault


def train(config: RunConfig, request: RunRequest | None = None) -> RunReport:
    """Run ``config``; returns the report of the finished run.

    Raises:
        Interrupted: SIGINT or SIGTERM came; a checkpoint has been saved.
        ArbError: anything that the user can act on; a failed check does not raise, see ``RunReport.failed_checks``.
    """
    with _open_run(config, RunRequest() if request is None else request) as context:
        while context.phase_index < len(config.phases):
            phase = context.phase or build_phase(config, context.phase_index)
            context.enter_phase(phase)
            result = phase.run(context)
            context.leave_phase(phase, result)
            context.stop_if_requested()
        return _finish(context)


@contextmanager
def _open_run(config: RunConfig, request: RunRequest) -> Iterator[TrainingContext]:
    """The run, built anew or restored; observers hear of its end, whatever that is."""
    if faults := find_contradictions(config):  # a config that was made in Python has not been asked
        raise_faults(faults, {}, config.name)
    if request.resume is not None and request.init_from is not None:
        raise UsageProblem("--init-from: a resumed run goes on with its own weights", "Give --resume or --init-from.")
    files, named = _locate(config, request)
    vocabulary_size = _vocabulary_of(files.path if files.exists() else request.init_from)
    parts = build_parts(config, backend=request.backend, vocabulary_size=vocabulary_size)
    identity = run_identity(config, parts.data)
    if not files.exists():
        _create(files, config, parts, request)
    with ExitStack() as stack:
        stack.enter_context(files.locked())
        store = CheckpointStore(files.checkpoints, keep=config.checkpoint.keep, faults=request.faults)
        checkpoint = _checkpoint(store, request, named)
        if checkpoint is not None:
            _check_same_run(checkpoint, identity)
        stack.enter_context(use_backend(parts.backend.name))
        stack.enter_context(deterministic_algorithms(config.deterministic))
        available = stack.enter_context(recorded_threads(files.record()))
        log_file = LogFile(files.log_file)
        stack.callback(log_file.close)
        length, step = (0, None) if checkpoint is None else (checkpoint.state["metrics_length"], checkpoint.step)
        metrics = stack.enter_context(MetricsWriter(files.metrics_file, resume_at=length, resume_step=step))
        context = TrainingContext(
            config=config,
            device=parts.device,
            backend=parts.backend,
            model=parts.model,
            data=parts.data,
            masking=parts.masking,
            observers=parts.observers,
            stop=stack.enter_context(StopRequest()),
            files=files,
            logbook=Logbook(metrics, request.reporter(log_file)),
            checkpointer=Checkpointer(store, identity),
            threads_available=available,
        )
        context.note(f"{files.path}: backend {parts.backend.name} ({parts.backend.source}), {parts.device}")
        stack.enter_context(_announce_end(context))
        _begin(context, checkpoint, request)
        del checkpoint  # its optimizer state would stay in memory as long as the run
        yield context


def _create(files: RunDirectory, config: RunConfig, parts: RunParts, request: RunRequest) -> None:
    data = parts.data
    record = {
        "name": config.name,
        "seed": config.seed,
        "device": str(parts.device),
        "backend": {"name": parts.backend.name, "source": parts.backend.source},
        "data": {"name": data.name, "fingerprint": data.fingerprint()},
        "vocabulary_size": parts.vocabulary_size,
        "threads": {"loops": {}, "last": None},
        "versions": versions_of(config, parts.backend.name),
        "init_from": None if request.init_from is None else str(request.init_from),
    }
    files.create(dump_yaml(to_plain(config)), record, data.attachments() if isinstance(data, Attachments) else {})


def _vocabulary_of(path: Path | None) -> int:
    """Ids that the model of a run or checkpoint was built for; 0 where there is none, which others report.

    A published model may have more than its tokenizer, from which the data know theirs.
    """
    directory = None if path is None else run_of(path)
    return 0 if directory is None else int(directory.record()["vocabulary_size"])


@contextmanager
def _announce_end(context: TrainingContext) -> Iterator[None]:
    """Tell the observers how the run ended."""
    reporter = context.logbook.reporter
    try:
        yield
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


def _begin(context: TrainingContext, checkpoint: Checkpoint | None, request: RunRequest) -> None:
    """Start at step 0, or where ``checkpoint`` was written."""
    if checkpoint is None:
        # Whatever a killed attempt left here before its first checkpoint does not count.
        init_from = request.init_from or context.files.record().get("init_from")
        if init_from is not None:
            loaded = load_weights(context.model, Path(init_from), seed=context.seed, options=context.config.model)
            context.note(f"weights from {loaded}")
    else:
        restore_run(context, checkpoint)
    context.observers.call(hookspecs.arb_run_start, context)
    if checkpoint is not None:
        context.observers.call(hookspecs.arb_checkpoint_load, context, checkpoint.state["observers"])
        context.note(f"continuing from {checkpoint.path.name}, step {checkpoint.step}")


def _locate(config: RunConfig, request: RunRequest) -> tuple[RunDirectory, Path | None]:
    """The run's directory, and the checkpoint that the caller named."""
    if request.resume is None:
        return (RunDirectory.unused(config.name) if request.directory is None else _unused(request.directory)), None
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


def _unused(path: Path) -> RunDirectory:
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


def _check_same_run(checkpoint: Checkpoint, identity: Mapping[str, Any]) -> None:
    if "imported" in checkpoint.identity:
        run = checkpoint.path.parent.parent
        raise CheckpointError(
            f"{checkpoint.path}: the model was imported here, and there is no training to go on with",
            f"Start from its weights: arb train {run}/config.yaml --init-from {run} --run-dir {run}-tuned",
        )
    if lines := differences(checkpoint.identity, identity):
        raise CheckpointError(
            f"{checkpoint.path}: it belongs to another run: {len(lines)} settings differ",
            "\n".join(
                [*lines[:8], "Resume with the run's own config.yaml; to start anew from its weights use --init-from."]
            ),
        )


def _finish(context: TrainingContext) -> RunReport:
    """Evaluate, run the checks, write ``result.json``."""
    options = context.config.phases[-1].options
    phases = [phase.options for phase in context.config.phases]
    untouched = all(isinstance(each, LeavesModel) and each.leaves_model for each in phases)
    if not untouched and (not isinstance(options, LogOptions) or options.eval_every):
        context.evaluate_at_end()
    results: list[tuple[str, CheckResult]] = []
    for choice in context.config.checks:
        check: Check = require_protocol(choice.build(), Check, choice)
        result = check.check(context)
        results.append((choice.name, result))
        context.note(f"check {choice.name}: {result.verdict}: {result.summary}")
    report = make_report(context, results)
    try:
        write_json(context.files.result_file, report.to_json())
    except OSError as error:
        raise ArbError(f"{context.files.result_file}: cannot be written: {error}") from error
    return report
