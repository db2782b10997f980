"""From a config to a trained model: build or restore, run the phases, judge, report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from arb_ternary import hookspecs
from arb_ternary.backends.select import use_backend
from arb_ternary.config.errors import raise_faults
from arb_ternary.config.fields import to_plain
from arb_ternary.config.yaml_document import dump_yaml
from arb_ternary.errors import ArbError, Interrupted, UsageProblem
from arb_ternary_train.auto_rate import CHOSEN, ResolvedConfig, resolve_auto_rate
from arb_ternary_train.build import (
    RunParts,
    build_parts,
    build_phase,
    require_protocol,
    versions_of,
)
from arb_ternary_train.capabilities import attachments
from arb_ternary_train.checkpoint import Checkpoint, CheckpointStore, no_fault
from arb_ternary_train.combinations import find_contradictions, policy_notes
from arb_ternary_train.config import RunConfig
from arb_ternary_train.context import TrainingContext
from arb_ternary_train.directory import RunDirectory, write_json
from arb_ternary_train.evaluate import loss_unit_of, prediction_name
from arb_ternary_train.exact_arithmetic import exact_arithmetic
from arb_ternary_train.fine_tuning import check_patterns
from arb_ternary_train.identity import run_identity
from arb_ternary_train.logbook import Logbook
from arb_ternary_train.machine import processor_name
from arb_ternary_train.memory import check_batches_fit
from arb_ternary_train.metrics import MetricsWriter, NoMetrics
from arb_ternary_train.model_state import load_weights, run_of
from arb_ternary_train.observers import RunObservers
from arb_ternary_train.precision import resolve_device
from arb_ternary_train.progress import LogFile, Silent, make_reporter
from arb_ternary_train.protocols import Check, CheckResult
from arb_ternary_train.report import RunReport, make_report
from arb_ternary_train.resume import (
    after_restart,
    check_same_run,
    choose_checkpoint,
    locate_run,
)
from arb_ternary_train.run_state import Checkpointer, RunState
from arb_ternary_train.seeding import deterministic_algorithms
from arb_ternary_train.signals import StopRequest
from arb_ternary_train.threads import recorded_threads
from arb_ternary_train.world import World, init_world

#: How many names of modules a note lists.
_LISTED: Final = 4


@frozen(kw_only=True)
class RunRequest:
    """Requests of the caller of :func:`train`, besides the config.

    Attributes:
        directory: where to write; None = ``runs/<name>``, made unique, or the newest of them on a
            resume.
        resume: None = a new run; ``"auto"`` = from the newest good checkpoint, or from the start if
            there is none yet; a path = from that checkpoint, or from the newest checkpoint of that
            run directory.
        restart: begin anew, and set the directory aside as a whole if a run was started there.
        init_from: run directory or checkpoint whose weights the run starts from.
        init_skip: patterns of names of modules or tensors that are not taken from ``init_from``.
            They keep their initialisation, have the size of the data's vocabulary, and may have
            other shapes than in ``init_from``.
        backend: kernel backend; overrides environment and config.
        reporter: makes what a person sees; by default a progress bar on a terminal and plain lines
            elsewhere.
        faults: see ``CheckpointStore``.
        world: the processes that train together, on the run's device; None = the processes that a
            launcher has started.
    """

    directory: Path | None = None
    resume: str | Path | None = None
    restart: bool = False
    init_from: Path | None = None
    init_skip: tuple[str, ...] = ()
    backend: str | None = None
    reporter: Callable[[LogFile], Silent] = make_reporter
    faults: Callable[[str], None] = no_fault
    world: World | None = None

    def check(self) -> None:
        """Check that the options do not contradict each other.

        Raises:
            UsageProblem: they do.
        """
        if self.resume is not None and self.restart:
            raise UsageProblem(
                "--restart cannot be combined with --resume: one begins anew, the other continues",
                "Give --resume or --restart.",
            )
        if self.resume is not None and self.init_from is not None:
            raise UsageProblem(
                "--init-from cannot be combined with --resume: a resumed run continues with its "
                "own weights",
                "Give --resume or --init-from.",
            )
        if self.init_skip and self.init_from is None:
            raise UsageProblem(
                "--init-skip needs --init-from: it names what is not taken from there",
                "Give --init-from RUN too; a resumed run keeps what it began with.",
            )


def train(config: RunConfig, request: RunRequest | None = None) -> RunReport:
    """Run ``config`` and return the report of the finished run, the same on all ranks.

    Raises:
        Interrupted: SIGINT or SIGTERM came; a checkpoint has been saved.
        ArbError: anything that the user can act on. A failed check does not raise; see
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
    """Build or restore the run, and tell observers how it ends."""
    # A config that was made in Python has not been checked.
    faults = find_contradictions(config)
    if faults:
        raise_faults(faults, {}, config.name)
    request.check()

    with ExitStack() as stack:
        world = request.world
        if world is None:
            world = stack.enter_context(init_world(config.device))
        world.check_config(config)

        # Where the run is, and what its config says in full.
        request = after_restart(request, world)
        files, named = locate_run(config, request, world)
        exists = world.run_on_main(files.exists)
        recorded = world.run_on_main(lambda: files.record().get(CHOSEN, {})) if exists else {}
        resolved = resolve_auto_rate(config, recorded)
        if resolved.chosen and request.init_from is not None:
            raise UsageProblem(
                f"--init-from cannot be combined with `{', '.join(resolved.chosen)}: auto`, "
                f"which is calibrated for random initialisation",
                "Set a number, such as a fifth of the rate that the weights were trained with.",
            )
        config = resolved.config

        # Device, backend, data, model.
        size = world.run_on_main(lambda: _least_vocabulary(files if exists else None, request))
        parts = build_parts(
            config, backend=request.backend, vocabulary_size=size, device=world.device
        )
        world.check_parts(config, parts)
        check_batches_fit(config, parts.device)
        check_patterns(config, parts.model)

        # The run directory, and the checkpoint to continue from.
        identity = run_identity(config, parts.data)
        if not exists:
            world.run_on_main(lambda: _create(files, resolved, parts, request))
        world.run_on_main(lambda: stack.enter_context(files.locked()))
        store = CheckpointStore(
            files.checkpoints, keep=config.checkpoint.keep, faults=request.faults
        )
        checkpoint = choose_checkpoint(store, request, named, world)
        length = None
        if checkpoint is not None:
            length = check_same_run(checkpoint, identity, config)
            if length is not None:
                text = dump_yaml(to_plain(config))
                world.run_on_main(lambda: files.change_length(text))

        # Global settings, and what the run writes to.
        stack.enter_context(use_backend(parts.backend.name))
        stack.enter_context(deterministic_algorithms(config.deterministic))
        stack.enter_context(exact_arithmetic(config.exact))
        threads = stack.enter_context(recorded_threads(world.run_on_main(files.record)))
        stop = stack.enter_context(StopRequest())
        name = prediction_name(parts.data)
        logbook = stack.enter_context(_logbook(files, checkpoint, request, world, name))

        context = TrainingContext(
            config=config,
            device=parts.device,
            backend=parts.backend,
            model=parts.model,
            data=parts.data,
            masking=parts.masking,
            observers=parts.observers if world.is_main else RunObservers({}),
            stop=stop,
            files=files,
            logbook=logbook,
            checkpointer=Checkpointer(store, identity),
            threads_available=threads,
            world=world,
        )
        ranks = f", {world.size} ranks" if world.size > 1 else ""
        context.note(
            f"{files.path}: backend {parts.backend.name} ({parts.backend.source}), "
            f"{parts.device}{ranks}"
        )
        for line in [*resolved.notes, *policy_notes(config)]:
            context.note(line)
        stack.enter_context(_announce_end(context))
        _begin(context, checkpoint)
        if length is not None:
            _change_length(context, length)
        # The optimizer state in it would stay in memory as long as the run.
        del checkpoint
        yield context


