"""A small chat model learns a skill: accuracy by the scorer of the task, before and after.

The skill is a procedural task of reasoning-gym. The model first learns to answer other questions
about numbers in ChatML. It then learns the task from conversations, once by votes with ``arb
finetune`` and once by quantisation-aware training (QAT, float32 masters, AdamW) with ``arb train``,
from the same conversations in the same order. QAT continues from masters of its own, which have
learned the same first conversations. Questions to choose a rate by, and to measure with, are drawn
by other seeds of the task's generator, and none of them is among those that are learned.

Needs ``pip install reasoning-gym``.
"""

from __future__ import annotations

import json
import random
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal

from attrs import frozen

from arb_ternary import load_model
from arb_ternary.config.fields import to_plain
from arb_ternary.config.options import option, positive
from arb_ternary.config.yaml_document import dump_yaml, read_yaml
from arb_ternary.errors import ArbError, EnvironmentProblem, UsageProblem
from arb_ternary_train.directory import RunDirectory, write_json
from harness.child import run_arb
from harness.machine import load_average, machine_facts, with_threads
from harness.parallel import in_parallel
from harness.script import main, say
from harness.study import Study
from harness.table import Column, Record, ResultTable, mean_and_deviation, number

#: The task: a dataset of reasoning-gym with its options.
TASK: Final = "sums of one digit"
DATASET: Final = "chain_sum"
SETTINGS: Final = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}
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
#: Options that may differ when a measurement is continued.
_MAY_GROW: Final = ("seeds", "jobs", "votes_rates", "qat_rates")


@frozen(kw_only=True)
class ReasoningOptions:
    """Options of the script."""

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


@frozen(kw_only=True)
class Method:
    """A way of training.

    Attributes:
        label: in the table.
        model: options of the model besides sizes.
        optimizer: options of the optimizer without its rate.
        base_rate: rate of training the chat model.
        phase: further options of the phase.
    """

    label: str
    model: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    base_rate: float
    phase: Mapping[str, Any]


#: The settings of ``docs/examples/demo.yaml`` and ``docs/examples/bitnet.yaml``.
METHODS: Final[Mapping[str, Method]] = {
    "votes": Method(
        label="votes, no float parameter",
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
        label="QAT (BitNet b1.58), AdamW",
        model={"name": "bitnet", "float_parts": ["embedding", "head", "linears"]},
        optimizer={"name": "bitnet_adamw", "weight_decay": 0.01},
        base_rate=0.008,
        phase={"grad_clip": 1.0},
    ),
}


# --- questions


