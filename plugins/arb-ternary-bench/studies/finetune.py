"""A published ternary model, fine-tuned by votes and by quantisation-aware training: the same
start, text and steps.

    python plugins/arb-ternary-bench/studies/finetune.py --work DIR --out RESULT.json

Of each seed a small BitNet is trained on the built-in text with float masters (plugin qat), and
then meets a text that it has not seen, the topics of Python's own ``help()``:

* ``qat`` goes on from its float masters, with AdamW;
* ``votes`` knows only what is published: the packed export of the plugin hf, imported, learns by
  votes. ``votes`` keeps the float embedding, which AdamW trains; ``votes_pure`` makes it ternary
  too.

Rates are chosen with seed 0 on a part of the training text that is held aside; the last tenth of
the text, on which the losses are measured, takes no part in that. What is in ``--work`` already is
not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from arb_ternary_bench.child import ChildRun
from arb_ternary_bench.compare import machine_facts
from arb_ternary_bench.texts import divide_text, help_topics

BITNET = Path(__file__).parents[3] / "docs" / "examples" / "bitnet.yaml"
SEEDS: Final = (0, 1, 2)
PUBLISHED: Final = ("model.architecture=bitnet", "model.query_key_norm=null")
#: Rates that are tried: of AdamW for the float masters, of votes for the trits.
RATES: Final[dict[str, tuple[float, ...]]] = {
    "qat": (0.002, 0.004, 0.008, 0.016),
    "votes": (0.05, 0.1, 0.2),
    "votes_pure": (0.05, 0.1, 0.2),
}
#: Of the float embedding beside votes.
EMBEDDING_RATE: Final = 0.004
#: A rate that changes next to nothing in the one step after which the loss before any is measured.
NO_RATE: Final = 1e-6


def arb(*arguments: str | Path) -> None:
    """One command of the program."""
    subprocess.run([sys.executable, "-m", "arb_ternary.cli.main", *map(str, arguments)], check=True)


def trained(config: Path, directory: Path, overrides: list[str]) -> dict[str, Any]:
    """The report of a run, which is made where it is not there yet."""
    if not (directory / "result.json").exists():
        child = ChildRun.start(config, directory, overrides, resume=True, threads=1)
        if ended := child.wait().code:
            sys.exit(f"{directory}: the run ended with {ended}\n{child.log_tail()}")
    report: dict[str, Any] = json.loads((directory / "result.json").read_text(encoding="utf-8"))
    return report


class Study:
    """The runs of one seed in a folder of their own."""

    def __init__(self, work: Path, seed: int, steps: int, texts: Mapping[str, Path]) -> None:
        self.folder = work / f"seed-{seed}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.seed = seed
        self.steps = steps
        self.texts = texts

    def publish(self) -> float:
        """Pretrain, export and import; the loss of the pretrained model on its own text."""
        base = self.folder / "base"
        report = trained(BITNET, base, [*PUBLISHED, f"seed={self.seed}"])
        published = self.folder / "published"
        if not published.exists():
            arb("export", base, published, "--format", "hf", "--layout", "packed")
        for name, sources in (("votes", "keep"), ("votes_pure", "ternary")):
            if not (self.folder / f"imported-{name}").exists():
                imported = self.folder / f"imported-{name}"
                arb(
                    "import",
                    published,
                    imported,
                    "--scales",
                    "float",
                    "-o",
                    f"float_sources={sources}",
                )
        return float(report["validation_loss"])

    def tuned(
        self, rule: str, rate: float, measured_on: str, steps: int | None = None
    ) -> dict[str, Any]:
        """The report of one fine-tuning."""
        steps = self.steps if steps is None else steps
        source = self.folder / ("base" if rule == "qat" else f"imported-{rule}")
        phase = {
            "name": "standard",
            "steps": steps,
            "batch_size": 8,
            "block_size": 128,
            "lr_schedule": "linear",
            "warmup_steps": steps // 20,
            "eval_every": steps,
            "eval_batches": 1,
            "log_every": 100,
            "init_from": str(source),
        }
        optimizer: dict[str, Any] = {"name": "scaled_votes", "lr": rate}
        if rule == "qat":
            optimizer = {"name": "bitnet_adamw", "lr": rate, "weight_decay": 0.01}
            phase["grad_clip"] = 1.0
        elif rule == "votes":
            optimizer = {
                "name": "split",
                "ternary": optimizer,
                "float": {"name": "adamw", "lr": EMBEDDING_RATE},
            }
        data = {"name": "text", "path": self.texts["train"], "validation": self.texts[measured_on]}
        overrides = {
            "seed": self.seed,
            "threads": 1,
            "data": data,
            "optimizer": optimizer,
            "phases": [phase],
        }
        overrides["checkpoint"] = {"every": 0}
        text = [f"{key}={json.dumps(value, default=str)}" for key, value in overrides.items()]
        directory = self.folder / f"{rule}-{rate}-{measured_on}-{steps}"
        return trained(source / "config.yaml", directory, [*text, "checks=[]"])


def main() -> None:
    """Choose rates with seed 0, run all seeds, write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--out", type=Path, required=True, help="the result, JSON")
    parser.add_argument(
        "--steps", type=int, default=400, help="of a fine-tuning (default: %(default)s)"
    )
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    texts = divide_text(help_topics(), arguments.work)
    studies = {seed: Study(arguments.work, seed, arguments.steps, texts) for seed in SEEDS}
    pretrained = {0: studies[0].publish()}
    trials = {
        rule: {rate: studies[0].tuned(rule, rate, "choice")["validation_loss"] for rate in rates}
        for rule, rates in RATES.items()
    }
    pretrained |= {seed: studies[seed].publish() for seed in SEEDS[1:]}
    result: dict[str, Any] = {
        "command": f"{Path(__file__).name} --steps {arguments.steps}",
        "machine": machine_facts(),
        "pretrained_validation_loss": pretrained,
        "rules": {},
    }
    for rule, losses_by_rate in trials.items():
        rate = min(losses_by_rate, key=lambda rate: losses_by_rate[rate])
        reports = {seed: study.tuned(rule, rate, "validation") for seed, study in studies.items()}
        before = {
            seed: study.tuned(rule, NO_RATE, "validation", steps=1)
            for seed, study in studies.items()
        }
        losses = {seed: report["validation_loss"] for seed, report in reports.items()}
        result["rules"][rule] = {
            "trials": losses_by_rate,
            "rate": rate,
            "before": {seed: report["validation_loss"] for seed, report in before.items()},
            "losses": losses,
            "mean": statistics.fmean(losses.values()),
            "standard_deviation": statistics.stdev(losses.values()),
            "state_bytes": reports[0]["audit"]["state_bytes"],
            "state_bits_per_parameter": reports[0]["audit"]["state_bits_per_parameter"],
            "linears": reports[0]["linears"],
        }
        print(rule, json.dumps(result["rules"][rule]), flush=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
