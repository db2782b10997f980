"""A study of the quality bench: tune every recipe alike, then train each with every seed.

The settings of a recipe are chosen on the end of the training text; the validation text is read by
the final runs only. Everything that a study knows lies in its folder, so that the same command
continues one that was killed:

==================  ==============================================================
``study.json``      size and tokens; another study is refused
``trials/``         the outcome of every finished run, with a digest of its config
``configs/``        the config file of every run
``runs/``           directories and logs of the runs; checkpoints while they last
``result.json``     all of it, once every run has finished
``table.md``        the same as a table
``loss.png``        held-out loss over tokens
``frontier.png``    loss over bits of training state
==================  ==============================================================
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import field, frozen

from arb_ternary.errors import ArbError, UsageProblem
from arb_ternary.plugins.manager import manager
from arb_ternary_bench.compare import machine_facts
from arb_ternary_bench.quality.figures import draw_frontier, draw_losses
from arb_ternary_bench.quality.outcomes import loss_of
from arb_ternary_bench.quality.pool import Pool
from arb_ternary_bench.quality.protocol import TRIALS
from arb_ternary_bench.quality.result import make_result, markdown
from arb_ternary_bench.quality.sizes import STEP_TOKENS, QualitySize
from arb_ternary_bench.quality.trials import Trial, final_trials, tuning_trials
from arb_ternary_train.directory import locked, write_json
from arb_ternary_train.progress import format_duration
from arb_ternary_train.signals import StopRequest


def _whole_steps(tokens: int) -> int:
    return tokens // STEP_TOKENS * STEP_TOKENS


@frozen(kw_only=True)
class QualityStudy:
    """What to measure. Tokens are rounded down to whole optimizer steps.

    Attributes:
        folder: where everything goes.
        rules: names of the recipes.
        size: of the model.
        seeds: the final runs have the seeds 0 .. ``seeds`` - 1.
        tokens: of a final run.
        tuning_tokens: of a tuning run.
        jobs: processes at once; they share the processor's cores.
    """

    folder: Path
    rules: tuple[str, ...]
    size: QualitySize
    seeds: int = 3
    tokens: int = field(converter=_whole_steps)
    tuning_tokens: int = field(converter=_whole_steps)
    jobs: int = 1

    @property
    def threads(self) -> int:
        """Threads of each process."""
        return max(1, (os.cpu_count() or 1) // self.jobs)

    def identity(self) -> dict[str, Any]:
        """What a study in the same folder must agree with."""
        return {"size": self.size.name, "tokens": self.tokens, "tuning_tokens": self.tuning_tokens}


def choose(losses: Sequence[float]) -> int | None:
    """The index of the least loss, the first of equals; None where no loss is finite."""
    best = min(range(len(losses)), key=lambda index: losses[index])
    return best if losses[best] < float("inf") else None


def run_study(study: QualityStudy, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Carry out ``study``, or what is left of it; returns the content of its ``result.json``.

    Raises:
        UsageProblem: a study with other settings is in the folder, or another process works there,
            or there are fewer tokens than one step takes, or there is no such recipe.
        Interrupted: SIGINT or SIGTERM came; the runs under way have saved a checkpoint.
        ArbError: a run could not be carried out.
    """
    for name in ("tokens", "tuning_tokens"):
        if getattr(study, name) < STEP_TOKENS:
            raise UsageProblem(
                f"--{name.replace('_', '-')}: an optimizer step alone takes {STEP_TOKENS} tokens"
            )
    # Every config is checked before anything runs.
    tuning = tuning_trials(study.size, study.rules, study.tuning_tokens)
    for number in range(TRIALS):
        final_trials(study.size, dict.fromkeys(study.rules, number), range(1), study.tokens)
    _make_folder(study.folder)
    busy = UsageProblem(
        f"{study.folder}: another study is at work here",
        "Wait for it, stop it, or choose another folder: --out DIR",
    )
    with locked(study.folder, busy), StopRequest() as stop:
        _refuse_another(study)
        progress = _Progress(study, say)
        pool = Pool(
            folder=study.folder,
            jobs=study.jobs,
            threads=study.threads,
            stop=stop,
            say=say,
            finished=progress.finished,
        )
        progress.expect([trial for trial in tuning if pool.known(trial) is None])
        tuned = pool.run(tuning)
        chosen: dict[str, int | None] = {}
        for rule in study.rules:
            chosen[rule] = choose(
                [loss_of(tuned[trial.name]) for trial in tuning if trial.rule == rule]
            )
            say(
                f"{rule}: no trial has a finite loss"
                if chosen[rule] is None
                else f"{rule}: trial {chosen[rule]} chosen"
            )
        usable = {rule: number for rule, number in chosen.items() if number is not None}
        final = final_trials(study.size, usable, range(study.seeds), study.tokens)
        progress.settle([trial for trial in final if pool.known(trial) is None])
        finals = pool.run(final)
        result = make_result(
            _facts(study),
            {
                rule: [tuned[trial.name] for trial in tuning if trial.rule == rule]
                for rule in study.rules
            },
            chosen,
            {
                rule: [finals[trial.name] for trial in final if trial.rule == rule]
                for rule in study.rules
            },
        )
        write_results(study.folder, result)
    return result


