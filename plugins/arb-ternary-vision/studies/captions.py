"""Texts about digits: pure ternary, quantisation-aware training and float32.

    python plugins/arb-ternary-vision/studies/captions.py --work DIR --out RESULT.json [--most N]

The three configs are those of docs/examples. Rates are chosen with the same number of trials each
on a fifth of the training images that is held aside (``tuning: true``); the held-out images take no
part in that. Then three seeds, of weights and order, with the best rate. What is in ``--out``
already is not repeated, so that the study can be made in pieces: with ``--most`` it ends after so
many runs.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any, Final

import torch

from arb_ternary_train.loading import load_config
from arb_ternary_train.progress import Silent
from arb_ternary_train.restore import load_run
from arb_ternary_train.runner import RunRequest, train
from arb_ternary_vision.cli.caption import held_out_images, written

EXAMPLES: Final = Path(__file__).parents[3] / "docs" / "examples"
#: Config, the option that is the rate, and the rates that are tried.
METHODS: Final[dict[str, tuple[str, str, tuple[float, ...]]]] = {
    "pure": ("captions", "optimizer.lr", (0.05, 0.1)),
    "float32": ("captions-float32", "phases.0.lr", (0.001, 0.003)),
    "qat": ("captions-bitnet", "phases.0.lr", (0.001, 0.003)),
}
SEEDS: Final = (0, 1, 2)
TUNING_SEED: Final = 100


def measured(method: str, rate: float, seed: int, tuning: bool, work: Path) -> dict[str, Any]:
    """One run, and what it comes to."""
    name, option, _ = METHODS[method]
    overrides = [f"{option}={rate}", f"seed={seed}", f"data.images.tuning={str(tuning).lower()}"]
    directory = work / f"{method}-{rate}-{seed}{'-tuning' if tuning else ''}"
    started = time.process_time()
    config = load_config(EXAMPLES / f"{name}.yaml", [*overrides, "phases.0.eval_every=500"]).config
    train(config, RunRequest(directory=directory, resume="auto", reporter=Silent))
    seconds = time.process_time() - started
    result = json.loads((directory / "result.json").read_text())
    trained = load_run(directory)
    images, wanted = held_out_images(trained, None)
    texts = written(trained, images, temperature=0.0, seed=0)
    audit = result["audit"]
    return {
        "method": method,
        "rate": rate,
        "seed": seed,
        "tuning": tuning,
        "exact": sum(text == other for text, other in zip(texts, wanted, strict=True)) / len(texts),
        "accuracy": result["validation_metrics"]["accuracy"],
        "loss": result["validation_loss"],
        "parameters": audit["parameters"],
        "float_parameters": audit["float_parameters"],
        "state_bytes": audit["state_bytes"],
        "bits_a_parameter": audit["state_bits_per_parameter"],
        "cpu_seconds": round(seconds, 1),
    }


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
            best = min(tuned, key=lambda each: (-each["exact"], each["loss"]))["rate"]
            if (wanted := (method, best, seed, False)) not in there:
                return wanted
    return None


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
    results: dict[str, Any] = (
        json.loads(arguments.out.read_text()) if arguments.out.exists() else {"runs": []}
    )
    for _ in range(arguments.most):
        if (wanted := missing(results["runs"])) is None:
            break
        results["runs"].append(measured(*wanted, arguments.work))
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")
        print(results["runs"][-1], flush=True)


if __name__ == "__main__":
    main()
