"""A small float teacher becomes ternary: after each phase, beside the same ternary model trained
from scratch.

    python plugins/arb-ternary-upcycle/studies/small.py --work DIR --out RESULT.json

The teacher, a Llama of a million parameters, is trained on the built-in text but for its last
twentieth. The student has its shapes; every weight in its blocks is ternary, embedding and head
stay float. It is upcycled by projection, blockwise and global, and trained from scratch on as many
tokens as blockwise and global take together. Rates are chosen with seed 0 on the last twentieth of
the training text, which the teacher has not seen, with a part of the steps; losses are those on the
validation text. Runs that are in ``--work`` already are not repeated, and one that was stopped goes
on.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
import yaml

from arb_ternary.errors import ArbError
from arb_ternary_train.directory import RunDirectory
from arb_ternary_train.loading import load_config
from arb_ternary_train.restore import load_run
from arb_ternary_train.runner import RunRequest, train

BATCH: Final = 8
BLOCK: Final = 128
SHAPE: Final[Mapping[str, Any]] = {
    "name": "decoder",
    "architecture": "llama",
    "width": 160,
    "layers": 3,
    "heads": 5,
    "feed_forward": 432,
    "max_length": BLOCK,
}
TEACHER: Final = {
    **SHAPE,
    "float_parts": ["embedding", "head", "norms", "linears"],
    "activations": "float",
}
STUDENT: Final = {
    **SHAPE,
    "group_size": "row",
    "scale_rule": "frozen",
    "float_parts": ["embedding", "head"],
}
#: Of AdamW, for the student's embedding and head.
FLOAT_RATE: Final = 0.002
#: Rates of votes that are tried, and the share of the steps that a trial takes.
RATES: Final[Mapping[str, Sequence[float]]] = {
    "blockwise": (0.005, 0.02),
    "global": (0.02, 0.05),
    "scratch": (0.1, 0.2),
}
TRIAL: Final = 0.4
#: Batches of validation text: 32,768 predictions, spread evenly.
MEASURED: Final = 32
#: Distillation in the global phase.
KD: Final = {"kd_weight": 1.0, "kd_temperature": 1.0}


class Study:
    """The runs, each in a folder of its own.

    Args:
        work: where they lie.
        steps: of ``teacher``, ``blockwise`` (a block) and ``global``.
    """

    def __init__(self, work: Path, steps: Mapping[str, int]) -> None:
        self.work = work
        self.steps = steps
        self.measured: dict[str, dict[str, float]] = {}

    def run(
        self,
        name: str,
        phases: Sequence[Mapping[str, Any]],
        model: Mapping[str, Any],
        optimizer: Mapping[str, Any],
        *,
        seed: int = 0,
        tuning: bool = False,
        start: Path | None = None,
    ) -> Path:
        """The run ``name``, which is made or finished where it is not there yet."""
        directory = RunDirectory(self.work / name)
        if directory.result_file.exists():
            return directory.path
        config = {
            "name": name.replace("/", "-"),
            "seed": seed,
            "threads": 1,
            "model": dict(model),
            "data": {"name": "shakespeare", "tokenizer": "bytes", "tuning": tuning},
            "optimizer": dict(optimizer),
            "phases": [dict(phase) for phase in phases],
            "checkpoint": {"every": 200, "keep": 1},
        }
        file = self.work / "configs" / f"{name.replace('/', '-')}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(yaml.safe_dump(config), encoding="utf-8")
        request: dict[str, Any] = {"resume": "auto"} if directory.exists() else {"init_from": start}
        began = time.perf_counter()
        train(load_config(file).config, RunRequest(directory=directory.path, **request))
        print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
        return directory.path

    def teacher(self) -> Path:
        """The float teacher."""
        optimizer = {"name": "adamw", "lr": 0.003}
        phase = training("standard", self.steps["teacher"], grad_clip=1.0)
        return self.run("teacher", [phase], TEACHER, optimizer, tuning=True)

    def projected(self, name: str, policy: str, **options: Any) -> Path:
        """A student whose weights are the teacher's, rounded."""
        projection = {
            "name": "projection",
            "policy": policy,
            "block_size": BLOCK,
            "correction": policy == "gptq_cd",
        }
        prepare = [
            {"name": "load_teacher", "teacher": str(self.teacher())},
            {"name": "fold_rotate"},
        ]
        return self.run(f"{name}-{policy}", [*prepare, projection], STUDENT, votes(0.1), **options)

    def blockwise(
        self, name: str, start: Path, rate: float, share: float = 1.0, **options: Any
    ) -> Path:
        """``start``, trained block by block."""
        steps = round(self.steps["blockwise"] * share)
        phase = training("blockwise", steps, cache_teacher_outputs=True)
        return self.run(
            f"{name}-blockwise-{rate}", [phase], STUDENT, votes(rate), start=start, **options
        )

    def whole(
        self, name: str, start: Path, rate: float, share: float = 1.0, **options: Any
    ) -> Path:
        """``start``, trained as a whole beside its teacher."""
        phase = training("global", round(self.steps["global"] * share), force=True, **KD)
        return self.run(
            f"{name}-global-{rate}", [phase], STUDENT, votes(rate), start=start, **options
        )

    def scratch(self, name: str, rate: float, share: float = 1.0, **options: Any) -> Path:
        """The same ternary model without a teacher, on as many tokens."""
        phase = training("standard", round(self.student_steps * share))
        return self.run(f"{name}-scratch-{rate}", [phase], STUDENT, votes(rate), **options)

    @property
    def student_steps(self) -> int:
        """Steps of blockwise and global together."""
        return self.steps["blockwise"] * int(SHAPE["layers"]) + self.steps["global"]

    def tuned(self) -> dict[str, dict[float, float]]:
        """Loss on the last twentieth of the training text by rate, for each kind of training."""
        start = self.projected("tuning", "gptq_cd", tuning=True)
        losses: dict[str, dict[float, float]] = {name: {} for name in RATES}
        trial: dict[str, Any] = {"share": TRIAL, "tuning": True}
        for rate in RATES["blockwise"]:
            losses["blockwise"][rate] = self.loss(self.blockwise("tuning", start, rate, **trial))
        start = self.blockwise("tuning", start, best(losses["blockwise"]), **trial)
        for rate in RATES["global"]:
            losses["global"][rate] = self.loss(self.whole("tuning", start, rate, **trial))
        for rate in RATES["scratch"]:
            losses["scratch"][rate] = self.loss(self.scratch("tuning", rate, **trial))
        return losses

    def loss(self, run: Path) -> float:
        """Loss on the text of tuning."""
        return compared(run, self.teacher(), tuning=True)["loss"]

    def measure(self, run: Path) -> dict[str, float]:
        """Loss, perplexity, divergence from the teacher and agreement with it on validation
        text.
        """
        name = str(run.relative_to(self.work))
        file = run / "measured.json"
        if not file.exists():
            file.write_text(json.dumps(compared(run, self.teacher())), encoding="utf-8")
        self.measured[name] = json.loads(file.read_text(encoding="utf-8"))
        return self.measured[name]


