"""What helps at the end of a run: rates, batches, rounding and cells of scaled votes, at equal
tokens.

    python plugins/arb-ternary-bench/studies/run_end.py --work DIR --out RESULT.json

A decoder with float embedding and head on the built-in text: ``search`` has 0.4 million linear
weights and 1.2 million tokens, ``small`` the model of ``arb bench quality`` and 2.1 million.
``--measure-on choice`` takes losses on the end of the training text, to choose settings by;
``validation`` on text that nothing else reads. A run whose result is in ``--work`` already is not
repeated, and every finished run is written at once. Phase and optimizer that only this study has
are in ``run_end_parts.py``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from arb_ternary_bench.child import ChildRun
from arb_ternary_bench.compare import machine_facts
from arb_ternary_bench.result_file import read_result, write_result
from arb_ternary_train.growing_batches import batches_in

BASE: Final = Path(__file__).with_name("run_end.yaml")
BRANCH_LOSSES: Final = ("validation_loss", "stream_loss", "training_loss", "turned")
PARTS: Final = BASE.with_name("run_end_parts.py")


@frozen(kw_only=True)
class Size:
    """A model, and how long it trains: ``steps`` of ``batch`` samples of 128 bytes."""

    width: int
    heads: int
    steps: int
    batch: int
    warmup: int

    def model(self, **other: Any) -> dict[str, Any]:
        """The model's section."""
        return {"width": self.width, "heads": self.heads, "feed_forward": 2 * self.width, **other}


SIZES: Final = {
    "search": Size(width=128, heads=2, steps=1200, batch=8, warmup=100),
    "small": Size(width=192, heads=3, steps=1024, batch=16, warmup=100),
}


Course = tuple[tuple[float, int, float, float], ...]


@frozen(kw_only=True)
class Variant:
    """A rule, and how it is trained.

    Attributes:
        optimizer: its section.
        model: options of the model beside the size's.
        times: samples in a batch, as a multiple of the size's; there are as many fewer steps.
        schedule: the phase's ``lr_schedule``.
        min_rate: the phase's.
        doublings: the phase's ``batch_doublings``; ``times`` is that of the first steps.
        course: parts of the run, instead of a schedule: share of the tokens, batches a step, the
            factors that the rate goes between on a line.
        branches: ends of the run that are taken from the state after ``course``, by name: parts as
            in ``course``, and options that the votes have from there on.
        warmup: instead of the size's.
    """

    optimizer: Mapping[str, Any]
    model: Mapping[str, Any] = {}
    times: float = 1.0
    schedule: str = "linear"
    min_rate: float = 0.05
    doublings: tuple[float, ...] = ()
    course: Course = ()
    branches: Mapping[str, tuple[Course, Mapping[str, Any]]] = {}
    warmup: int | None = None


def votes(
    rate: float, float_rate: float, name: str = "scaled_votes", **options: Any
) -> dict[str, Any]:
    """Scaled votes, and AdamW for the float parts."""
    ternary = {"name": name, "lr": rate, **options}
    return {
        "name": "split",
        "ternary": ternary,
        "float": {"name": "adamw", "lr": float_rate, "weight_decay": 0.0},
    }


def qat(rate: float, decay: float = 0.01, **other: Any) -> Variant:
    """Quantisation-aware training with this rate."""
    model = {"name": "bitnet", "float_parts": ["embedding", "head", "linears"]}
    return Variant(
        optimizer={"name": "bitnet_adamw", "lr": rate, "weight_decay": decay}, model=model, **other
    )


