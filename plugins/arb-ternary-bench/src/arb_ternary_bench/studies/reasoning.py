"""A small chat model learns a skill: accuracy by the scorer of the task, before and after.

The skill is a procedural task of reasoning-gym. The model first learns to answer other questions
about numbers in ChatML. It then learns the task from conversations, once by votes with ``arb
finetune`` and once by quantisation-aware training (QAT, float32 masters, AdamW) with ``arb train``,
from the same conversations in the same order. QAT continues from masters of its own, which have
learned the same first conversations. Questions to choose a rate by, and to measure with, are drawn
by other seeds of the task's generator, and none of them is among those that are learned.

Needs ``pip install reasoning-gym`` and the packages ``arb-ternary-chat`` and ``arb-ternary-qat``.
"""

from __future__ import annotations

import json
import random
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal

from attrs import asdict, frozen

from arb_ternary.config.fields import to_plain
from arb_ternary.config.options import option, positive
from arb_ternary.config.yaml_document import dump_yaml, read_yaml
from arb_ternary.environment import for_child
from arb_ternary.errors import ArbError, EnvironmentProblem, Interrupted, UsageProblem, nearest
from arb_ternary_bench.machine import load_average, machine_facts, with_threads
from arb_ternary_bench.runs import RunPool, study_folder
from arb_ternary_bench.study import Session, Study
from arb_ternary_bench.table import Column, Record, ResultTable, mean_and_deviation, number
from arb_ternary_train.directory import RunDirectory, write_json

