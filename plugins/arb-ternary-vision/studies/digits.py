"""Handwritten digits: pure ternary, quantisation-aware training, float32, and what a linear
classifier makes of them.

    python plugins/arb-ternary-vision/studies/digits.py --work DIR --out RESULT.json [--most N]
    python plugins/arb-ternary-vision/studies/digits.py --out RESULT.json --figure FIGURE.png

The three configs are those of docs/examples. Rates are chosen with the same number of trials each
on a fifth of the training images that is held aside (``tuning: true``), by accuracy and then by
loss; the held-out images take no part in that. Then three seeds, of weights and order, with the
best rate. What is in ``--out`` already is not repeated, so that the study can be made in pieces:
with ``--most`` it ends after so many runs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

EXAMPLES: Final = Path(__file__).parents[3] / "docs" / "examples"
#: Config, the option that is the rate, and the rates that are tried.
METHODS: Final[dict[str, tuple[str, str, tuple[float, ...]]]] = {
    "pure": ("digits", "optimizer.lr", (0.1, 0.2, 0.4)),
    "qat": ("digits-bitnet", "phases.0.lr", (0.003, 0.01, 0.03)),
    "float32": ("digits-float32", "phases.0.lr", (0.003, 0.01, 0.03)),
}
TITLES: Final = {"pure": "pure ternary, votes", "qat": "QAT, AdamW", "float32": "float32, AdamW"}
#: Penalties of the linear classifier, of which one is chosen as rates are.
STRENGTHS: Final = (0.001, 0.01, 0.1)
SEEDS: Final = (0, 1, 2)
TUNING_SEED: Final = 100


def measured(method: str, rate: float, seed: int, tuning: bool, work: Path) -> dict[str, Any]:
    """One run, and what it comes to."""
    from arb_ternary_train.loading import load_config
    from arb_ternary_train.metrics import read_metrics
    from arb_ternary_train.progress import Silent
    from arb_ternary_train.runner import RunRequest, train

    name, option, _ = METHODS[method]
    overrides = [
        f"{option}={rate}",
        f"seed={seed}",
        f"data.tuning={str(tuning).lower()}",
        "trackers=[]",
    ]
    directory = work / f"{method}-{rate}-{seed}{'-tuning' if tuning else ''}"
    started = time.process_time()
    train(
        load_config(EXAMPLES / f"{name}.yaml", overrides).config,
        RunRequest(directory=directory, resume="auto", reporter=Silent),
    )
    result = json.loads((directory / "result.json").read_text())
    curve = [
        each for each in read_metrics(directory / "metrics.jsonl") if each["event"] == "validation"
    ]
    audit = result["audit"]
    return {
        "method": method,
        "rate": rate,
        "seed": seed,
        "tuning": tuning,
        "accuracy": result["validation_metrics"]["accuracy"],
        "loss": result["validation_loss"],
        "steps": result["steps"],
        "curve": {str(each["step"]): each["accuracy"] for each in curve},
        "parameters": audit["parameters"],
        "float_parameters": audit["float_parameters"],
        "state_bytes": audit["state_bytes"],
        "bits_a_parameter": audit["state_bits_per_parameter"],
        "linears": result["linears"],
        "cpu_seconds": round(time.process_time() - started, 1),
    }


def linear_classifier() -> dict[str, Any]:
    """Logistic regression on the pixels."""
    import numpy as np
    from sklearn.linear_model import LogisticRegression

    from arb_ternary_vision.data.digits import DigitsConfig, build

    scores = {}
    for tuning in (True, False):
        source = build(DigitsConfig(tuning=tuning))
        parts = [
            each.data.reshape(len(each), -1).astype(np.float64)
            for each in (source.train, source.validation)
        ]
        labels = [each.extras["labels"] for each in (source.train, source.validation)]
        for strength in STRENGTHS:
            model = LogisticRegression(C=strength, max_iter=2000).fit(parts[0], labels[0])
            scores[tuning, strength] = float(model.score(parts[1], labels[1]))
    best = max(STRENGTHS, key=lambda strength: scores[True, strength])
    return {"strength": best, "accuracy": scores[False, best]}


def missing(records: Sequence[Mapping[str, Any]]) -> tuple[str, float, int, bool] | None:
    """The next run that there is no record of: of all methods the rates first, then the seeds."""
    there = {(each["method"], each["rate"], each["seed"], each["tuning"]) for each in records}
    for method, (_, _, rates) in METHODS.items():
        for rate in rates:
            if (wanted := (method, rate, TUNING_SEED, True)) not in there:
                return wanted
    for seed in SEEDS:
        for method in METHODS:
            tuned = [each for each in records if each["method"] == method and each["tuning"]]
            best = min(tuned, key=lambda each: (-each["accuracy"], each["loss"]))["rate"]
            if (wanted := (method, best, seed, False)) not in there:
                return wanted
    return None


def of_method(results: Mapping[str, Any], method: str) -> list[Mapping[str, Any]]:
    """The records of the seeds."""
    return [each for each in results["runs"] if each["method"] == method and not each["tuning"]]


def spread(values: Sequence[float], form: str) -> str:
    """Mean and standard deviation."""
    return f"{statistics.mean(values):{form}} ± {statistics.stdev(values):{form}}"


def table(results: Mapping[str, Any]) -> str:
    """The results as a Markdown table, with what was measured below it."""
    columns = {method: of_method(results, method) for method in METHODS}
    first = {method: records[0] for method, records in columns.items()}
    rows = {
        "held-out accuracy, %": [
            spread([100 * each["accuracy"] for each in c], ".2f") for c in columns.values()
        ],
        "held-out loss, nats an image": [
            spread([each["loss"] for each in c], ".3f") for c in columns.values()
        ],
        "parameters": [f"{each['parameters']:,}" for each in first.values()],
        "of these float": [f"{each['float_parameters']:,}" for each in first.values()],
        "training state, bytes": [f"{each['state_bytes']:,}" for each in first.values()],
        "training state, bits a parameter": [
            f"{each['bits_a_parameter']:.2f}" for each in first.values()
        ],
        "training state, bits a weight of the blocks' convolutions": [
            f"{each['linears']['state_bits_per_weight']:.2f}" for each in first.values()
        ],
        "gradients between backward and step, bytes": [
            f"{each['linears']['gradient_bytes']:,}" for each in first.values()
        ],
        "seconds of one core a run": [
            f"{statistics.median(each['cpu_seconds'] for each in c):.0f}" for c in columns.values()
        ],
        "chosen rate": [f"{each['rate']:g}" for each in first.values()],
    }
    head = [
        "| | " + " | ".join(TITLES[method] for method in columns) + " |",
        "|---|" + "---:|" * len(columns),
    ]
    lines = [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()]
    machine = results["machine"]
    one = first["pure"]
    note = (
        f"The network of `docs/examples/digits.yaml`, {one['steps']} steps of 32 images; means and "
        f"standard deviations of {len(columns['pure'])} seeds on 359 held-out images, of which one "
        f"is 0.28 %. Rates are chosen among {len(METHODS['pure'][2])} each on training images held "
        "aside. Logistic regression on the pixels reaches "
        f"{100 * results['linear']['accuracy']:.2f} %. Command: `python "
        "plugins/arb-ternary-vision/studies/digits.py --work DIR --out "
        f"plugins/arb-ternary-vision/results/digits.json`. Machine: {machine['processor']}, "
        f"{machine['cores']} cores, torch {machine['torch']}; one thread."
    )
    return "\n".join([*head, *lines, "", note])


def draw(results: Mapping[str, Any], destination: Path) -> None:
    """Accuracy over steps of every seed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.0), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for colour, method in zip(("#0072B2", "#D55E00", "#009E73"), METHODS, strict=True):
        for place, record in enumerate(of_method(results, method)):
            steps = [int(step) for step in record["curve"]]
            label = TITLES[method] if place == 0 else None
            axes.plot(
                steps,
                [100 * value for value in record["curve"].values()],
                color=colour,
                marker="o",
                label=label,
            )
    axes.axhline(100 * results["linear"]["accuracy"], color="0.35", linestyle="--", linewidth=1)
    axes.annotate(
        "logistic regression",
        (0.01, 100 * results["linear"]["accuracy"]),
        xycoords=("axes fraction", "data"),
        xytext=(2, 3),
        textcoords="offset points",
        fontsize=8,
        color="0.35",
    )
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("held-out accuracy, %")
    axes.grid(color="0.9", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(edgecolor="none", loc="lower right", fontsize=9)
    figure.savefig(destination)


def processor() -> str:
    """What the machine calls its processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(
            line.partition(":")[2].strip() for line in lines if line.startswith("model name")
        )
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def main() -> None:
    """Make the runs that are missing, and write the results after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, help="folder for run directories")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the results")
    parser.add_argument("--most", type=int, default=1000, help="runs to make at most")
    parser.add_argument("--figure", type=Path, help="draw what is in --out, and make no run")
    arguments = parser.parse_args()
    results: dict[str, Any] = (
        json.loads(arguments.out.read_text()) if arguments.out.exists() else {"runs": []}
    )
    if arguments.figure is not None:
        draw(results, arguments.figure)
        return
    if arguments.work is None:
        parser.error("--work: say where runs may be written")
    import torch

    torch.set_num_threads(1)
    results["machine"] = {
        "processor": processor(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
    }
    if "linear" not in results:
        results["linear"] = linear_classifier()
    for _ in range(arguments.most):
        if (wanted := missing(results["runs"])) is None:
            break
        results["runs"].append(measured(*wanted, arguments.work))
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")
        print(results["runs"][-1], flush=True)


if __name__ == "__main__":
    main()
