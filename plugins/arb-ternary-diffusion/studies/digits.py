"""Digits drawn by a pure ternary model, by quantisation-aware training and in float32: how far they
are from real ones.

    python plugins/arb-ternary-diffusion/studies/digits.py --work DIR --out RESULT.json [--most N]

The three configs are those of docs/examples. Rates are chosen with as many trials each by the loss
on a fifth of the training images that is held aside (``tuning: true``), in runs of 400 steps; the
held-out images take no part in that. Then three seeds, of weights, noise and order, with the best
rate. Of each run as many digits are drawn as are held out, of the same classes, without and with
guidance, and compared with the training images: pixels, and the features of a float convolutional
network that was trained to classify the same images. What is in ``--out`` already is not repeated,
so that the study can be made in pieces: with ``--most`` it ends after so many runs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Final

import torch

from arb_ternary_diffusion.judging import distances, features_of, pixels, real_pictures
from arb_ternary_diffusion.pictures import Sampling, denoiser_of, draw_pictures
from arb_ternary_train.loading import load_config
from arb_ternary_train.progress import Silent
from arb_ternary_train.restore import load_run
from arb_ternary_train.runner import RunRequest, train
from arb_ternary_vision.data.digits import DigitsConfig, build

EXAMPLES: Final = Path(__file__).parents[3] / "docs" / "examples"
#: Config, the option that is the rate, and the rates that are tried.
METHODS: Final[dict[str, tuple[str, str, tuple[float, ...]]]] = {
    "pure": ("diffusion", "optimizer.lr", (0.05, 0.1, 0.2)),
    "qat": ("diffusion-bitnet", "phases.0.lr", (0.001, 0.003, 0.01)),
    "float32": ("diffusion-float32", "phases.0.lr", (0.001, 0.003, 0.01)),
}
TITLES: Final = {"pure": "pure ternary, votes", "qat": "QAT, AdamW", "float32": "float32, AdamW"}
SEEDS: Final = (0, 1, 2)
TUNING_SEED: Final = 100
TUNING_STEPS: Final = 400
GUIDANCE: Final = (1.0, 2.0)
#: The judge: vision's convolutional network in float32.
CLASSIFIER: Final = """
name: judge
seed: 0
data: digits
masking: labels
model: {name: convnet, width: 16, activations: float, float_parts: [embedding, head, norms,
    linears]}