def _least_vocabulary(files: RunDirectory | None, request: RunRequest) -> int:
    """Return the least number of ids of the model; 0 if the data alone decide.

    A published model may have more ids than its tokenizer, from which the data know theirs.

    Args:
        files: the run, if it exists.
        request: what is asked for.
    """
    if files is None:
        # What is skipped may be a head for other classes.
        source = None if request.init_skip else request.init_from
        files = None if source is None else run_of(source)
    return 0 if files is None else int(files.record()["vocabulary_size"])


def _create(
    files: RunDirectory, resolved: ResolvedConfig, parts: RunParts, request: RunRequest
) -> None:
    """Create the run directory."""
    config = resolved.config
    data = parts.data
    device = resolve_device(config.device)
    record: dict[str, Any] = {
        "name": config.name,
        "seed": config.seed,
        "device": str(device),
        "processor": processor_name(device),
        "backend": {"name": parts.backend.name, "source": parts.backend.source},
        "data": {"name": data.name, "fingerprint": data.fingerprint()},
        "vocabulary_size": parts.vocabulary_size,
        "loss_unit": loss_unit_of(data, parts.masking),
        "prediction_noun": prediction_name(data),
        "threads": {"loops": {}, "last": None},
        "versions": versions_of(config, parts.backend.name),
        "init_from": None if request.init_from is None else str(request.init_from),
    }
    if request.init_skip:
        record["init_skip"] = [*request.init_skip]
    if resolved.chosen:
        record[CHOSEN] = dict(resolved.chosen)
    files.create(dump_yaml(to_plain(config)), record, attachments(data))


