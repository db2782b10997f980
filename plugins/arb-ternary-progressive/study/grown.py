"""A rack that grows, with the activation cache and without it, against the same depth trained end
to end.

The text is the beginning of the built-in training text. Stacks have one block. The grown arms go
``--epochs`` times over the text for each stack, with the trunk frozen; the end-to-end arm has all
blocks from the start and takes as many steps, so that all arms train on equal numbers of tokens.
Every arm has the model and the optimizer of ``float.yaml`` or ``ternary.yaml``. One number is
chosen for the grown arms and one for the end-to-end arm, each from four trials of half the steps,
with a seed of their own and with the last twentieth of the training text in place of the validation
text: the factor on all learning rates. The best is run with three seeds.

The table has wall time and memory of a frozen trunk with the cache and without it, at 2, 4 and 8
stacks.

Every run is a process of its own. Losses are in nats a byte. Seconds are those of training, without
evaluations; memory is the largest resident memory of the process, libraries included. A run that is
in the file already is not repeated; every finished run is written at once. Draws the losses over
the tokens, with the moments of growth, beside the file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from arb_ternary_bench.child import ChildRun
from arb_ternary_bench.compare import machine_facts
from arb_ternary_text.data.sampler import window_count
from arb_ternary_text.data.shakespeare import load_text
from arb_ternary_train.config_file import read_document
from arb_ternary_train.metrics import read_metrics

HERE = Path(__file__).parent
KINDS = ("float", "ternary")
ARMS = ("cached", "recomputed", "end to end")
RATES = (0.5, 1.0, 2.0, 4.0)
TUNING_SEED = 1000
STACKS = 4
BATCH = 16
BLOCK = 128
#: Of the text that all arms train on: little enough that samples come again.
TRAIN_BYTES = 250_000
#: Points of a curve of the training loss.
POINTS = 200


def overrides(kind: str, arm: str, rate: float, stacks: int, steps: int) -> list[str]:
    """What makes the base config of ``kind`` that of a run of ``stacks`` stacks, of ``steps`` steps
    each.
    """
    plain = read_document(HERE / f"{kind}.yaml").data["optimizer"]
    for part in [plain] if kind == "float" else [plain["ternary"], plain["float"]]:
        part["lr"] = part["lr"] * rate
    phase: dict[str, Any] = {
        "batch_size": BATCH,
        "block_size": BLOCK,
        "eval_every": 10**9,
        "log_every": 1000,
    }
    if arm == "end to end":
        phase |= {"name": "standard", "steps": steps * stacks}
    else:
        phase |= {"name": "progressive", "target_stacks": stacks, "steps_per_stack": steps}
        phase |= {"cache_activations": arm == "cached"}
    changes = [f"optimizer={json.dumps(plain)}", f"phases=[{json.dumps(phase)}]"]
    return [*changes, f"model.layers={stacks}"] if arm == "end to end" else changes


def texts(*, tuning: bool) -> tuple[str, str]:
    """Training and validation text; to tune, the end of the training text in place of the
    validation text.
    """
    content = load_text("train")[:TRAIN_BYTES]
    cut = len(content) - len(content) // 20
    return (content[:cut], content[cut:]) if tuning else (content, load_text("validation"))


def run(kind: str, settings: list[str], seed: int, *, tuning: bool) -> dict[str, Any]:
    """Train in a process of its own; losses, seconds, memory, and the moments of growth."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("train.txt", "validation.txt")]
        for file, text in zip(files, texts(tuning=tuning), strict=True):
            file.write_text(text, encoding="utf-8")
        data = {"name": "text", "path": str(files[0]), "validation": str(files[1])}
        given = [*settings, f"seed={seed}", f"data={json.dumps(data)}"]
        child = ChildRun.start(HERE / f"{kind}.yaml", Path(folder) / "run", given)
        ended = child.wait()
        if ended.code:
            sys.exit(f"{kind}, {settings}: exit code {ended.code}\n{child.log_tail()}")
        report = child.report()
        records = read_metrics(child.directory / "metrics.jsonl")
    steps = [record for record in records if record["event"] == "train"]
    width = max(1, len(steps) // POINTS)
    chunks = [steps[start : start + width] for start in range(0, len(steps) - width + 1, width)]
    growth = [
        first["tokens"]
        for first, second in pairwise(steps)
        if first.get("stack") != second.get("stack")
    ]
    return {
        "loss": report["validation_loss"],
        "tokens": report["tokens"],
        "steps": report["steps"],
        "seconds": round(report["tokens"] / report["tokens_per_second"], 2),
        "peak_bytes": ended.peak_bytes,
        "parameters": report["audit"]["parameters"],
        "curve_tokens": [chunk[-1]["tokens"] for chunk in chunks],
        "curve_losses": [
            round(statistics.fmean(each["loss"] for each in chunk), 4) for chunk in chunks
        ],
        "growth": growth,
    }


def steps_of(epochs: int, *, tuning: bool) -> int:
    """Steps of one stack."""
    return max(1, epochs * window_count(len(texts(tuning=tuning)[0]), BLOCK) // BATCH)


def name(rate: float) -> str:
    """The key of a trial."""
    return f"rate x{rate:g}"


def best(result: dict[str, Any], kind: str, arm: str) -> float:
    """The factor on learning rates that had the lowest loss. With and without the cache losses are
    the same.
    """
    found = result["trials"][kind]["end to end" if arm == "end to end" else "cached"]
    return min(RATES, key=lambda rate: float(found[name(rate)]["loss"]))


def draw(result: dict[str, Any], path: Path) -> None:
    """Training loss over tokens of one seed of each arm, the moments of growth marked, and every
    seed's final loss.
    """
    figure, axes = plt.subplots(1, len(KINDS), figsize=(9.5, 4), layout="constrained", sharey=True)
    for panel, kind in zip(axes, KINDS, strict=True):
        for arm, colour in (("cached", "C0"), ("end to end", "C1")):
            runs = list(result["runs"][kind][arm].values())
            first = runs[0]
            label = "grown" if arm == "cached" else arm
            panel.plot(
                [each / 1e6 for each in first["curve_tokens"]],
                first["curve_losses"],
                colour,
                label=label,
            )
            ends = [each["loss"] for each in runs]
            panel.plot([first["tokens"] / 1e6] * len(ends), ends, "o", color=colour, markersize=4)
            for position, tokens in enumerate(first["growth"]):
                panel.axvline(
                    tokens / 1e6,
                    color="0.6",
                    linestyle=":",
                    label="a stack is added" if not position else None,
                )
        panel.set_title(kind)
        panel.set_xlabel("tokens, millions")
        panel.grid(alpha=0.3)
    axes[0].set_ylabel("loss, nats a byte")
    axes[0].plot([], [], "ok", markersize=4, label="validation, each seed")
    axes[0].legend(frameon=False)
    axes[-1].legend(frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def loss_table(result: dict[str, Any]) -> str:
    """Loss, time and memory of each arm, over its seeds, in Markdown."""
    lines = [
        "| model | arm | validation loss | range | seconds | memory, MiB | tokens |",
        "|---|---|---:|---|---:|---:|---:|",
    ]
    for kind, arm in product(KINDS, ARMS):
        runs = list(result["runs"][kind][arm].values())
        losses = [each["loss"] for each in runs]
        lines.append(
            f"| {kind} | {'grown, ' if arm != 'end to end' else ''}{arm} | "
            f"{statistics.fmean(losses):.4f} | {min(losses):.4f} to {max(losses):.4f} | "
            f"{statistics.median(each['seconds'] for each in runs):,.0f} | "
            f"{max(each['peak_bytes'] for each in runs) / 2**20:,.0f} | {runs[0]['tokens']:,} |"
        )
    return "\n".join(lines)


def cost_table(result: dict[str, Any]) -> str:
    """Wall time and memory with the cache and without it, by number of stacks, in Markdown."""
    lines = [
        "| model | stacks | seconds, recomputed | cached | saved | memory, MiB, recomputed | "
        "cached |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for kind in KINDS:
        for stacks, arms in result["costs"][kind].items():
            without = arms["recomputed"]
            cached = arms["cached"]
            lines.append(
                f"| {kind} | {stacks} | {without['seconds']:,.0f} | {cached['seconds']:,.0f} | "
                f"{1 - cached['seconds'] / without['seconds']:.0%} | "
                f"{without['peak_bytes'] / 2**20:,.0f} | {cached['peak_bytes'] / 2**20:,.0f} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Run what is missing: trials, seeds, costs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--epochs", type=int, default=2, help="passes over the training text for each stack"
    )
    parser.add_argument(
        "--steps", type=int, help="steps of each stack, in place of passes; for trying this out"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--cost-stacks", type=int, nargs="+", default=[2, 4, 8])
    options = parser.parse_args()
    out: Path = options.out
    steps = {
        tuning: options.steps or steps_of(options.epochs, tuning=tuning) for tuning in (True, False)
    }
    facts = {
        "command": f"python plugins/arb-ternary-progressive/study/grown.py --epochs "
        f"{options.epochs}",
        "machine": machine_facts(),
        "steps_a_stack": steps[False],
        "stacks": STACKS,
        "tokens_a_step": BATCH * BLOCK,
        "train_bytes": TRAIN_BYTES,
    }
    empty: dict[str, Any] = {
        stage: {kind: {arm: {} for arm in ARMS} for kind in KINDS} for stage in ("trials", "runs")
    }
    empty["costs"] = {kind: {} for kind in KINDS}
    result = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {**facts, **empty}
    if result["steps_a_stack"] != steps[False]:
        parser.error(
            f"{out} has runs of {result['steps_a_stack']} steps a stack; choose another file"
        )

    def once(done: dict[str, Any], key: str, label: str, *arguments: Any, **more: Any) -> None:
        if key not in done:
            done[key] = run(*arguments, **more)
            print(
                f"{label}, {key}: loss {done[key]['loss']:.4f}, {done[key]['seconds']:.0f} s",
                flush=True,
            )
            partial = out.with_name(out.name + ".part")
            partial.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            partial.replace(out)

    for kind, arm, rate in product(KINDS, ("cached", "end to end"), RATES):
        settings = overrides(kind, arm, rate, STACKS, max(1, steps[True] // 2))
        once(
            result["trials"][kind][arm],
            name(rate),
            f"trial: {kind}, {arm}",
            kind,
            settings,
            TUNING_SEED,
            tuning=True,
        )
    # Arms take turns, so that a machine whose speed drifts is as kind to one as to the others.
    for kind, seed, arm in product(KINDS, options.seeds, ARMS):
        settings = overrides(kind, arm, best(result, kind, arm), STACKS, steps[False])
        once(
            result["runs"][kind][arm],
            str(seed),
            f"run: {kind}, {arm}",
            kind,
            settings,
            seed,
            tuning=False,
        )
    for kind, stacks, arm in product(KINDS, options.cost_stacks, ("recomputed", "cached")):
        settings = overrides(kind, arm, best(result, kind, arm), stacks, steps[False])
        done = result["costs"][kind].setdefault(str(stacks), {})
        if stacks == STACKS:
            runs = sorted(result["runs"][kind][arm].values(), key=lambda each: each["seconds"])
            done[arm] = runs[len(runs) // 2]
        once(
            done,
            arm,
            f"cost: {kind}, {stacks} stacks",
            kind,
            settings,
            options.seeds[0],
            tuning=False,
        )
    for kind in KINDS:
        pairs = zip(
            result["runs"][kind]["cached"].values(),
            result["runs"][kind]["recomputed"].values(),
            strict=True,
        )
        if any(cached["curve_losses"] != other["curve_losses"] for cached, other in pairs):
            sys.exit(f"{kind}: the losses with the cache differ from those without it")
    draw(result, out.with_suffix(".png"))
    print(loss_table(result))
    print(cost_table(result))


if __name__ == "__main__":
    main()