optimizer: adamw
phases: [{name: standard, steps: 300, batch_size: 32, lr: 0.003, warmup_steps: 20, eval_every: 0}]
checkpoint: {every: 300}
"""


def judge_in(work: Path) -> Path:
    """The run of the classifier, made where it is not there yet."""
    config = work / "judge.yaml"
    config.write_text(CLASSIFIER)
    train(
        load_config(config).config,
        RunRequest(directory=work / "judge", resume="auto", reporter=Silent),
    )
    return work / "judge"


def measured(method: str, rate: float, seed: int, tuning: bool, work: Path) -> dict[str, Any]:
    """One run, and what it comes to."""
    name, option, _ = METHODS[method]
    overrides = [f"{option}={rate}", f"seed={seed}", "phases.0.eval_every=100000", "trackers=[]"]
    if tuning:
        overrides += ["data={name: digits, tuning: true}", f"phases.0.steps={TUNING_STEPS}"]
    directory = work / f"{method}-{rate}-{seed}{'-tuning' if tuning else ''}"
    started = time.process_time()
    train(
        load_config(EXAMPLES / f"{name}.yaml", overrides).config,
        RunRequest(directory=directory, resume="auto", reporter=Silent),
    )
    seconds = time.process_time() - started
    result = json.loads((directory / "result.json").read_text())
    audit = result["audit"]
    record = {
        "method": method,
        "rate": rate,
        "seed": seed,
        "tuning": tuning,
        "loss": result["validation_loss"],
        "parameters": audit["parameters"],
        "float_parameters": audit["float_parameters"],
        "state_bytes": audit["state_bytes"],
        "bits_a_parameter": audit["state_bits_per_parameter"],
    }
    if tuning:
        return record
    return {
        **record,
        "cpu_seconds": round(seconds, 1),
        "frechet": judged(directory, judge_in(work)),
    }


def judged(directory: Path, judge: Path) -> dict[str, Any]:
    """Frechet distances of what a run draws, by guidance and by what is compared."""
    trained = load_run(directory)
    classifier = load_run(judge)
    denoiser = denoiser_of(str(directory), trained.config.masking, trained.model)
    real = real_pictures(build(DigitsConfig()))
    assert real.held_out_labels is not None
    compared = {
        "pixels": pixels,
        "features": features_of("judge", classifier.model, classifier.device),
    }
    found: dict[str, Any] = {}
    for guidance in GUIDANCE:
        drawn = draw_pictures(
            denoiser,
            real.held_out_labels,
            Sampling(steps=50, guidance=guidance),
            generator=torch.Generator().manual_seed(0),
            device=trained.device,
        )
        for name, features in compared.items():
            result = distances(drawn, real, features)
            found[f"{name}, guidance {guidance:g}"] = round(result.drawn, 4)
            found[f"{name}, held out"] = round(result.held_out, 4)
    return found


def missing(records: list[dict[str, Any]]) -> tuple[str, float, int, bool] | None:
    """The next run that there is no record of: of all methods the rates first, then the seeds."""
    there = {(each["method"], each["rate"], each["seed"], each["tuning"]) for each in records}
    for method, (_, _, rates) in METHODS.items():
        for rate in rates:
            if (wanted := (method, rate, TUNING_SEED, True)) not in there:
                return wanted
    for seed in SEEDS:
        for method in METHODS:
            tuned = [each for each in records if each["method"] == method and each["tuning"]]
            best = min(tuned, key=lambda each: each["loss"])["rate"]
            if (wanted := (method, best, seed, False)) not in there:
                return wanted
    return None


def table(results: Mapping[str, Any]) -> str:
    """The results as a Markdown table, with what was measured below it."""
    columns = {
        method: [
            each for each in results["runs"] if each["method"] == method and not each["tuning"]
        ]
        for method in METHODS
    }
    first = {method: records[0] for method, records in columns.items()}
    rows = {
        "Frechet distance of pixels": [spread(c, "pixels, guidance 1") for c in columns.values()],
        "the same with guidance 2": [spread(c, "pixels, guidance 2") for c in columns.values()],
        "Frechet distance of a classifier's features": [
            spread(c, "features, guidance 1") for c in columns.values()
        ],
        "the same with guidance 2 ": [spread(c, "features, guidance 2") for c in columns.values()],
        "parameters": [f"{each['parameters']:,}" for each in first.values()],
        "of these float": [f"{each['float_parameters']:,}" for each in first.values()],
        "training state, bytes": [f"{each['state_bytes']:,}" for each in first.values()],
        "training state, bits a parameter": [
            f"{each['bits_a_parameter']:.2f}" for each in first.values()
        ],
        "chosen rate": [f"{each['rate']:g}" for each in first.values()],
        "seeds": [str(len(c)) for c in columns.values()],
    }
    head = [
        "| | " + " | ".join(TITLES[method] for method in columns) + " |",
        "|---|" + "---:|" * len(columns),
    ]
    lines = [f"| {name.strip()} | {' | '.join(cells)} |" for name, cells in rows.items()]
    real = first["pure"]["frechet"]
    note = (
        "359 drawn digits, of the classes of the held-out ones, against the training digits; "
        "held-out digits themselves"
        f" lie {real['pixels, held out']:.2f} (pixels) and {real['features, held out']:.2f} "
        f"(features) from them, "
        "which is as near as pictures can come. Means and standard deviations of the seeds. Rates "
        "are chosen among "
        f"{len(METHODS['pure'][2])} each, in runs of {TUNING_STEPS} steps, on a fifth of the "
        f"training digits held "
        f"aside. {results['machine']}, one thread. Command: `python "
        f"plugins/arb-ternary-diffusion/studies/digits.py "
        "--work DIR --out plugins/arb-ternary-diffusion/results/digits.json`."
    )
    return "\n".join([*head, *lines, "", note])


def spread(records: list[dict[str, Any]], distance: str) -> str:
    """Mean and, of several, standard deviation of a distance."""
    values = [each["frechet"][distance] for each in records]
    return f"{mean(values):.2f}" + (f" ± {stdev(values):.2f}" if len(values) > 1 else "")


def processor() -> str:
    """What the machine calls its processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def main() -> None:
    """Make the runs that are missing, and write the results after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder for run directories")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the results")
    parser.add_argument("--most", type=int, default=1000, help="runs to make at most")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for folder in (arguments.work, arguments.out.parent):
        folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = (
        json.loads(arguments.out.read_text()) if arguments.out.exists() else {"runs": []}
    )
    results["machine"] = f"{processor()}, {os.cpu_count()} cores, torch {torch.__version__}"
    for _ in range(arguments.most):
        if (wanted := missing(results["runs"])) is None:
            break
        results["runs"].append(measured(*wanted, arguments.work))
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")
        print(results["runs"][-1], flush=True)


if __name__ == "__main__":
    main()