@contextmanager
def _logbook(
    files: RunDirectory, checkpoint: Checkpoint | None, request: RunRequest, world: World, noun: str
) -> Iterator[Logbook]:
    """Open log, screen and metrics of the run; ranks other than 0 write nothing."""
    if not world.is_main:
        yield Logbook(NoMetrics(), Silent())
        return
    length = 0
    step = None
    if checkpoint is None:
        files.keep_metrics()
    else:
        length = RunState.of(checkpoint).metrics_length
        step = checkpoint.step
    log_file = LogFile(files.log_file)
    try:
        with MetricsWriter(files.metrics_file, resume_at=length, resume_step=step) as metrics:
            yield Logbook(metrics, request.reporter(log_file), noun)
    finally:
        log_file.close()


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
        except ArbError as further:
            # What ended the run matters more.
            reporter.note(further.what)
        raise
    reporter.stop()
    context.tell(hookspecs.arb_run_end, context, "finished")


def _begin(context: TrainingContext, checkpoint: Checkpoint | None) -> None:
    """Start at step 0, or continue from ``checkpoint``."""
    if checkpoint is None:
        _load_initial_weights(context)
        context.tell(hookspecs.arb_run_start, context)
        return
    state = RunState.of(checkpoint)
    state.restore(context, checkpoint)
    context.tell(hookspecs.arb_run_start, context)
    context.tell(hookspecs.arb_checkpoint_load, context, state.observers)
    context.note(f"continuing from {checkpoint.path.name}, step {checkpoint.step}")


def _change_length(context: TrainingContext, before: int) -> None:
    """Note that the last phase had ``before`` steps, and do what its last step left out."""
    options: Any = context.config.phases[-1].options
    context.note(f"continuing to step {options.steps:,} instead of {before:,}")
    done = context.step - sum(result.steps for result in context.finished)
    # The evaluation of a last step is part of that at the end of the run.
    if done == before and options.eval_every and done % options.eval_every == 0:
        context.unfinished_evaluation = [options.eval_batches]


def _load_initial_weights(context: TrainingContext) -> None:
    """Load the weights that the run was begun with, if it was begun with those of another run."""
    # Whatever a killed attempt left here before its first checkpoint does not count: the record
    # says what the run began with.
    record = context.world.run_on_main(context.files.record)
    source = record.get("init_from")
    skip = record.get("init_skip", ())
    if source is None:
        return
    loaded = load_weights(
        context.model,
        Path(source),
        seed=context.seed,
        options=context.config.model,
        skip=skip,
    )
    without = f", but for {', '.join(skip)}" if skip else ""
    context.note(f"weights from {loaded}{without}")


def _finish(context: TrainingContext) -> RunReport:
    """Evaluate; rank 0 runs the checks and writes ``result.json``."""
    phases = [phase.options for phase in context.config.phases]
    trains = not all(getattr(options, "no_training", False) for options in phases)
    if trains and getattr(phases[-1], "eval_every", True):
        context.evaluate_at_end()
    context.world.gather_full(context.model, context.optimizer)
    report: RunReport = context.world.run_on_main(lambda: _judge(context))
    return report


def _judge(context: TrainingContext) -> RunReport:
    """Run the checks, and write and return the report."""
    results: list[tuple[str, CheckResult]] = []
    for choice in context.config.checks:
        check: Check = require_protocol(choice.build(), Check, choice)
        with context.main_process_only():
            result = check.check(context)
        results.append((choice.name, result))
        context.note(f"check {choice.name}: {result.verdict}: {result.summary}")
    report = make_report(context, results)
    write_json(context.files.result_file, report.to_json())
    return report