def training(name: str, steps: int, **options: Any) -> dict[str, Any]:
    """A phase that trains."""
    return {
        "name": name,
        "steps": steps,
        "batch_size": BATCH,
        "block_size": BLOCK,
        "lr_schedule": "cosine",
        "warmup_steps": steps // 20,
        "eval_every": 0,
        "eval_batches": 8,
        "log_every": 50,
        **options,
    }


def votes(rate: float) -> dict[str, Any]:
    """The optimizer of a student."""
    return {
        "name": "split",
        "ternary": {"name": "scaled_votes", "lr": rate},
        "float": {"name": "adamw", "lr": FLOAT_RATE},
    }


def best(losses: Mapping[float, float]) -> float:
    """The rate of the lowest loss."""
    return min(losses, key=lambda rate: losses[rate])


@torch.no_grad()
def compared(run: Path, teacher: Path, *, tuning: bool = False) -> dict[str, float]:
    """A run's model on the validation text, or that of tuning, beside the teacher."""
    mine = load_run(run)
    its = load_run(teacher)
    source = load_config(
        mine.directory.config_file, [f"data.tuning={str(tuning).lower()}"]
    ).config.data.build()
    sums = torch.zeros(4, dtype=torch.float64)
    for batch in source.held_out(BATCH, BLOCK, MEASURED):
        inputs = batch.data[:, :-1]
        targets = batch.data[:, 1:].flatten()
        ours, theirs = (
            F.log_softmax(each.model(inputs).float().flatten(0, 1), dim=-1) for each in (mine, its)
        )
        apart = F.kl_div(ours, theirs, reduction="sum", log_target=True)
        agree = (ours.argmax(-1) == theirs.argmax(-1)).sum()
        loss = F.nll_loss(ours, targets, reduction="sum")
        sums += torch.tensor(
            [float(loss), float(apart), float(agree), float(len(targets))], dtype=torch.float64
        )
    loss, apart, agree, count = sums.tolist()
    return {
        "loss": loss / count,
        "perplexity": math.exp(loss / count),
        "kl": apart / count,
        "top1": agree / count,
        "tokens": count,
    }


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "threads": 1,
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def main() -> None:
    """Choose rates, run all seeds, write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--out", type=Path, required=True, help="the result, JSON")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--teacher-steps", type=int, default=1000)
    parser.add_argument("--blockwise-steps", type=int, default=40, help="of each block")
    parser.add_argument("--global-steps", type=int, default=250)
    arguments = parser.parse_args()
    steps = {
        name: getattr(arguments, f"{name}_steps") for name in ("teacher", "blockwise", "global")
    }
    study = Study(arguments.work, steps)
    teacher = study.measure(study.teacher())
    print("teacher", json.dumps(teacher), flush=True)
    trials = study.tuned()
    rates = {name: best(losses) for name, losses in trials.items()}
    print("rates", rates, json.dumps(trials), flush=True)
    result: dict[str, Any] = {
        "command": f"{Path(__file__).name} "
        + " ".join(f"--{name}-steps {count}" for name, count in steps.items()),
        "machine": machine(),
        "student": dict(STUDENT),
        "parameters": json.loads((study.teacher() / "result.json").read_text())["audit"],
        "tokens": {
            name: count * BATCH * BLOCK
            for name, count in {**steps, "student": study.student_steps}.items()
        },
        "distillation": dict(KD),
        "trials": trials,
        "rates": rates,
        "teacher": teacher,
        "rounded": {
            each: study.measure(study.projected("seed-0", each)) for each in ("absmean", "ls")
        },
        "seeds": {},
    }
    for seed in arguments.seeds:
        name = f"seed-{seed}"
        start = study.projected(name, "gptq_cd", seed=seed)
        block = study.blockwise(name, start, rates["blockwise"], seed=seed)
        runs = {
            "gptq_cd": start,
            "blockwise": block,
            "global": study.whole(name, block, rates["global"], seed=seed),
            "scratch": study.scratch(name, rates["scratch"], seed=seed),
        }
        result["seeds"][seed] = {each: study.measure(run) for each, run in runs.items()}
        result["ratios"] = {
            each: [
                found[each]["perplexity"] / teacher["perplexity"]
                for found in result["seeds"].values()
            ]
            for each in runs
        }
        result["mean_ratio"] = {
            each: statistics.fmean(ratios) for each, ratios in result["ratios"].items()
        }
        print(name, json.dumps(result["seeds"][seed]), flush=True)
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result["ratios"], indent=1))


if __name__ == "__main__":
    try:
        main()
    except ArbError as error:
        raise SystemExit(str(error)) from error