@frozen
class Questions:
    """Different questions of the task.

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
        EnvironmentProblem: reasoning-gym is not installed.
        ArbError: the task has too few different questions.
    """
    try:
        library: Any = import_module("reasoning_gym")
    except ImportError as error:
        raise EnvironmentProblem(
            f"the package reasoning-gym is needed: {error}", "pip install reasoning-gym"
        ) from error
    seen: set[str] = set()

    def drawn(seed: int, draws: int) -> Iterator[Record]:
        for entry in library.create_dataset(DATASET, seed=seed, size=draws, **SETTINGS):
            if entry["question"] not in seen:
                seen.add(entry["question"])
                yield entry

    def first(seed: int, count: int) -> tuple[Record, ...]:
        entries = tuple(islice(drawn(seed, 10 * count), count))
        if len(entries) < count:
            raise ArbError(
                f"{TASK}: {len(entries)} different questions instead of {count}",
                "Ask for fewer: -o test_questions=N, -o choice_questions=N.",
            )
        return entries

    test = first(TEST_SEED, options.test_questions)
    choice = first(CHOICE_SEED, options.choice_questions)
    train = tuple(drawn(TRAIN_SEED, options.train_questions))
    dataset = library.create_dataset(DATASET, seed=TEST_SEED, size=1, **SETTINGS)
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
class Runs:
    """The runs of a measurement, in its folder. What has finished is not repeated."""

    options: ReasoningOptions
    folder: Path

    def arb(self, title: str, arguments: Sequence[str], result: Path) -> None:
        """Call ``arb`` with one thread, unless the file ``result``, which it leaves, exists.

        Raises:
            ArbError: it failed; the end of its output is the hint.
        """
        if not result.exists():
            name = title.replace(", ", "-").replace(" ", "-")
            run_arb(arguments, self.folder / f"{name}.log", threads=1)
            say(f"{title}: done")

    def base(self, method: str, seed: int) -> Path:
        """Return the run directory of the chat model."""
        return self.folder / f"{method}-{seed}" / "base"

    def tuned(self, method: str, seed: int, rate: float) -> Path:
        """Return the run directory of a fine-tuning; its config is beside it."""
        return self.folder / f"{method}-{seed}" / f"tuned-{rate:g}" / "run"

    def train_tokenizer(self) -> None:
        """Train the tokenizer that all models share."""
        words, out = (str(self.folder / name) for name in ("words.txt", "tokenizer.json"))
        arguments = ("data", "tokenizer", words, "--chat", "--out", out, "--vocabulary-size", "512")
        self.arb("tokenizer", arguments, Path(out))

    def train_base(self, job: tuple[str, int]) -> None:
        """Train the chat model of a method and a seed."""
        name, seed = job
        method = METHODS[name]
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
            "model": self._model(method),
            "optimizer": {**method.optimizer, "lr": method.base_rate},
            "phases": [
                {
                    "name": "standard",
                    "steps": steps,
                    "batch_size": BATCH,
                    "block_size": BLOCK,
                    "lr_schedule": "linear",
                    "warmup_steps": min(steps // 10, 20),
                    "eval_every": steps,
                    **method.phase,
                }
            ],
        }
        self._train(f"{name} {seed}, chat model", config, self.base(name, seed))

    def fine_tune(self, job: tuple[str, int, float]) -> None:
        """Fine-tune the chat model of a method and a seed with a rate.

        QAT takes the config that ``arb finetune`` has written for votes with the same seed, with
        another model and another optimizer.
        """
        name, seed, rate = job
        run = self.tuned(name, seed, rate)
        base = str(self.base(name, seed))
        method = METHODS[name]
        title = f"{name} {seed}, rate {rate:g}"
        if name == "votes":
            arguments = ["finetune", base, str(self.folder / "train.jsonl")]
            arguments += ["--out", str(run.parent), "--steps", str(self.options.steps)]
            arguments += ["--lr", f"{rate:g}", "--eval-share", _EVALUATED]
            changes = {
                "seed": seed,
                "threads": 1,
                "phases.0.batch_size": BATCH,
                "phases.0.block_size": BLOCK,
                "phases.0.lr_schedule": "linear",
                **{f"optimizer.{key}": value for key, value in method.optimizer.items()},
            }
            for path, value in changes.items():
                arguments += ["-o", f"{path}={json.dumps(value)}"]
            self.arb(title, arguments, RunDirectory(run).result_file)
            return
        (like, *_) = sorted((self.folder / f"votes-{seed}").glob("tuned-*/config.yaml"))
        config = dict(read_yaml(like.read_text(encoding="utf-8"), str(like)).data)
        (phase,) = config["phases"]
        config["phases"] = [{**phase, **method.phase}]
        config["model"] = self._model(method)
        config["optimizer"] = {**method.optimizer, "lr": rate}
        self._train(title, config, run, "--init-from", base)

    def _model(self, method: Method) -> dict[str, Any]:
        width = self.options.width
        return {
            **method.model,
            "architecture": "qwen3",
            "width": width,
            "layers": self.options.layers,
            "heads": 4,
            "feed_forward": 2 * width,
            "max_length": 128,
        }

    def _train(self, title: str, config: Mapping[str, Any], run: Path, *start: str) -> None:
        """Train; an interrupted run continues, and a new one begins with the options ``start``."""
        directory = RunDirectory(run)
        file = run.with_name(f"{run.name}.yaml")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(dump_yaml(dict(config)), encoding="utf-8")
        begin = ("--resume", "auto") if directory.exists() else start
        self.arb(title, ("train", str(file), "--run-dir", str(run), *begin), directory.result_file)


# --- scores


def score(run: Path, part: Literal["choice", "test"], questions: Questions) -> dict[str, float]:
    """Ask a model questions and score its likeliest answers by the task's scorer.

    The scores are kept in a file beside the run.

    Returns:
        ``accuracy``, the share of the answers that get the full score, and the ``mean`` score; a
        task may give a part of it for answers that are nearly right.
    """
    file = run.with_name(f"{run.name}-{part}.json")
    if not file.exists():
        model = load_model(run)
        scores = []
        with with_threads(1):
            for entry in getattr(questions, part):
                messages = [{"role": "user", "content": entry["question"]}]
                answer = model.generate(messages, temperature=0, max_new_tokens=LONGEST_ANSWER)
                scores.append(float(questions.dataset.score_answer(answer, entry)))
        accuracy = statistics.fmean(each >= 1 for each in scores)
        write_json(file, {"accuracy": accuracy, "mean": statistics.fmean(scores)})
    found: dict[str, float] = json.loads(file.read_text(encoding="utf-8"))
    return found


# --- the measurement