#: Datasets of reasoning-gym with their options, by name of the task.
TASKS: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "sums of one digit": (
        "chain_sum",
        {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
    ),
    "sums of two digits": (
        "chain_sum",
        {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    ),
}
#: First seeds of the generators of questions: to measure with, to choose a rate by, to learn.
TEST_SEED: Final = 10_000_000
CHOICE_SEED: Final = 20_000_000
TRAIN_SEED: Final = 30_000_000
#: Rows of a batch and predictions of a row.
BATCH: Final = 32
BLOCK: Final = 64
#: Most tokens of an answer; longer ones are wrong.
LONGEST_ANSWER: Final = 8
#: Conversations to train the tokenizer on.
_WORDED: Final = 300
#: Share of the learned conversations on which the loss is measured.
_EVALUATED: Final = "0.05"
_SIZES: Final = {"heads": 4, "max_length": 128, "architecture": "qwen3"}


@frozen(kw_only=True)
class ReasoningOptions:
    """Options of the study."""

    task: str = option("sums of one digit", f"a task: {', '.join(TASKS)}")
    seeds: int = option(3, "train with seeds 0 to N - 1", validator=positive)
    width: int = option(128, "features of the model, a multiple of 8", validator=positive)
    layers: int = option(2, "blocks of the model", validator=positive)
    base_steps: int = option(150, "optimizer steps of the chat model", validator=positive)
    steps: int = option(300, "optimizer steps of each fine-tuning", validator=positive)
    base_questions: int = option(6000, "conversations of the chat model", validator=positive)
    train_questions: int = option(10000, "questions that are drawn to learn", validator=positive)
    choice_questions: int = option(100, "questions to choose a rate by", validator=positive)
    test_questions: int = option(250, "questions to measure with", validator=positive)
    votes_rates: tuple[float, ...] = option((0.05, 0.1, 0.2, 0.4), "rates of votes to try")
    qat_rates: tuple[float, ...] = option((0.004, 0.008, 0.016, 0.032), "rates of QAT to try")
    jobs: int = option(2, "runs at once, one thread each", validator=positive)


@frozen
class Method:
    """A way of training: its options of the model, its optimizer, and its rate for the chat model.

    Attributes:
        model: options of the model besides sizes.
        optimizer: options of the optimizer without its rate.
        base_rate: rate of training the chat model.
        phase: further options of the phase.
    """

    model: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    base_rate: float
    phase: Mapping[str, Any]


#: The settings of ``docs/examples/demo.yaml`` and ``docs/examples/bitnet.yaml``.
METHODS: Final[Mapping[str, Method]] = {
    "votes": Method(
        model={
            "name": "decoder",
            "learned_norms": True,
            "inner_gains": True,
            "row_scales": True,
            "vector_trits": 8,
            "group_size": "row",
            "scale_rule": "frozen",
            "embedding_scale_rule": "frozen",
        },
        optimizer={"name": "scaled_votes", "orthogonal": True},
        base_rate=0.1,
        phase={},
    ),
    "qat": Method(
        model={"name": "bitnet", "float_parts": ["embedding", "head", "linears"]},
        optimizer={"name": "bitnet_adamw", "weight_decay": 0.01},
        base_rate=0.008,
        phase={"grad_clip": 1.0},
    ),
}
LABELS: Final = {"votes": "votes, no float parameter", "qat": "QAT (BitNet b1.58), AdamW"}


# --- questions


@frozen
class Questions:
    """Different questions of a task.

    Attributes:
        dataset: scores answers.
        test: entries to measure with.
        choice: entries to choose a rate by.
        train: entries to learn.
    """

    dataset: Any
    test: tuple[Record, ...]
    choice: tuple[Record, ...]
    train: tuple[Record, ...]


def draw_questions(options: ReasoningOptions) -> Questions:
    """Draw the questions of the task; no two are equal.

    Raises:
        UsageProblem: there is no such task.
        EnvironmentProblem: reasoning-gym is not installed.
        ArbError: the task has too few different questions.
    """
    if options.task not in TASKS:
        raise UsageProblem(
            f"task: there is no task {options.task!r}",
            nearest(options.task, TASKS) or f"tasks: {', '.join(TASKS)}",
        )
    try:
        library: Any = import_module("reasoning_gym")
    except ImportError as error:
        raise EnvironmentProblem(
            f"the study reasoning needs the package reasoning-gym: {error}",
            "pip install reasoning-gym",
        ) from error
    name, settings = TASKS[options.task]
    seen: set[str] = set()

    def drawn(seed: int, draws: int) -> Iterator[Record]:
        for entry in library.create_dataset(name, seed=seed, size=draws, **settings):
            if entry["question"] not in seen:
                seen.add(entry["question"])
                yield entry

    def first(seed: int, count: int) -> tuple[Record, ...]:
        found = tuple(islice(drawn(seed, 10 * count), count))
        if len(found) < count:
            raise ArbError(
                f"{options.task}: {len(found)} different questions instead of {count}",
                "Ask for fewer: -o test_questions=N, -o choice_questions=N.",
            )
        return found

    test = first(TEST_SEED, options.test_questions)
    choice = first(CHOICE_SEED, options.choice_questions)
    train = tuple(drawn(TRAIN_SEED, options.train_questions))
    if not train:
        raise ArbError(f"{options.task}: no question is left to learn")
    dataset = library.create_dataset(name, seed=TEST_SEED, size=1, **settings)
    return Questions(dataset, test, choice, train)


def base_conversations(count: int) -> list[tuple[str, str]]:
    """Return questions about numbers, with answers, that teach to answer but not to calculate."""
    draw = random.Random(0)
    pairs = []
    for _ in range(count):
        numbers = [str(draw.randrange(10 ** draw.randint(1, 3))) for _ in range(draw.randint(2, 4))]
        shown = " ".join(numbers)
        first = draw.randrange(200)
        last = first + draw.randint(1, 4)
        counted = " ".join(str(each) for each in range(first, last + 1))
        pairs.append(
            draw.choice(
                (
                    (f"Repeat these numbers: {shown}", shown),
                    (f"Which of these numbers is the first? {shown}", numbers[0]),
                    (f"Which of these numbers is the last? {shown}", numbers[-1]),
                    (f"Count from {first} to {last}", counted),
                )
            )
        )
    return pairs


def _write_files(options: ReasoningOptions, questions: Questions, folder: Path) -> None:
    """Write both files of conversations, and the text whose words the tokenizer learns.

    There is no digit in that text, so that each digit stays a token.
    """
    base = base_conversations(options.base_questions)
    learned = [(entry["question"], entry["answer"]) for entry in questions.train]
    for name, pairs in (("base", base), ("train", learned)):
        lines = [json.dumps({"prompt": asked, "completion": answer}) for asked, answer in pairs]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    worded = [asked for asked, _ in (*base[:_WORDED], *learned[:_WORDED])]
    text = "\n".join([*worded, *(["user", "assistant"] * _WORDED)])
    (folder / "words.txt").write_text(re.sub(r"\d", "", text), encoding="utf-8")


# --- runs


@frozen
class Command:
    """A call of ``arb``.

    Attributes:
        title: what it does, for messages.
        arguments: of ``arb``.
        result: the file that is there once the call has succeeded.
        log: the file that its output is added to.
    """

    title: str
    arguments: tuple[str, ...]
    result: Path
    log: Path


def run_arb(arguments: Sequence[str], log: Path) -> int:
    """Run ``arb`` in a process of one thread, add its output to ``log``, return its exit code."""
    with log.open("ab") as output:
        done = subprocess.run(
            [sys.executable, "-m", "arb_ternary", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=for_child(OMP_NUM_THREADS="1"),
            check=False,
        )
    return done.returncode


def _run_all(commands: Sequence[Command], pool: RunPool) -> None:
    """Run the commands whose results are missing, ``pool.jobs`` at once.

    Raises:
        Interrupted: the study was asked to stop.
        ArbError: a command failed; the end of its output is the hint.
    """

    def run_one(command: Command) -> None:
        if command.result.exists() or pool.stop.requested:
            return
        code = run_arb(command.arguments, command.log)
        if code and not pool.stop.requested:
            lines = command.log.read_text(encoding="utf-8", errors="replace").splitlines()
            raise ArbError(
                f"{command.title}: arb {command.arguments[0]} ended with {code}; see {command.log}",
                "\n".join(lines[-4:]),
            )

    with ThreadPoolExecutor(pool.jobs) as executor:
        for command, _ in zip(commands, executor.map(run_one, commands), strict=True):
            if pool.stop.requested:
                raise Interrupted(
                    f"{pool.folder}: stopped by {pool.stop.reason}",
                    "The same command continues the study.",
                )
            pool.say(f"{command.title}: done")


@frozen
class _Runs:
    """Plans the runs of a study in its folder."""

    options: ReasoningOptions
    folder: Path

    def base(self, method: str, seed: int) -> Path:
        """Return the directory of the chat model."""
        return self.folder / f"{method}-{seed}" / "base"

    def tuned(self, method: str, seed: int, rate: float) -> Path:
        """Return the directory of a fine-tuning; its run is in ``run``, its config beside that."""
        return self.folder / f"{method}-{seed}" / f"tuned-{rate:g}"

    def train_base(self, method: str, seed: int) -> Command:
        """Return the command that trains the chat model."""
        chosen = METHODS[method]
        steps = self.options.base_steps
        config = {
            "name": "base",
            "seed": seed,
            "threads": 1,
            "data": {
                "name": "chat",
                "train": str(self.folder / "base.jsonl"),
                "tokenizer": str(self.folder / "tokenizer.json"),
            },
            "masking": "answers",
            "model": self._model(chosen),
            "optimizer": {**chosen.optimizer, "lr": chosen.base_rate},
            "phases": [
                {
                    "name": "standard",
                    "steps": steps,
                    "batch_size": BATCH,
                    "block_size": BLOCK,
                    "lr_schedule": "linear",
                    "warmup_steps": min(steps // 10, 20),
                    "eval_every": steps,
                    **chosen.phase,
                }
            ],
        }
        run = self.base(method, seed)
        return self._train(f"{method}-{seed}, chat model", config, run, None)

    def fine_tune(self, method: str, seed: int, rate: float) -> Command:
        """Return the command of a fine-tuning.

        QAT takes the config that ``arb finetune`` has written for votes with the same seed, with
        another model and another optimizer.
        """
        out = self.tuned(method, seed, rate)
        title = f"{method}-{seed}, fine-tuning with a rate of {rate:g}"
        chosen = METHODS[method]
        if method == "votes":
            arguments = ["finetune", str(self.base(method, seed)), str(self.folder / "train.jsonl")]
            arguments += ["--out", str(out), "--steps", str(self.options.steps)]
            arguments += ["--lr", f"{rate:g}", "--eval-share", _EVALUATED]
            changes = {
                "seed": seed,
                "threads": 1,
                "phases.0.batch_size": BATCH,
                "phases.0.block_size": BLOCK,
                "phases.0.lr_schedule": "linear",
                **{f"optimizer.{key}": value for key, value in chosen.optimizer.items()},
            }
            for path, value in changes.items():
                arguments += ["-o", f"{path}={json.dumps(value)}"]
            result = RunDirectory(out / "run").result_file
            return Command(title, tuple(arguments), result, self._log(out))
        (like, *_) = sorted((self.folder / f"votes-{seed}").glob("tuned-*/config.yaml"))
        config = dict(read_yaml(like.read_text(encoding="utf-8"), str(like)).data)
        (phase,) = config["phases"]
        config["phases"] = [{**phase, **chosen.phase}]
        config["model"] = self._model(chosen)
        config["optimizer"] = {**chosen.optimizer, "lr": rate}
        return self._train(title, config, out / "run", self.base(method, seed))

    def _model(self, method: Method) -> dict[str, Any]:
        width = self.options.width
        sizes = {"width": width, "layers": self.options.layers, "feed_forward": 2 * width}
        return {**method.model, **_SIZES, **sizes}

    def _train(
        self, title: str, config: Mapping[str, Any], run: Path, init_from: Path | None
    ) -> Command:
        file = run.with_name(f"{run.name}.yaml")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(dump_yaml(dict(config)), encoding="utf-8")
        arguments = ["train", str(file), "--run-dir", str(run)]
        if RunDirectory(run).exists():
            arguments += ["--resume", "auto"]
        elif init_from is not None:
            arguments += ["--init-from", str(init_from)]
        return Command(title, tuple(arguments), RunDirectory(run).result_file, self._log(run))

    def _log(self, directory: Path) -> Path:
        directory.parent.mkdir(parents=True, exist_ok=True)
        return directory.with_name(f"{directory.name}.log")


def _report(run: Path) -> Record:
    report: Record = json.loads(RunDirectory(run).result_file.read_text(encoding="utf-8"))
    return report


# --- scores


@frozen
class Score:
    """Answers to questions.

    Attributes:
        accuracy: share of the answers that get the full score.
        mean: mean score; a task may give a part of it for answers that are nearly right.
    """

    accuracy: float
    mean: float


def score(run: Path, part: Literal["choice", "test"], questions: Questions) -> Score:
    """Ask a model questions and score its likeliest answers by the task's scorer.

    The score is kept in a file beside the run.
    """
    from arb_ternary import load_model

    file = run.with_name(f"{run.name}-{part}.json")
    if file.exists():
        return Score(**json.loads(file.read_text(encoding="utf-8")))
    model = load_model(run)
    found = []
    with with_threads(1):
        for entry in getattr(questions, part):
            messages = [{"role": "user", "content": entry["question"]}]
            answer = model.generate(messages, temperature=0, max_new_tokens=LONGEST_ANSWER)
            found.append(float(questions.dataset.score_answer(answer, entry)))
    right = sum(each >= 1 for each in found)
    result = Score(right / len(found), statistics.fmean(found))
    write_json(file, asdict(result))
    return result


# --- the study


def run(options: ReasoningOptions, session: Session) -> dict[str, Any]:
    """Train the chat models, choose rates with seed 0, fine-tune with every seed, and score.

    Raises:
        UsageProblem: there is no such task, or a study with other settings is in the folder.
        EnvironmentProblem: reasoning-gym is not installed.
        Interrupted: SIGINT or SIGTERM came; the same command continues.
        ArbError: a run failed.
    """
    questions = draw_questions(options)
    plain = to_plain(options)
    folder = session.folder.resolve()
    may_grow = ("seeds", "jobs", "votes_rates", "qat_rates")
    identity = {key: value for key, value in plain.items() if key not in may_grow}
    with study_folder(folder, identity, jobs=options.jobs, threads=1, say=session.say) as pool:
        _write_files(options, questions, folder)
        runs = _Runs(options, folder)
        tokenizer = folder / "tokenizer.json"
        words = ("data", "tokenizer", str(folder / "words.txt"), "--chat", "--out", str(tokenizer))
        arguments = (*words, "--vocabulary-size", "512")
        log = folder / "tokenizer.log"
        _run_all([Command("tokenizer", arguments, tokenizer, log)], pool)
        _run_all([runs.train_base(method, 0) for method in METHODS], pool)
        chosen = {method: _choose(runs, method, questions, pool) for method in METHODS}
        others = range(1, options.seeds)
        _run_all([runs.train_base(method, seed) for seed in others for method in METHODS], pool)
        for method in METHODS:
            rate = chosen[method]["rate"]
            _run_all([runs.fine_tune(method, seed, rate) for seed in others], pool)
        rows = [_measured(runs, method, chosen[method], questions) for method in METHODS]
    name, settings = TASKS[options.task]
    return {
        "machine": machine_facts(),
        "load_average": load_average(),
        "reasoning-gym": version("reasoning-gym"),
        "dataset": name,
        "settings": settings,
        "questions": {
            "learned": len(questions.train),
            "choice": len(questions.choice),
            "test": len(questions.test),
        },
        "methods": rows,
    }


def _choose(runs: _Runs, method: str, questions: Questions, pool: RunPool) -> dict[str, Any]:
    """Fine-tune with seed 0 and every rate; return the scores and the rate with the best one."""
    rates = runs.options.votes_rates if method == "votes" else runs.options.qat_rates
    _run_all([runs.fine_tune(method, 0, rate) for rate in rates], pool)
    trials = {}
    for rate in rates:
        trials[rate] = score(runs.tuned(method, 0, rate) / "run", "choice", questions)
        pool.say(f"{method}: rate {rate:g}: accuracy {trials[rate].accuracy:.3f}")
    best = max(rates, key=lambda rate: trials[rate].mean)
    tried = {f"{rate:g}": asdict(trial) for rate, trial in trials.items()}
    return {"method": method, "rate": best, "trials": tried}


def _measured(
    runs: _Runs, method: str, chosen: Mapping[str, Any], questions: Questions
) -> dict[str, Any]:
    """Return scores and facts of the chat models and of what became of them, by seed."""
    seeds = range(runs.options.seeds)
    tuned = [runs.tuned(method, seed, chosen["rate"]) / "run" for seed in seeds]
    before = [score(runs.base(method, seed), "test", questions) for seed in seeds]
    after = [score(each, "test", questions) for each in tuned]
    reports = [_report(each) for each in tuned]
    counted = reports[0]["audit"]
    return {
        **chosen,
        "before": [asdict(each) for each in before],
        "after": [asdict(each) for each in after],
        "losses": [each["validation_loss"] for each in reports],
        "learned_tokens": reports[0]["tokens"],
        "tokens_per_second": [each["tokens_per_second"] for each in reports],
        "parameters": counted["parameters"],
        "float_parameters": counted["float_parameters"],
        "state_bits_per_parameter": counted["state_bits_per_parameter"],
    }


# --- the table


def _accuracy(scores: Sequence[Record]) -> str:
    shares = [100 * each["accuracy"] for each in scores]
    return mean_and_deviation(shares, 1)


def notes(result: Record) -> list[str]:
    """Return what a reader of the table has to know."""
    options = result["options"]
    counted = result["questions"]
    seeds = options["seeds"]
    machine = result["machine"]
    return [
        f"Task: `{result['dataset']}` of reasoning-gym {result['reasoning-gym']}, "
        f"{options['task']}. {counted['learned']:,} questions are for learning, a twentieth of "
        f"them for the loss only; {counted['choice']} choose the rate, {counted['test']} others "
        f"measure. Likeliest answers; an answer counts "
        f"if the task's scorer gives it 1. Means and standard deviations of {seeds} seeds, each "
        f"with a chat model of its own. Chat model: {options['base_steps']} steps, fine-tuning: "
        f"{options['steps']} steps, of {BATCH} x {BLOCK} tokens. Tokens/s are tokens of answers "
        f"per second, of one thread, at a load average of {result['load_average']}. "
        f"{machine['processor']}, {machine['cores']} cores, torch {machine['torch']}. Command: "
        "`python -m arb_ternary_bench.study reasoning`."
    ]


TABLE = ResultTable(
    columns=(
        Column("method", lambda row: LABELS[row["method"]], left=True),
        Column("accuracy before, %", lambda row: _accuracy(row["before"])),
        Column("accuracy after, %", lambda row: _accuracy(row["after"])),
        Column("state, bits per weight", lambda row: number(row["state_bits_per_parameter"], 2)),
        Column("weights", lambda row: number(row["parameters"])),
        Column("float weights", lambda row: number(row["float_parameters"])),
        Column("rate", lambda row: f"{row['rate']:g}"),
        Column("tokens/s", lambda row: number(statistics.median(row["tokens_per_second"]))),
    ),
    records=lambda result: result["methods"],
    notes=notes,
)

STUDY = Study(options=ReasoningOptions, run=run, table=TABLE)