# : Twice the batch from the middle of the tokens on, and a rate that is there sqrt(2) times the
# line.
DOUBLED: Final = ((0.5, 1, 1.0, 0.525), (0.5, 2, 0.742, 0.07))
# : A batch that grows to eight times, a quarter of the tokens at each, and a rate that stays until
# the last.
TO_EIGHT: Final = (
    (0.25, 1, 0.8, 0.6),
    (0.25, 2, 0.85, 0.6),
    (0.25, 4, 0.85, 0.5),
    (0.25333, 8, 0.7, 0.1),
)
#: The same batches; the rate stays for four fifths of the steps and falls in the last.
COOLED: Final = (
    (0.25, 1, 1.0, 1.0),
    (0.25, 2, 1.0, 1.0),
    (0.25, 4, 1.0, 0.364),
    (0.25333, 8, 0.364, 0.05),
)
#: The same by an option: quarters of the tokens, as shares of the steps.
QUARTERS: Final = (0.534, 0.8, 0.934)
#: Shares of a cell beyond which trits are turned at the end of the branch ``line``.
TURNED: Final = (0.95, 0.9, 0.8, 0.65, 0.5)
FOUR: Final[Mapping[str, Any]] = {"vote_bits": 4}
#: A growing batch with fewer doublings: equal tokens at each size, as shares of the steps.
#: Runs without any have twice the batch throughout.
DOUBLINGS: Final[dict[int, tuple[float, ...]]] = {0: (), 1: (0.667,), 2: (0.572, 0.858)}
#: Rates of four bits moved apart: those of votes, and those of the float parts beside them.
APART: Final = ((0.19, 0.0038), (0.19, 0.0054), (0.135, 0.0054), (0.27, 0.0054))
#: Ends of a run with a line as its schedule, after three quarters and after a half.
LATE: Final = ((0.25, 1, 0.2875, 0.05),)
HALF: Final = ((0.5, 1, 0.525, 0.05),)

VARIANTS: Final[dict[str, Variant]] = {
    **{f"votes_{rate}": Variant(optimizer=votes(rate, 0.006)) for rate in (0.1, 0.15)},
    **{f"qat_{rate}": qat(rate) for rate in (0.006, 0.008)},
    **{
        f"orthogonal_{rate}": Variant(optimizer=votes(rate, 0.006, orthogonal=True))
        for rate in (0.1, 0.15)
    },
    **{
        f"4_bits_orthogonal_{rate}_{float_rate}": Variant(
            optimizer=votes(rate, float_rate, carry=False, orthogonal=True), model=FOUR, times=2
        )
        for rate, float_rate in ((0.19, 0.0076), (0.135, 0.0054), (0.19, 0.0054), (0.095, 0.0054))
    },
    **{
        f"4_bits_orthogonal_doubled_{rate}_{float_rate}": Variant(
            optimizer=votes(rate, float_rate, carry=False, orthogonal=True),
            model=FOUR,
            doublings=DOUBLINGS[1],
        )
        for rate, float_rate in ((0.135, 0.0054), (0.095, 0.0054))
    },
    "spectral_clip_0.1": Variant(optimizer=votes(0.1, 0.006, spectral_clip=True)),
    **{
        f"4_bits_spectral_clip_doubled_{rate}_{float_rate}": Variant(
            optimizer=votes(rate, float_rate, carry=False, spectral_clip=True),
            model=FOUR,
            doublings=DOUBLINGS[1],
        )
        for rate, float_rate in ((0.135, 0.0054), (0.095, 0.0054))
    },
    "growing": Variant(optimizer=votes(0.15, 0.006), course=DOUBLED),
    "tail_below_0.8": Variant(optimizer=votes(0.15, 0.006, "end_votes", tail_below=0.8)),
    "4_bits": Variant(optimizer=votes(0.17, 0.0068, carry=False), model=FOUR, times=2, warmup=60),
    "4_bits_doubled": Variant(
        optimizer=votes(0.17, 0.0068, carry=False), model=FOUR, times=2, course=DOUBLED, warmup=50
    ),
    "4_bits_to_eight": Variant(
        optimizer=votes(0.17, 0.0068, carry=False), model=FOUR, course=TO_EIGHT
    ),
    "4_bits_doublings": Variant(
        optimizer=votes(0.17, 0.0068, carry=False), model=FOUR, doublings=QUARTERS, min_rate=0.2
    ),
    "ends": Variant(
        optimizer=votes(0.1, 0.006, "end_votes"),
        course=((0.75, 1, 1.0, 0.2875),),
        branches={
            "line": (LATE, {}),
            "a flip at 96 quanta": (LATE, {"flip_cell": 96}),
            "tail below 0.8 quanta": (LATE, {"tail_below": 0.8}),
        },
    ),
    "4_bits_ends": Variant(
        optimizer=votes(0.17, 0.0068, "end_votes", carry=False),
        model=FOUR,
        times=2,
        warmup=60,
        course=((0.5, 1, 1.0, 0.525),),
        branches={
            "linear": (HALF, {}),
            "sticky3": (HALF, {"sticky": 3, "rail": 3}),
            "sharp": (HALF, {"tail_below": 100.0, "tail_noise": 5}),
        },
    ),
    "cooldown": Variant(
        optimizer=votes(0.1, 0.006), course=((0.8, 1, 1.0, 1.0), (0.2, 1, 1.0, 0.05))
    ),
    "4_bits_cooldown": Variant(
        optimizer=votes(0.136, 0.00544, carry=False), model=FOUR, course=COOLED
    ),
    "4_bits_rate_0.19": Variant(optimizer=votes(0.19, 0.0076, carry=False), model=FOUR, times=2),
    **{
        f"4_bits_{count}_doublings_{rate}_{float_rate}": Variant(
            optimizer=votes(rate, float_rate, carry=False),
            model=FOUR,
            doublings=ends,
            times=1 if ends else 2,
        )
        for count, ends in DOUBLINGS.items()
        for rate, float_rate in APART
    },
    **{
        f"qat_{rate}_decay_{decay}": qat(rate, decay)
        for rate, decay in ((0.004, 0.01), (0.0056, 0.01), (0.0113, 0.01), (0.008, 0.1))
    },
    "4_bits_doublings_rate_0.19": Variant(
        optimizer=votes(0.19, 0.0076, carry=False), model=FOUR, doublings=QUARTERS
    ),
}


