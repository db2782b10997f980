"""Fine-tune a language model on conversations: import, train, evaluate, export.

Everything lies in one directory, and every step of it is whole or not there, so that the same call
goes on after any kill:

``start/``      the run that the training starts from; only if the source is no run
``config.yaml`` the config; ``arb train`` can repeat the training with it
``before.json`` the loss on held-out conversations before training
``run/``        the training
``model.gguf``, ``hf/``  the model in the format that the source had
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import attrs
import torch
from attrs import frozen

from arb_ternary.backends.select import use_backend
from arb_ternary.config.fields import to_plain
from arb_ternary.config.yaml_document import dump_yaml
from arb_ternary.errors import DataError, UsageProblem
from arb_ternary.optim.protocol import collect_trainable
from arb_ternary.protocols.data import Batch, BatchRequest, DataSource, MaskContext, MaskingStrategy
from arb_ternary.ternary.models import ternary_modules
from arb_ternary_interchange.export import export_model
from arb_ternary_interchange.huggingface.folder import WeightFiles, model_folder
from arb_ternary_interchange.importing import find_source, import_model
from arb_ternary_text.chat.source import ChatConfig, ChatSource
from arb_ternary_text.chat.source import build as build_chat
from arb_ternary_text.data.tokenizers import from_json, special_tokens
from arb_ternary_train.audit import audit
from arb_ternary_train.build import require_protocol
from arb_ternary_train.capabilities import checkpoints_activations, max_length
from arb_ternary_train.config import RunConfig
from arb_ternary_train.directory import RunDirectory, write_json
from arb_ternary_train.evaluate import Evaluation, evaluate, forward_arguments, masked_loss
from arb_ternary_train.fine_tuning import frozen_at_first
from arb_ternary_train.loading import load_config
from arb_ternary_train.model_options import apply_model_options
from arb_ternary_train.model_state import run_of
from arb_ternary_train.part_names import is_named
from arb_ternary_train.progress import format_bytes, format_duration
from arb_ternary_train.report import RunReport
from arb_ternary_train.restore import TrainedRun, load_run
from arb_ternary_train.runner import RunRequest, train
from arb_ternary_train.seeding import derived_generator

Method = Literal["votes", "votes+float-ends"]

#: Rates of fine-tuning: of votes, half of that of training from random weights.
_VOTE_RATE: Final = 0.05
_FLOAT_RATE: Final = 2e-4
#: Weights from which on a step is one row, and activations are computed again in backward.
_LARGE: Final = 100_000_000
#: Longest row that is chosen without being asked for.
_LONGEST_ROW: Final = 1024
_EXPORTS: Final = {"gguf": ("gguf", "model.gguf"), "hf": ("hf", "hf")}


@frozen(kw_only=True)
class FineTuning:
    """A model to fine-tune, and how.

    Attributes:
        source: a run, a checkpoint, a GGUF file, a Hugging Face folder, or ``hf://org/name``.
        data: conversations, as the data source ``chat`` takes them.
        out: the directory of everything that is written.
        steps: optimizer steps; None = as many as ``epochs`` take.
        epochs: passes over the conversations.
        lr: rate of the votes; None = 0.05.
        method: ``votes`` trains ternary weights only, ``votes+float-ends`` float parameters too.
        eval_share: share of the conversations that is held out.
        overrides: further settings of the config, ``path=value`` each.
        backend: kernel backend; None = that of the environment, or the best one.
        device: device; None = the CPU.
    """

    source: str
    data: str
    out: Path
    steps: int | None = None
    epochs: float = 1.0
    lr: float | None = None
    method: Method = "votes"
    eval_share: float = 0.05
    overrides: tuple[str, ...] = ()
    backend: str | None = None
    device: str | None = None


@frozen
class Outcome:
    """A finished fine-tuning.

    Attributes:
        before: the evaluation on held-out conversations before training.
        report: the report of the training; None if it was finished by an earlier call.
        after: loss on held-out conversations after training, in nats per learned token.
        exported: where the model was written in the format of the source; None for a run.
    """

    before: Evaluation
    report: RunReport | None
    after: float
    exported: Path | None


def finetune(asked: FineTuning, tell: Callable[[str], None]) -> Outcome:
    """Fine-tune a model, or go on where an earlier call was interrupted.

    Args:
        asked: what to fine-tune, and how.
        tell: called with each sentence for the user.

    Raises:
        UsageProblem: the directory was begun with other settings, or a value is out of range.
        DataError: the source or the conversations cannot be used.
        Interrupted: a signal came; the same call goes on.
    """
    asked.out.mkdir(parents=True, exist_ok=True)
    start, format_name = _starting_run(asked, tell)
    config_file = asked.out / "config.yaml"
    if not config_file.exists():
        draft = config_file.with_name(".config.yaml")
        draft.write_text(dump_yaml(_config(asked, start)), encoding="utf-8")
        draft.write_text(
            dump_yaml(to_plain(load_config(draft, asked.overrides).config)), encoding="utf-8"
        )
        draft.replace(config_file)
    config = load_config(config_file, asked.overrides).config
    _require_same(asked, config, config_file)
    directory = RunDirectory(asked.out / "run")
    before = _before(asked, start, config, directory.exists(), tell)
    report = None
    if not directory.result_file.exists():
        request = RunRequest(
            directory=directory.path,
            init_from=None if directory.exists() else start,
            resume="auto" if directory.exists() else None,
            backend=asked.backend,
        )
        report = train(config, request)
    result = json.loads(directory.result_file.read_text(encoding="utf-8"))
    after = result["validation_loss"]
    tell(f"held-out conversations: loss {before.loss:.4f} before, {after:.4f} after")
    return Outcome(before, report, after, _export(asked, format_name, directory.path, tell))


# --- the run to start from


def _starting_run(asked: FineTuning, tell: Callable[[str], None]) -> tuple[Path, str | None]:
    """Return the run to start from, and the name of the importer of the source; None for a run."""
    path = Path(asked.source)
    if run_of(path) is not None:
        return path, None
    start = asked.out / "start"
    if not RunDirectory(start).exists():
        notes = import_model(find_source(asked.source), start)
        for note in notes:
            tell(f"note: {note}")
    imported = RunDirectory(start).record()["imported"]
    if imported["source"] != asked.source:
        raise UsageProblem(
            f"{start}: it was imported from {imported['source']}, not from {asked.source}",
            "Take another directory: --out DIR.",
        )
    return start, str(imported["importer"])


# --- the config


def _config(asked: FineTuning, start: Path) -> dict[str, Any]:
    """Return the content of the config that is written."""
    run = load_run(start, backend=asked.backend, device=asked.device)
    model = to_plain(run.config.model, given=False)
    tokenizer = run.directory.attachment_file("tokenizer").resolve()
    _check_tokenizer(run, asked.source)
    trainable = collect_trainable(run.model)
    if not trainable.ternary:
        raise UsageProblem(
            f"{asked.source}: none of its weights are ternary, so there is nothing to train by "
            f"votes",
            "Make it ternary first: arb upcycle.",
        )
    votes = {"name": "scaled_votes", "lr": _VOTE_RATE if asked.lr is None else asked.lr}
    optimizer: dict[str, Any] = votes
    phase: dict[str, Any] = {"name": "standard"}
    if asked.method == "votes+float-ends":
        if not trainable.floats:
            raise UsageProblem(
                f"--method votes+float-ends: {asked.source} has no float parameters",
                "Take --method votes.",
            )
        optimizer = {
            "name": "split",
            "ternary": votes,
            "float": {"name": "adamw", "lr": _FLOAT_RATE},
        }
    elif trainable.floats:
        phase["freeze"] = _patterns(trainable.floats, trainable.ternary)
    data = {
        "name": "chat",
        "train": asked.data,
        "validation_fraction": asked.eval_share,
        "tokenizer": str(tokenizer),
        "too_long": "split",
    }
    phase |= _phase(asked, run, data)
    return {
        "name": "finetune",
        "device": asked.device or "cpu",
        "data": data,
        "masking": "answers",
        "model": model,
        "optimizer": optimizer,
        "phases": [phase],
    }


def _patterns(names: Iterable[str], others: Iterable[str]) -> list[str]:
    """Return patterns of ``names``, one for all blocks where it matches none of ``others``."""
    unlike = list(others)
    found = set()
    for name in names:
        pattern = re.sub(r"\.\d+\.", ".*.", name)
        matches = any(is_named(other, [pattern]) for other in unlike)
        found.add(name if matches else pattern)
    return sorted(found)


def _check_tokenizer(run: TrainedRun, source: str) -> None:
    attached = run.directory.attachments()
    if "tokenizer" not in attached:
        raise DataError(f"{source}: there is no tokenizer with it, which conversations need")
    if not special_tokens(from_json(attached["tokenizer"])).eos:
        raise DataError(
            f"{source}: its tokenizer has no end token, so that the model cannot learn to end its "
            f"answers",
            f"Name the ids in {run.directory.attachment_file('tokenizer')}: special.eos.",
        )


def _phase(asked: FineTuning, run: TrainedRun, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return steps and sizes of the training."""
    source = _data_source(data)
    longest = max_length(run.model) or _LONGEST_ROW
    row = min(longest, _LONGEST_ROW)
    # Rows of the longest conversation are enough.
    needed = max(1, source.train.longest - 1)
    row = min(row, 1 << max(5, math.ceil(math.log2(needed))))
    large = audit(run.model).parameters >= _LARGE
    batch = 1 if large else 16
    rows = source.samples_per_epoch(row)
    batch = min(batch, rows)
    steps = asked.steps or max(1, math.ceil(asked.epochs * rows / batch))
    phase: dict[str, Any] = {
        "steps": steps,
        "batch_size": batch,
        "block_size": row,
        "warmup_steps": min(steps // 20, 100),
        "eval_every": max(1, steps // 10),
    }
    if large and checkpoints_activations(run.model):
        phase["activation_checkpointing"] = True
    return phase


def _data_source(section: Mapping[str, Any]) -> ChatSource:
    options = {name: value for name, value in section.items() if name != "name"}
    return build_chat(ChatConfig(**options))


def _require_same(asked: FineTuning, config: RunConfig, file: Path) -> None:
    """Raise UsageProblem if the config of an earlier call has other settings."""
    data: Any = config.data.options
    phase: Any = config.phases[0].options
    optimizer: Any = config.optimizer
    votes = optimizer.options
    is_split = optimizer.name == "split"
    if is_split:
        votes = votes.ternary.options
    pairs: list[tuple[str, Any, Any]] = [
        ("DATA", data.train, asked.data),
        ("--eval-share", data.validation_fraction, asked.eval_share),
        ("--method", "votes+float-ends" if is_split else "votes", asked.method),
    ]
    if asked.steps is not None:
        pairs.append(("--steps", phase.steps, asked.steps))
    if asked.lr is not None:
        pairs.append(("--lr", votes.lr, asked.lr))
    for name, was, now in pairs:
        overridden = bool(asked.overrides)
        if was != now and not overridden:
            raise UsageProblem(
                f"{file}: the fine-tuning was begun with {name} {was}, not {now}",
                "Give the same settings to go on, or another directory: --out DIR.",
            )


# --- before the training


def _before(
    asked: FineTuning,
    start: Path,
    config: RunConfig,
    is_begun: bool,
    tell: Callable[[str], None],
) -> Evaluation:
    """Evaluate the model that the training starts from, and say what the training will take."""
    file = asked.out / "before.json"
    if file.exists():
        return Evaluation(**json.loads(file.read_text(encoding="utf-8")))
    run = load_run(start, backend=asked.backend, device=asked.device, accumulators=True)
    data: DataSource = require_protocol(config.data.build(), DataSource, config.data)
    masking: MaskingStrategy = require_protocol(
        config.masking.build(), MaskingStrategy, config.masking
    )
    phase: Any = config.phases[0].options
    with use_backend(run.backend):
        if not is_begun:
            seconds = _seconds_per_step(run, data, masking, config)
            stored = audit(run.model)
            tell(
                f"{stored.parameters:,} weights, {format_bytes(_nbytes(run))} with all that they "
                f"learn by, besides activations; {phase.steps:,} steps of {phase.batch_size} x "
                f"{phase.block_size} tokens, about {format_duration(phase.steps * seconds)}"
            )
        before = evaluate(
            run.model,
            data,
            masking,
            batch_size=phase.batch_size,
            block_size=phase.block_size,
            batches=None,
            seed=config.seed,
            device=run.device,
        )
    write_json(file, attrs.asdict(before))
    return before


def _seconds_per_step(
    run: TrainedRun, data: DataSource, masking: MaskingStrategy, config: RunConfig
) -> float:
    """Return the time of forward and backward of one step, measured on the model itself.

    The votes that it casts stay in its accumulators: it is used for the evaluation only.
    """
    phase: Any = config.phases[0].options
    request = BatchRequest(phase.batch_size, phase.block_size, seed=0)
    batches = data.batches(request)
    batch: Batch = next(batches)
    batches.close()
    context = MaskContext(step=0, seed=0, vocabulary_size=data.vocabulary_size)
    masked = masking.apply(batch, derived_generator(0, "trial"), context).to(run.device)
    apply_model_options(run.model, phase, run.device)
    run.model.train()
    for _, module in ternary_modules(run.model):
        module.undoable = False
    started = time.perf_counter()
    with frozen_at_first(config, run.model), torch.enable_grad():
        output = run.model(masked.inputs, **forward_arguments(run.model, masked))
        masked_loss(output, masked, masking).backward()  # type: ignore[no-untyped-call]
    seconds = time.perf_counter() - started
    run.model.eval()
    run.model.zero_grad(set_to_none=True)
    return seconds * float(phase.gradient_accumulation_steps)


def _nbytes(run: TrainedRun) -> int:
    return sum(tensor.nbytes for tensor in (*run.model.parameters(), *run.model.buffers()))


# --- after the training


def _export(
    asked: FineTuning, format_name: str | None, run: Path, tell: Callable[[str], None]
) -> Path | None:
    """Write the model in the format that the source had."""
    if format_name not in _EXPORTS:
        return None
    exporter, name = _EXPORTS[format_name]
    destination = asked.out / name
    if not destination.exists():
        options = ["layout=packed"] if exporter == "hf" and _is_packed(asked.source) else []
        exported = export_model(run, destination, exporter, options)
        for note in exported.notes:
            tell(f"note: {note}")
        tell(f"{destination}: {exported.summary}")
    return destination


def _is_packed(source: str) -> bool:
    """Return whether the model folder of ``source`` has four trits per byte."""
    return WeightFiles.open(model_folder(find_source(source).path)).is_packed
