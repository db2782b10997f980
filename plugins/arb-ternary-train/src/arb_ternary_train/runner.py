"""From a config to a trained model: build, restore, run the phases, judge, report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from arb_ternary import hookspecs
from arb_ternary.backends.select import use_backend
from arb_ternary.config.errors import raise_faults
from arb_ternary.config.fields import to_plain
from arb_ternary.config.yaml_document import dump_yaml
from arb_ternary.errors import ArbError, CheckpointError, Interrupted, UsageProblem
from arb_ternary_train.auto_options import CHOSEN, ResolvedConfig, resolve_auto_options
from arb_ternary_train.build import (
    RunParts,
    build_parts,
    build_phase,
    require_protocol,
    versions_of,
)
from arb_ternary_train.checkpoint import Checkpoint, CheckpointStore, no_fault, read_checkpoint
from arb_ternary_train.checkpointer import Checkpointer, restore_run
from arb_ternary_train.combinations import find_contradictions
from arb_ternary_train.config import RunConfig
from arb_ternary_train.context import TrainingContext
from arb_ternary_train.directory import RunDirectory, write_json
from arb_ternary_train.evaluate import loss_unit_of, prediction_name
from arb_ternary_train.exact_arithmetic import exact_arithmetic
from arb_ternary_train.fine_tuning import check_patterns
from arb_ternary_train.identity import differences, run_identity
from arb_ternary_train.init_from import load_weights, run_of
from arb_ternary_train.logbook import Logbook
from arb_ternary_train.metrics import MetricsWriter, NoMetrics
from arb_ternary_train.observers import RunObservers
from arb_ternary_train.precision import resolve_device
from arb_ternary_train.progress import LogFile, Reporter, Silent, make_reporter
from arb_ternary_train.protocols import Attachments, Check, CheckResult
from arb_ternary_train.report import RunReport, make_report
from arb_ternary_train.restarts import restart_memory
from arb_ternary_train.seeding import deterministic_algorithms
from arb_ternary_train.signals import StopRequest
from arb_ternary_train.standard import LogOptions
from arb_ternary_train.threads import recorded_threads
from arb_ternary_train.world import World, init_world


@frozen(kw_only=True)
class RunRequest:
    """What the caller of :func:`train` wants beside the config.

    Attributes:
        directory: where to write; None = ``runs/<name>``, made unique, or the newest of them on a
            resume.
        resume: None = a new run; ``"auto"`` = from the newest good checkpoint, or from the start
            where there is none yet; a path = from that checkpoint, or from the newest of that run
            directory, or not at all.
        init_from: run directory or checkpoint whose weights the run starts from.
        init_skip: patterns of names of modules or tensors that ``init_from`` does not give: they
            stay as they were made, for the vocabulary of the data, and may have other shapes.
        backend: kernel backend, over what the environment and the config say.
        reporter: what a person sees; by default a progress bar on a terminal and plain lines
            elsewhere.
        faults: see ``CheckpointStore``.
        world: the processes that train together, on the run's device; None = those that a launcher
            has started.
    """

    directory: Path | None = None
    resume: str | Path | None = None
    init_from: Path | None = None
    init_skip: tuple[str, ...] = ()
    backend: str | None = None
    reporter: Callable[[LogFile], Reporter] = make_reporter
    faults: Callable[[str], None] = no_fault
    world: World | None = None


def train(config: RunConfig, request: RunRequest | None = None) -> RunReport:
    """Run ``config``; returns the report of the finished run, the same on all ranks.

    Raises:
        Interrupted: SIGINT or SIGTERM came; a checkpoint has been saved.
        ArbError: anything that the user can act on; a failed check does not raise, see
            ``RunReport.failed_checks``.
    """
    with _open_run(config, RunRequest() if request is None else request) as context:
        while context.phase_index < len(config.phases):
            phase = context.phase or build_phase(config, context.phase_index)
            context.enter_phase(phase)
            if context.world.runs_on_every_rank(config.phases[context.phase_index].options):
                result = phase.run(context)
            else:
                result = context.world.run_phase_on_main(phase, context)
            context.leave_phase(phase, result)
            context.stop_if_requested()
        return _finish(context)


@contextmanager
def _open_run(config: RunConfig, request: RunRequest) -> Iterator[TrainingContext]:
    """The run, built anew or restored; observers hear of its end, whatever that is."""
    if faults := find_contradictions(config):  # a config that was made in Python has not been asked
        raise_faults(faults, {}, config.name)
    if request.resume is not None and request.init_from is not None:
        raise UsageProblem(
            "--init-from: a resumed run goes on with its own weights",
            "Give --resume or --init-from.",
        )
    if request.init_skip and request.init_from is None:
        raise UsageProblem(
            "--init-skip: it says what --init-from does not give",
            "Give --init-from RUN too; a resumed run keeps what it began with.",
        )
    with ExitStack() as stack:
        world = request.world
        if world is None:
            world = stack.enter_context(init_world(config.device))
        world.check_config(config)
        request = _as_restarted(request, world)
        files, named = _located(config, request, world)
        exists = world.run_on_main(files.exists)
        resolved = resolve_auto_options(
            config, world.run_on_main(lambda: files.record().get(CHOSEN, {})) if exists else {}
        )
        if resolved.plan is not None and request.init_from is not None:
            raise UsageProblem(
                f"--init-from: {', '.join(resolved.record())} is auto, which is for weights drawn "
                f"at random",
                "Give the rate as a number, such as a fifth of the one that the weights were "
                "trained with.",
            )
        config = resolved.config
        # What is skipped may be a head for other classes, so that the data alone say how many there
        # are.
        model_from = files.path if exists else None if request.init_skip else request.init_from
        size = world.run_on_main(lambda: _vocabulary_of(model_from))
        parts = build_parts(
            config, backend=request.backend, vocabulary_size=size, device=world.device
        )
        world.check_parts(config, parts)
        check_patterns(config, parts.model)
        identity = run_identity(config, parts.data)
        if not exists:
            world.run_on_main(lambda: _create(files, resolved, parts, request))
        world.run_on_main(lambda: stack.enter_context(files.locked()))
        store = CheckpointStore(
            files.checkpoints, keep=config.checkpoint.keep, faults=request.faults
        )
        checkpoint = _checkpoint(store, request, named, world)
        if checkpoint is not None:
            _check_same_run(checkpoint, identity)
            world.check_checkpoint(checkpoint)
        stack.enter_context(use_backend(parts.backend.name))
        stack.enter_context(deterministic_algorithms(config.deterministic))
        stack.enter_context(exact_arithmetic(config.exact))
        available = stack.enter_context(recorded_threads(world.run_on_main(files.record)))
        context = TrainingContext(
            config=config,
            device=parts.device,
            backend=parts.backend,
            model=parts.model,
            data=parts.data,
            masking=parts.masking,
            observers=parts.observers if world.is_main else RunObservers({}),
            stop=stack.enter_context(StopRequest()),
            files=files,
            logbook=stack.enter_context(
                _logbook(files, checkpoint, request, world, prediction_name(parts.data))
            ),
            checkpointer=Checkpointer(store, identity),
            threads_available=available,
            world=world,
        )
        ranks = f", {world.size} ranks" if world.size > 1 else ""
        context.note(
            f"{files.path}: backend {parts.backend.name} ({parts.backend.source}), "
            f"{parts.device}{ranks}"
        )
        for line in resolved.notes():
            context.note(line)
        stack.enter_context(_announce_end(context))
        _begin(context, checkpoint, request)
        del checkpoint  # its optimizer state would stay in memory as long as the run
        _shard_weights(context)
        yield context


@contextmanager
def _logbook(
    files: RunDirectory, checkpoint: Checkpoint | None, request: RunRequest, world: World, noun: str
) -> Iterator[Logbook]:
    """The run's log, screen and metrics; on other ranks than 0 those that write nothing."""
    if not world.is_main:
        yield Logbook(NoMetrics(), Silent())
        return
    length, step = (
        (0, None) if checkpoint is None else (checkpoint.state["metrics_length"], checkpoint.step)
    )
    log_file = LogFile(files.log_file)
    try:
        with MetricsWriter(files.metrics_file, resume_at=length, resume_step=step) as metrics:
            yield Logbook(metrics, request.reporter(log_file), noun)
    finally:
        log_file.close()


