"""A fixed batch against GNTS at equal tokens, in float32 and ternary, three seeds each.

    python plugins/arb-ternary-gqc/study/equal_tokens.py --out
    plugins/arb-ternary-gqc/study/equal_tokens.json

Every run sees the same number of micro-batches of 8 x 128 tokens. A fixed arm steps after 1, 2, 4
or 8 of them; a GNTS arm when the norm of their mean gradient is below a threshold, which falls to
half after an inverted warm-up. Rates are functions of the micro-batch, not of the step, so that
neither arm is ahead of its schedule.

Both arms have eight trials, on the end of the training text with a seed of their own: four batch
sizes or thresholds, times two learning rates. Thresholds are multiples of the median norm of a
micro-batch's gradient in the second half of the first fixed trial. The best trial of each arm is
run with three seeds and the validation text. Losses are in nats a byte. A run that is in the file
already is not repeated; every finished run is written at once. Draws the losses, and the draws of a
step, beside the file.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import torch

from arb_ternary.optim.protocol import collect_trainable
from arb_ternary.protocols.data import BatchRequest, MaskContext
from arb_ternary_bench.compare import machine_facts
from arb_ternary_train.build import build_parts
from arb_ternary_train.config_file import read_document
from arb_ternary_train.evaluate import evaluate, masked_loss
from arb_ternary_train.loading import load_config
from arb_ternary_train.schedules import apply_schedule
from arb_ternary_train.seeding import derive_seed, derived_generator

HERE = Path(__file__).parent
KINDS = ("float", "ternary")
ARMS = ("fixed", "gnts")
BATCHES = (1, 2, 4, 8)
THRESHOLDS = (4.0, 2.8, 2.0, 1.4)
RATES = (1.0, 2.0)
SEEDS = (0, 1, 2)
TUNING_SEED = 1000
BATCH = 8
BLOCK = 128
#: Points of a run's curves of loss and of draws.
POINTS = 120


def trials(arm: str) -> Iterator[tuple[float, float]]:
    """Batch size or threshold, and the factor on all learning rates."""
    yield from product(BATCHES if arm == "fixed" else THRESHOLDS, RATES)


def overrides(
    kind: str, arm: str, setting: float, rate: float, count: int, unit: float
) -> list[str]:
    """What makes the base config of ``kind`` that of a trial."""
    plain = read_document(HERE / f"{kind}.yaml").data["optimizer"]
    parts = [plain] if kind == "float" else [plain["ternary"], plain["float"]]
    for part in parts:
        part["lr"] = part["lr"] * rate
    wrapper: dict[str, Any] = {"inner": plain}
    if arm == "fixed":
        wrapper |= {"name": "gqc.sbc", "initial_logical_batch_size": float(setting)}
    else:
        schedule = {"batches": count, "kind": "cosine", "final": 0.5, "warmup_batches": count // 20}
        wrapper |= {"name": "gqc.gnts", "threshold": setting * unit, "schedule": schedule}
    return [f"optimizer={json.dumps(wrapper)}"]


def run(kind: str, settings: list[str], count: int, seed: int, *, tuning: bool) -> dict[str, Any]:
    """Train on ``count`` micro-batches; the loss afterwards, and what the steps were made of."""
    given = [*settings, f"seed={seed}", f"data.tuning={str(tuning).lower()}"]
    config = load_config(HERE / f"{kind}.yaml", given).config
    parts = build_parts(config)
    optimizer = config.optimizer.build(collect_trainable(parts.model))
    vocabulary = parts.data.vocabulary_size
    losses: list[float] = []
    norms: list[float] = []
    draws: list[tuple[int, int]] = []
    parts.model.train()
    with closing(
        parts.data.batches(BatchRequest(BATCH, BLOCK, derive_seed(seed, "order")))
    ) as loader:
        for index in range(count):
            apply_schedule(
                optimizer,
                "linear",
                index,
                steps=count,
                warmup=count // 20,
                lr=None,
                min_lr=None,
                min_rate=0.05,
            )
            context = MaskContext(step=index, seed=seed, vocabulary_size=vocabulary)
            masked = parts.masking.apply(
                next(loader), derived_generator(seed, "mask", index), context
            )
            loss = masked_loss(parts.model(masked.inputs), masked)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(float(loss.detach()))
            if optimizer.step(loss_signal=losses[-1]):
                norms.append(optimizer.last_grad_norm)
                draws.append((index + 1, optimizer.last_num_draws))
    result = evaluate(
        parts.model,
        parts.data,
        parts.masking,
        batch_size=BATCH,
        block_size=BLOCK,
        batches=None,
        seed=seed,
        device=torch.device("cpu"),
    )
    width = max(1, count // POINTS)
    curve = [
        statistics.fmean(losses[start : start + width])
        for start in range(0, count - width + 1, width)
    ]
    return {
        "loss": result.loss,
        "steps": len(draws),
        "dropped": optimizer.num_dropped,
        "median_norm": statistics.median(norms[len(norms) // 2 :]) if norms else None,
        "micro_batches_a_point": width,
        "training_losses": [round(value, 4) for value in curve],
        "draws": draws[:: max(1, len(draws) // POINTS)],
    }


def unit(result: dict[str, Any], kind: str) -> float:
    """The norm that thresholds are multiples of."""
    return float(result["trials"][kind]["fixed"][name(BATCHES[0], RATES[0])]["median_norm"])


def name(setting: float, rate: float) -> str:
    """The key of a trial."""
    return f"{setting:g}, rate x{rate:g}"


def best(result: dict[str, Any], kind: str, arm: str) -> tuple[float, float]:
    """The trial with the lowest loss."""
    found = result["trials"][kind][arm]
    return min(trials(arm), key=lambda trial: found[name(*trial)]["loss"])


def draw(result: dict[str, Any], path: Path) -> None:
    """Left: the loss of each seed. Right: draws of each step of the first seed over
    micro-batches.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
    for position, (kind, arm) in enumerate(product(KINDS, ARMS)):
        runs = result["runs"][kind][arm]
        label = f"{kind}, {arm}"
        left.plot(
            [position] * len(runs), [each["loss"] for each in runs.values()], "o", label=label
        )
        if draws := next(iter(runs.values()))["draws"]:
            right.step(*zip(*draws, strict=True), where="pre", label=label)
    left.set_xticks(range(4), [f"{kind}\n{arm}" for kind, arm in product(KINDS, ARMS)])
    left.set_ylabel("validation loss, nats a byte")
    right.set_xlabel("micro-batches")
    right.set_ylabel("draws a step")
    right.set_yscale("log", base=2)
    right.legend(frameon=False)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def table(result: dict[str, Any]) -> str:
    """Mean and range of the seeds of each arm, in Markdown."""
    lines = [
        "| model | arm | batch or threshold | steps | validation loss | range |",
        "|---|---|---|---|---|---|",
    ]
    for kind, arm in product(KINDS, ARMS):
        runs = list(result["runs"][kind][arm].values())
        losses = [each["loss"] for each in runs]
        steps = statistics.fmean(each["steps"] for each in runs)
        setting, rate = best(result, kind, arm)
        lines.append(
            f"| {kind} | {arm} | {name(setting, rate)} | {steps:.0f} | "
            f"{statistics.fmean(losses):.4f} | {min(losses):.4f} to {max(losses):.4f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run what is missing: trials, then seeds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--micro-batches", type=int, default=4800, help="of each seed; a trial has half of them"
    )
    options = parser.parse_args()
    out: Path = options.out
    count: int = options.micro_batches
    facts = {
        "command": f"python plugins/arb-ternary-gqc/study/equal_tokens.py --micro-batches {count}",
        "machine": machine_facts(),
        "micro_batches": count,
        "tokens_a_micro_batch": BATCH * BLOCK,
    }
    empty: dict[str, Any] = {
        stage: {kind: {arm: {} for arm in ARMS} for kind in KINDS} for stage in ("trials", "runs")
    }
    result = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {**facts, **empty}
    if result["micro_batches"] != count:
        parser.error(
            f"{out} has runs of {result['micro_batches']} micro-batches; choose another file"
        )

    def once(stage: str, kind: str, arm: str, key: str, *arguments: Any, **options: Any) -> None:
        done = result[stage][kind][arm]
        if key not in done:
            done[key] = run(kind, *arguments, **options)
            print(f"{stage}: {kind}, {arm}, {key}: {done[key]['loss']:.4f}", flush=True)
            partial = out.with_name(out.name + ".part")
            partial.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            partial.replace(out)

    for kind, arm in product(KINDS, ARMS):
        for trial in trials(arm):
            scale = unit(result, kind) if arm == "gnts" else 0.0
            settings = overrides(kind, arm, *trial, count // 2, scale)
            once("trials", kind, arm, name(*trial), settings, count // 2, TUNING_SEED, tuning=True)
    for kind, arm, seed in product(KINDS, ARMS, SEEDS):
        settings = overrides(kind, arm, *best(result, kind, arm), count, unit(result, kind))
        once("runs", kind, arm, str(seed), settings, count, seed, tuning=False)
    draw(result, out.with_suffix(".png"))
    print(table(result))


if __name__ == "__main__":
    main()