def _parts(course: Course, steps: float) -> list[str]:
    """What the phase of this study takes, of a run that would have so many steps with the common
    batch.
    """
    return [
        f"{round(share * steps / joined)} {joined} {first:g} {last:g}"
        for share, joined, first, last in course
    ]


def overrides(size: Size, variant: Variant, seed: int, *, tuning: bool) -> list[str]:
    """What is changed in the config."""
    base = size.steps / variant.times
    batch = round(size.batch * variant.times)
    warmup = round(size.warmup / variant.times) if variant.warmup is None else variant.warmup
    steps = round(base)
    phase = {"name": "standard", "lr_schedule": variant.schedule, "min_rate": variant.min_rate}
    if variant.course:
        parts = _parts(variant.course, base)
        steps = sum(int(part.split()[0]) for part in parts)
        phase = {"name": "parts", "parts": parts}
    if variant.branches:
        ends = [
            {
                "name": name,
                "parts": _parts(course, base),
                "votes": options,
                "turn": TURNED if name == "line" else [],
            }
            for name, (course, options) in variant.branches.items()
        ]
        phase |= {"name": "branches", "branches": [json.dumps(end) for end in ends], "judged": 100}
    if variant.doublings:
        steps = next(n for n in range(steps, 0, -1) if batches_in(variant.doublings, n) <= base)
        phase |= {"batch_doublings": list(variant.doublings)}
    phase |= {
        "steps": steps,
        "batch_size": batch,
        "block_size": 128,
        "warmup_steps": warmup,
        "grad_clip": 1.0,
    }
    phase |= {
        "log_every": 50,
        "eval_every": max(1, steps // 6),
        "eval_batches": 100 if variant.branches else 16,
    }
    ternary = (
        {}
        if variant.model.get("name") == "bitnet"
        else {"group_size": "row", "scale_rule": "frozen"}
    )
    common = {
        "name": "decoder",
        "layers": 3,
        "activation": "swiglu",
        "query_key_norm": True,
        "max_length": 128,
    }
    model = size.model(**common, float_parts=["embedding", "head"], **ternary) | dict(variant.model)
    sections = {
        "model": model,
        "optimizer": variant.optimizer,
        "phases": [phase],
        "plugins": [str(PARTS)],
    }
    return [
        f"seed={seed}",
        "threads=1",
        f"data.tuning={json.dumps(tuning)}",
        *(f"{name}={json.dumps(section)}" for name, section in sections.items()),
    ]


def run(work: Path, size: str, name: str, seed: int, measured_on: str) -> dict[str, Any]:
    """Losses of one run, which is made where it is not there yet."""
    directory = work / f"{size}-{measured_on}-{name}-{seed}"
    if not (directory / "result.json").exists():
        changes = overrides(SIZES[size], VARIANTS[name], seed, tuning=measured_on == "choice")
        child = ChildRun.start(BASE, directory, changes, threads=1)
        if ended := child.wait().code:
            sys.exit(f"{directory}: the run ended with {ended}\n{child.log_tail()}")
    report = json.loads((directory / "result.json").read_text(encoding="utf-8"))
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    if VARIANTS[name].branches:
        ends = [each for each in records if each["event"] == "branch"]
        return {
            "ends": {
                end["name"]: {kind: end[kind] for kind in BRANCH_LOSSES if kind in end}
                for end in ends
            }
        }
    steps = [(each["tokens"], each["loss"]) for each in records if each["event"] == "train"]
    return {
        "loss": report["validation_loss"],
        "tokens": steps[-1][0],
        "state_bits_per_parameter": report["audit"]["state_bits_per_parameter"],
        "training_loss_by_twelfth_of_tokens": by_tokens(steps, 12),
    }


def by_tokens(steps: Sequence[tuple[int, float]], parts: int) -> list[float]:
    """Mean training loss of each of ``parts`` equal parts of the tokens, of steps' last tokens and
    losses.
    """
    sums = [0.0] * parts
    counts = [0] * parts
    before = 0
    for tokens, loss in steps:
        part = min(parts - 1, before * parts // steps[-1][0])
        sums[part] += loss * (tokens - before)
        counts[part] += tokens - before
        before = tokens
    return [total / count for total, count in zip(sums, counts, strict=True)]


def table(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """Mean and standard deviation over seeds, a line a variant."""
    lines = ["| size | variant | loss | last training losses | seeds |", "|---|---|---:|---:|---:|"]
    groups: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for found in runs.values():
        if "ends" in found:
            pairs = [
                (f", {name}", end["validation_loss"], end["stream_loss"])
                for name, end in found["ends"].items()
            ]
        else:
            pairs = [("", found["loss"], found["training_loss_by_twelfth_of_tokens"][-1])]
        for end, loss, training in pairs:
            groups.setdefault((found["size"], found["variant"] + end), []).append((loss, training))
    for (size, name), losses in groups.items():
        held, training = ([pair[which] for pair in losses] for which in (0, 1))
        spread = f" ± {statistics.stdev(held):.4f}" if len(held) > 1 else ""
        means = f"{statistics.fmean(held):.4f}{spread} | {statistics.fmean(training):.4f}"
        lines.append(f"| {size} | {name} | {means} | {len(held)} |")
    return "\n".join(lines)


def main() -> None:
    """Run what is missing, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--out", type=Path, required=True, help="the result, JSON")
    parser.add_argument("--size", choices=SIZES, default="search", help="(default: %(default)s)")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="which (default: all)")
    parser.add_argument("--seeds", default="0", help="which (default: %(default)s)")
    parser.add_argument("--measure-on", choices=("choice", "validation"), default="choice")
    arguments = parser.parse_args()
    work: Path = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    result = read_result(arguments.out, {"machine": machine_facts(), "runs": {}})
    size = arguments.size
    measured_on = arguments.measure_on
    for seed in map(int, arguments.seeds.split(",")):
        for name in arguments.variants.split(","):
            key = f"{size}, {measured_on}, {name}, seed {seed}"
            if key not in result["runs"]:
                found = run(work, size, name, seed, measured_on)
                facts = {"size": size, "variant": name, "seed": seed, "measured_on": measured_on}
                result["runs"][key] = facts | found
                write_result(arguments.out, result)
    print(
        table(
            {
                key: found
                for key, found in result["runs"].items()
                if found["measured_on"] == measured_on
            }
        )
    )


if __name__ == "__main__":
    main()