def _as_restarted(request: RunRequest, world: World) -> RunRequest:
    """``request``; where a launcher has started the ranks anew, to go on with what they had begun.

    When a machine comes or goes, torchrun does so without counting it as a restart. What was
    refused had not begun.
    """

    def recall() -> tuple[str | None, int]:
        memory = restart_memory()
        return memory.begin_run(), memory.restarts

    begun, restarts = world.run_on_main(recall)
    if begun:
        return evolve(request, directory=Path(begun), resume="auto")
    unknown = begun is None and restarts > 0
    if unknown and request.directory is not None and request.resume is None:
        return evolve(request, resume="auto")
    return request


def _create(
    files: RunDirectory, resolved: ResolvedConfig, parts: RunParts, request: RunRequest
) -> None:
    config = resolved.config
    data = parts.data
    record: dict[str, Any] = {
        "name": config.name,
        "seed": config.seed,
        "device": str(resolve_device(config.device)),
        "backend": {"name": parts.backend.name, "source": parts.backend.source},
        "data": {"name": data.name, "fingerprint": data.fingerprint()},
        "vocabulary_size": parts.vocabulary_size,
        "loss_unit": loss_unit_of(data, parts.masking),
        "prediction_noun": prediction_name(data),
        "threads": {"loops": {}, "last": None},
        "versions": versions_of(config, parts.backend.name),
        "init_from": None if request.init_from is None else str(request.init_from),
        **({"init_skip": [*request.init_skip]} if request.init_skip else {}),
        **({CHOSEN: resolved.record()} if resolved.chosen else {}),
    }
    files.create(
        dump_yaml(to_plain(config)),
        record,
        data.attachments() if isinstance(data, Attachments) else {},
    )


