"""Synthetic words: pure ternary, quantisation-aware training and float32, and what a linear
classifier makes of them.

    python plugins/arb-ternary-audio/studies/words.py --work DIR --out RESULT.json [--most N]

The three configs are those of docs/examples. Rates are chosen with the same number of trials each
on a fifth of the training words that is held aside (``tuning: true``), in runs of half the steps;
the held-out words take no part in that. Then three seeds, of weights and order, with the best rate.
What is in ``--out`` already is not repeated, so that the study can be made in pieces: with
``--most`` it ends after so many runs.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from arb_ternary_audio.data import formants
from arb_ternary_audio.data.formants import FormantsConfig
from arb_ternary_train.loading import load_config
from arb_ternary_train.progress import Silent
from arb_ternary_train.runner import RunRequest, train

EXAMPLES: Final = Path(__file__).parents[3] / "docs" / "examples"
#: Config, the option that is the rate, and the rates that are tried.
METHODS: Final[dict[str, tuple[str, str, tuple[float, ...]]]] = {
    "pure": ("words", "optimizer.lr", (0.05, 0.1, 0.14, 0.2)),
    "qat": ("words-bitnet", "phases.0.lr", (0.001, 0.003, 0.01, 0.03)),
    "float32": ("words-float32", "phases.0.lr", (0.001, 0.003, 0.01, 0.03)),
}
SEEDS: Final = (0, 1, 2)
TUNING_SEED: Final = 100


def measured(method: str, rate: float, seed: int, tuning: bool, work: Path) -> dict[str, Any]:
    """One run, and what it comes to."""
    name, option, _ = METHODS[method]
    overrides = [
        f"{option}={rate}",
        f"seed={seed}",
        f"data.tuning={str(tuning).lower()}",
        "phases.0.eval_every=500",
    ]
    if tuning:
        overrides.append("phases.0.steps=250")
    directory = work / f"{method}-{rate}-{seed}{'-tuning' if tuning else ''}"
    started = time.process_time()
    train(
        load_config(EXAMPLES / f"{name}.yaml", overrides).config,
        RunRequest(directory=directory, resume="auto", reporter=Silent),
    )
    result = json.loads((directory / "result.json").read_text())
    audit = result["audit"]
    return {
        "method": method,
        "rate": rate,
        "seed": seed,
        "tuning": tuning,
        "accuracy": result["validation_metrics"]["accuracy"],
        "loss": result["validation_loss"],
        "parameters": audit["parameters"],
        "float_parameters": audit["float_parameters"],
        "state_bytes": audit["state_bytes"],
        "bits_a_parameter": audit["state_bits_per_parameter"],
        "cpu_seconds": round(time.process_time() - started, 1),
    }


def linear_baselines() -> dict[str, Any]:
    """Logistic regression on spectra averaged over time, and on whole pictures; its penalty chosen
    as rates are.
    """
    found: dict[str, Any] = {}
    sources = {
        part: formants.build(FormantsConfig(tuning=part == "tuning"))
        for part in ("tuning", "held_out")
    }
    for features in ("mean spectrum", "whole picture"):
        scores = {}
        for strength in (0.01, 0.1, 1.0):
            for part, source in sources.items():
                parts = []
                for samples in (source.train, source.validation):
                    pictures = samples.data[:, 0].astype(np.float64)
                    parts.append(
                        pictures.mean(axis=2)
                        if features == "mean spectrum"
                        else pictures.reshape(len(pictures), -1)
                    )
                model = make_pipeline(
                    StandardScaler(), LogisticRegression(C=strength, max_iter=1000)
                )
                model.fit(parts[0], source.train.extras["labels"])
                scores[part, strength] = float(
                    model.score(parts[1], source.validation.extras["labels"])
                )
        best = max((0.01, 0.1, 1.0), key=lambda strength: scores["tuning", strength])
        found[features] = {"strength": best, "accuracy": scores["held_out", best]}
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
            best = min(tuned, key=lambda each: (-each["accuracy"], each["loss"]))["rate"]
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
    # The same words are made once, and not for every run.
    formants.synthetic_words = functools.cache(formants.synthetic_words)
    results: dict[str, Any] = (
        json.loads(arguments.out.read_text()) if arguments.out.exists() else {"runs": []}
    )
    if "linear" not in results:
        results["linear"] = linear_baselines()
    for _ in range(arguments.most):
        if (wanted := missing(results["runs"])) is None:
            break
        results["runs"].append(measured(*wanted, arguments.work))
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")
        print(results["runs"][-1], flush=True)


if __name__ == "__main__":
    main()