def run(options: ReasoningOptions, folder: Path) -> dict[str, Any]:
    """Train the chat models, choose rates with seed 0, fine-tune with every seed, and score.

    Raises:
        UsageProblem: a measurement with other options is in the folder.
        EnvironmentProblem: reasoning-gym is not installed.
        ArbError: a run failed.
    """
    questions = draw_questions(options)
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    settings = folder / "options.json"
    # Runs that are there count as those of these options.
    plain = {key: value for key, value in to_plain(options).items() if key not in _MAY_GROW}
    if settings.exists() and json.loads(settings.read_text(encoding="utf-8")) != plain:
        raise UsageProblem(f"{folder}: other options are in use here", "Choose another --out.")
    write_json(settings, plain)
    _write_files(options, questions, folder)
    runs = Runs(options, folder)
    runs.train_tokenizer()
    every = partial(in_parallel, jobs=options.jobs)
    every(runs.train_base, [(name, seed) for seed in range(options.seeds) for name in METHODS])
    chosen = {name: _choose(runs, name, questions) for name in METHODS}
    for name in METHODS:
        rate = chosen[name]["rate"]
        every(runs.fine_tune, [(name, seed, rate) for seed in range(options.seeds)])
    return {
        "machine": machine_facts(),
        "load_average": load_average(),
        "reasoning-gym": version("reasoning-gym"),
        "dataset": DATASET,
        "settings": SETTINGS,
        "questions": {
            "learned": len(questions.train),
            "choice": len(questions.choice),
            "test": len(questions.test),
        },
        "methods": [_measured(runs, name, chosen[name], questions) for name in METHODS],
    }


def _choose(runs: Runs, method: str, questions: Questions) -> dict[str, Any]:
    """Fine-tune with seed 0 and every rate; return the scores and the rate with the best one."""
    rates = runs.options.votes_rates if method == "votes" else runs.options.qat_rates
    in_parallel(runs.fine_tune, [(method, 0, rate) for rate in rates], runs.options.jobs)
    trials = {}
    for rate in rates:
        trials[rate] = score(runs.tuned(method, 0, rate), "choice", questions)
        say(f"{method}: rate {rate:g}: accuracy {trials[rate]['accuracy']:.3f}")
    best = max(rates, key=lambda rate: trials[rate]["mean"])
    tried = {f"{rate:g}": trial for rate, trial in trials.items()}
    return {"method": method, "rate": best, "trials": tried}


def _measured(
    runs: Runs, method: str, chosen: Mapping[str, Any], questions: Questions
) -> dict[str, Any]:
    """Return scores and facts of the chat models and of what became of them, by seed."""
    seeds = range(runs.options.seeds)
    tuned = [runs.tuned(method, seed, chosen["rate"]) for seed in seeds]
    files = [RunDirectory(each).result_file for each in tuned]
    reports = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    counted = reports[0]["audit"]
    return {
        **chosen,
        "before": [score(runs.base(method, seed), "test", questions) for seed in seeds],
        "after": [score(each, "test", questions) for each in tuned],
        "losses": [each["validation_loss"] for each in reports],
        "learned_tokens": reports[0]["tokens"],
        "tokens_per_second": [each["tokens_per_second"] for each in reports],
        "parameters": counted["parameters"],
        "float_parameters": counted["float_parameters"],
        "state_bits_per_parameter": counted["state_bits_per_parameter"],
    }


# --- the table


def _accuracy(scores: Sequence[Record]) -> str:
    return mean_and_deviation([100 * each["accuracy"] for each in scores], 1)


def notes(result: Record) -> list[str]:
    """Return what a reader of the table has to know."""
    options = result["options"]
    counted = result["questions"]
    machine = result["machine"]
    return [
        f"Task: `{result['dataset']}` of reasoning-gym {result['reasoning-gym']}, "
        f"{TASK}. {counted['learned']:,} questions are for learning, a twentieth of "
        f"them for the loss only; {counted['choice']} choose the rate, {counted['test']} others "
        f"measure. Likeliest answers; an answer counts "
        f"if the task's scorer gives it 1. Means and standard deviations of {options['seeds']} "
        f"seeds, each with a chat model of its own. Chat model: {options['base_steps']} steps, "
        f"fine-tuning: {options['steps']} steps, of {BATCH} x {BLOCK} tokens. Tokens/s are tokens "
        f"of answers per second, of one thread, at a load average of {result['load_average']}. "
        f"{machine['processor']}, {machine['cores']} cores, torch {machine['torch']}. Command: "
        "`python benchmarks/reasoning.py`."
    ]


TABLE = ResultTable(
    columns=(
        Column("method", lambda row: METHODS[row["method"]].label, left=True),
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

STUDY = Study(name="reasoning", options=ReasoningOptions, run=run, table=TABLE)

if __name__ == "__main__":
    main(STUDY.command())