def _vocabulary_of(path: Path | None) -> int:
    """Ids that the model of a run or checkpoint was built for; 0 where there is none, which others
    report.

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
            context.tell(hookspecs.arb_run_end, context, status)
        except ArbError as further:  # what ended the run matters more
            reporter.note(further.what)
        raise
    reporter.stop()
    context.tell(hookspecs.arb_run_end, context, "finished")


def _begin(context: TrainingContext, checkpoint: Checkpoint | None, request: RunRequest) -> None:
    """Start at step 0, or where ``checkpoint`` was written."""
    if checkpoint is None:
        # Whatever a killed attempt left here before its first checkpoint does not count.
        record = context.world.run_on_main(context.files.record)
        init_from = record.get("init_from")
        skip = record.get("init_skip", ())
        if init_from is not None:
            model = context.config.model
            loaded = load_weights(
                context.model, Path(init_from), seed=context.seed, options=model, skip=skip
            )
            context.note(
                f"weights from {loaded}" + (f", but for {', '.join(skip)}" if skip else "")
            )
    else:
        restore_run(context, checkpoint)
    context.tell(hookspecs.arb_run_start, context)
    if checkpoint is not None:
        context.tell(hookspecs.arb_checkpoint_load, context, checkpoint.state["observers"])
        context.note(f"continuing from {checkpoint.path.name}, step {checkpoint.step}")


def _shard_weights(context: TrainingContext) -> None:
    replicated = context.world.shard_weights(context.model, context.config.ranks)
    if replicated:
        context.note(
            f"ranks.weights: backend {context.backend.name} packs {len(replicated)} weights in "
            "tiles that do not end where the rows of a rank do; they stay replicated: "
            f"{', '.join(replicated[:4])}{', ...' if replicated[4:] else ''}"
        )


def _located(
    config: RunConfig, request: RunRequest, world: World
) -> tuple[RunDirectory, Path | None]:
    """As :func:`_locate` on rank 0 says."""

    def locate() -> tuple[str, str | None]:
        files, named = _locate(config, request)
        # until the checkpoints after a named one are set aside, a restart begins as this one
        if named is None:
            restart_memory().store_directory(str(files.path))
        return str(files.path), None if named is None else str(named)

    path, named = world.run_on_main(locate)
    return RunDirectory(Path(path)), None if named is None else Path(named)


def _locate(config: RunConfig, request: RunRequest) -> tuple[RunDirectory, Path | None]:
    """The run's directory, and the checkpoint that the caller named."""
    if request.resume is None:
        return (
            RunDirectory.unused(config.name)
            if request.directory is None
            else _unused(request.directory)
        ), None
    if request.resume == "auto":
        if request.directory is not None:
            return RunDirectory(request.directory), None
        return RunDirectory.newest(config.name) or RunDirectory.unused(config.name), None
    path = Path(request.resume)
    if RunDirectory(path).exists():
        directory = RunDirectory.existing(path)
        named = CheckpointStore(RunDirectory(path).checkpoints).latest()
    else:
        if not path.is_dir():
            raise CheckpointError(
                f"{path}: there is no checkpoint folder and no run directory of this name"
            )
        directory = RunDirectory.existing(path.resolve().parent.parent)
        named = path
    if request.directory is not None and request.directory.resolve() != directory.path.resolve():
        raise UsageProblem(
            f"--resume {path}: that checkpoint belongs to {directory.path}, not to "
            f"{request.directory}",
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


def _checkpoint(
    store: CheckpointStore, request: RunRequest, named: Path | None, world: World
) -> Checkpoint | None:
    """The checkpoint to go on from, if any; rank 0 chooses it, and sets others aside."""
    if request.resume is None:
        return None
    read: list[Checkpoint] = []

    def choose() -> str | None:
        checkpoint = store.newest_good()[0] if named is None else read_checkpoint(named)
        if checkpoint is None:
            return None
        if named is not None:
            store.set_aside_newer(named)
            restart_memory().store_directory(str(store.root.parent))
        read.append(checkpoint)
        return str(checkpoint.path)

    path = world.run_on_main(choose)
    if path is None or read:
        return read[0] if read else None
    return read_checkpoint(Path(path))


def _check_same_run(checkpoint: Checkpoint, identity: Mapping[str, Any]) -> None:
    if "imported" in checkpoint.identity:
        run = checkpoint.path.parent.parent
        raise CheckpointError(
            f"{checkpoint.path}: the model was imported here, and there is no training to go on "
            f"with",
            f"Start from its weights: arb train {run}/config.yaml --init-from {run} --run-dir "
            f"{run}-tuned",
        )
    if lines := differences(checkpoint.identity, identity):
        raise CheckpointError(
            f"{checkpoint.path}: it belongs to another run: {len(lines)} settings differ",
            "\n".join(
                [
                    *lines[:8],
                    "Resume with the run's own config.yaml; to start anew from its weights use "
                    "--init-from.",
                ]
            ),
        )


def _finish(context: TrainingContext) -> RunReport:
    """Evaluate; rank 0 runs the checks and writes ``result.json``."""
    options = context.config.phases[-1].options
    phases = [phase.options for phase in context.config.phases]
    untouched = all(getattr(each, "no_training", False) for each in phases)
    if not untouched and (not isinstance(options, LogOptions) or options.eval_every):
        context.evaluate_at_end()
    context.world.gather_full(context.model, context.optimizer)
    report: RunReport = context.world.run_on_main(lambda: _judge(context))
    return report


def _judge(context: TrainingContext) -> RunReport:
    results: list[tuple[str, CheckResult]] = []
    for choice in context.config.checks:
        check: Check = require_protocol(choice.build(), Check, choice)
        with context.main_process_only():
            result = check.check(context)
        results.append((choice.name, result))
        context.note(f"check {choice.name}: {result.verdict}: {result.summary}")
    report = make_report(context, results)
    try:
        write_json(context.files.result_file, report.to_json())
    except OSError as error:
        raise ArbError(f"{context.files.result_file}: cannot be written: {error}") from error
    return report