def write_results(folder: Path, result: Mapping[str, Any]) -> None:
    """Write the result, its table and its figures.

    Raises:
        ArbError: they cannot be written.
    """
    try:
        write_json(folder / "result.json", result)
        (folder / "table.md").write_text(markdown(result), encoding="utf-8")
    except OSError as error:
        raise ArbError(f"{folder}: the result cannot be written: {error}") from error
    draw_losses(result, folder / "loss.png")
    draw_frontier(result, folder / "frontier.png")


def _facts(study: QualityStudy) -> dict[str, Any]:
    registry = manager().registry
    recipes = {rule: registry.get("recipe", rule) for rule in study.rules}
    return {
        "machine": machine_facts(),
        **study.identity(),
        "seeds": list(range(study.seeds)),
        "jobs": study.jobs,
        "threads": study.threads,
        "recipes": {
            rule: {"summary": found.spec.summary, "distribution": found.distribution}
            for rule, found in recipes.items()
        },
    }


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageProblem(f"{folder}: the folder cannot be made: {error}") from error


def _refuse_another(study: QualityStudy) -> None:
    path = study.folder / "study.json"
    if not path.exists():
        write_json(path, study.identity())
        return
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ArbError(f"{path}: cannot be read: {error}") from error
    if before != study.identity():
        told = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in before.items())
        raise UsageProblem(
            f"{study.folder}: a study with other settings is here: {told}",
            "Choose another folder: --out DIR",
        )


class _Progress:
    """Says what each run gave, and how long the rest will take at the speed so far."""

    def __init__(self, study: QualityStudy, say: Callable[[str], None]) -> None:
        self._study = study
        self._say = say
        self._started = time.monotonic()
        self._done = 0
        self._left = 0
        self._runs = 0

    def expect(self, tuning: Sequence[Trial]) -> None:
        """These tuning runs are to come, and then the final ones of every recipe."""
        finals = len(self._study.rules) * self._study.seeds
        self._left = sum(trial.tokens for trial in tuning) + finals * self._study.tokens
        self._runs = len(tuning) + finals

    def settle(self, final: Sequence[Trial]) -> None:
        """These final runs are all that is to come."""
        self._left = sum(trial.tokens for trial in final)
        self._runs = len(final)

    def finished(self, trial: Trial, outcome: Mapping[str, Any]) -> None:
        """A run has ended."""
        self._done += trial.tokens
        self._left -= trial.tokens
        self._runs -= 1
        left = format_duration((time.monotonic() - self._started) / self._done * self._left)
        if outcome["loss"] is None:
            told = f"failed: {outcome['failure'].strip().splitlines()[-1]}"
        else:
            told = f"loss {outcome['loss']:.4f}, {outcome['tokens_per_second']:,.0f} tokens/s"
        self._say(f"{trial.title}: {told}; {self._runs} runs to go, about {left}")
