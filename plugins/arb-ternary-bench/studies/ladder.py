"""What a way of training is worth at equal memory: seven ways, decoders of 0.3 to 16 million linear weights, one text.

    python plugins/arb-ternary-bench/studies/ladder.py --work DIR --out RESULT.json

Every run trains on the same tokens of the source of Python's standard library (PSF licence, on every machine with
Python), in less than one epoch. Rates are chosen on a part of the text that is held aside: four trials a way at width
96 over the whole length, three at width 320 over a quarter of it. Votes of 4 bits and pure votes have no trials at
width 320 and change with the width as votes of 8 bits do; AdamW with 8-bit moments takes the rates of float32. Between
the two widths, and beyond, a rate is a power of the width, and never rises beyond the widest that was tuned. Final runs
are measured on a part that nothing else reads. A run whose result is in ``--out`` is not repeated; every finished run
is written at once.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import resource
import shutil
import sys
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, Final

from ladder_figures import table

from arb_ternary.config.yaml_document import dump_yaml
from arb_ternary_bench.child import ChildRun
from arb_ternary_bench.compare import machine_facts
from arb_ternary_bench.quality.protocol import rate_for
from arb_ternary_bench.result_file import read_result, write_result
from arb_ternary_bench.texts import divide_text, library_source

PLUGIN: Final = Path(__file__).with_name("ladder_adamw8.py")
#: Samples of a batch, predictions of a sample; optimizer steps of a run and of a short trial.
BATCH: Final = 16
BLOCK: Final = 128
STEPS: Final = 256
SHORT: Final = 64
#: Characters that losses are taken on: so many pieces of so many, at equal distances.
PIECES: Final = 64
PIECE: Final = 1024
#: Seed of trials; final runs count from 0.
TUNING_SEED: Final = 1000
#: Layers of the decoder of a width.
LAYERS: Final[Mapping[int, int]] = {96: 3, 192: 3, 320: 4, 640: 4}
#: Widths of the trials: over the whole length, and over the short one.
NARROW: Final = 96
WIDE: Final = 320
#: Width at which time is compared, steps of a run that says how fast a compiled model is, and of those left out for it.
TIMED: Final = 640
TIMED_STEPS: Final = 30
COMPILING: Final = 6
#: What is compiled for its speed.
COMPILED: Final = ("float32", "bfloat16")
#: Points of a loss curve, at that width and at the others.
POINTS: Final = 8
FEW_POINTS: Final = 2
FLOAT: Final = {"float_parts": ["embedding", "head", "norms", "linears"], "activations": "float"}
QAT: Final = {"name": "bitnet", "float_parts": ["embedding", "head", "linears"]}
VOTES: Final = {"group_size": "row", "scale_rule": "frozen", "gradients": "int8"}
FLOAT_ENDS: Final = {**VOTES, "float_parts": ["embedding", "head"]}
PURE: Final = {**VOTES, "float_parts": [], "embedding_scale_rule": "frozen", "logit_scale": 0}
#: Rates of the trials at width 96, written for 2,560 steps: of float parts, of votes.
ADAM: Final = tuple((rate, None) for rate in (2e-3, 4e-3, 8e-3, 16e-3))
TRIALS: Final[Mapping[str, tuple[tuple[float | None, float | None], ...]]] = {
    "float32": ADAM,
    "bfloat16": ADAM,
    "qat": tuple((rate, None) for rate in (3e-3, 6e-3, 12e-3, 24e-3)),
    "votes8": ((3e-3, 0.05), (4e-3, 0.08), (6e-3, 0.12), (8e-3, 0.18)),
    "votes4": ((4e-3, 0.08), (5.6e-3, 0.12), (8e-3, 0.18), (11e-3, 0.27)),
    "pure": tuple((None, rate) for rate in (0.05, 0.08, 0.12, 0.18)),
}
#: What the best of them is multiplied by in the trials at width 320.
FACTORS: Final[Mapping[str, tuple[float, ...]]] = {
    **dict.fromkeys(("float32", "bfloat16", "qat"), (0.25, 0.5, 1.0)),
    "votes8": (0.35, 0.6, 1.0),
}
#: The ways, and whose rates they take; of those tuned at width 96 alone, whose change with the width.
WAYS: Final[Mapping[str, str]] = {
    "votes8": "votes8", "votes4": "votes4", "pure": "pure", "qat": "qat", "float32": "float32", "bfloat16": "bfloat16",
    "adamw8": "float32",
}  # fmt: skip
FOLLOWERS: Final[Mapping[str, str]] = {"votes4": "votes8", "pure": "votes8"}
#: Final runs, in this order, so that what is cut short lacks least: width, seed and ways.
FIRST: Final = ("votes8", "float32", "qat", "votes4", "bfloat16")
REST: Final = ("adamw8", "pure")
FINALS: Final[tuple[tuple[int, int, tuple[str, ...]], ...]] = (
    (96, 0, FIRST + REST), (192, 0, FIRST + REST), (320, 0, FIRST), (640, 0, FIRST[:3]), (96, 1, FIRST), (320, 0, REST),
    (640, 0, FIRST[3:]), (192, 1, FIRST), (96, 1, REST), (192, 1, REST), (640, 0, REST),
)  # fmt: skip

Rates = tuple[float | None, float | None]


def config(way: str, width: int, steps: int, rates: Rates, *, seed: int) -> dict[str, Any]:
    """The config of a run but its data; ``rates`` are those of float parts and of votes, for 2,560 steps."""
    lr, rate = (None if each is None else rate_for(steps, each) for each in rates)
    decoder = {
        "name": "decoder", "width": width, "layers": LAYERS[width], "heads": width // 32, "feed_forward": 2 * width,
        "activation": "swiglu", "query_key_norm": True, "max_length": BLOCK,
    }  # fmt: skip
    phase: dict[str, Any] = {
        "name": "standard", "steps": steps, "batch_size": BATCH, "block_size": BLOCK, "lr_schedule": "linear",
        "warmup_steps": steps // 10, "grad_clip": 1.0, "use_amp": True, "log_every": 32, "eval_batches": None,
    }  # fmt: skip
    result: dict[str, Any] = {"name": "ladder", "seed": seed, "threads": 1, "checkpoint": {"every": 0}}
    if way in ("float32", "bfloat16", "adamw8"):
        decoder |= FLOAT
        result["optimizer"] = {"name": "adamw8" if way == "adamw8" else "adamw", "lr": lr}
    elif way == "qat":
        decoder |= QAT
        result["optimizer"] = {"name": "bitnet_adamw", "lr": lr, "weight_decay": 0.01}
    elif way == "pure":
        decoder |= PURE
        del phase["grad_clip"]
        result["optimizer"] = {"name": "scaled_votes", "lr": rate}
    else:
        decoder |= FLOAT_ENDS
        votes: dict[str, Any] = {"name": "scaled_votes", "lr": rate}
        if way == "votes4":
            decoder["vote_bits"], votes["carry"] = 4, False
            phase |= {
                "batch_size": 2 * BATCH,
                "steps": steps // 2,
                "warmup_steps": steps // 20,
                "log_every": steps // 2,
            }
        floats = {"name": "adamw", "lr": lr, "weight_decay": 0.0}
        result["optimizer"] = {"name": "split", "ternary": votes, "float": floats}
    if way == "bfloat16":
        phase["dtype"] = "bfloat16"
        del phase["use_amp"]
    if way == "adamw8":
        result["plugins"] = [str(PLUGIN)]
    if way in ("votes8", "votes4", "pure"):
        result["backend"] = "cpu"
    return {**result, "model": decoder, "phases": [phase]}


def rates_at(width: int, narrow: Rates, wide: Rates) -> Rates:
    """Rates at a width from the best at widths 96 and 320: a power of the width, which beyond 320 does not rise."""

    def at(first: float | None, last: float | None) -> float | None:
        if first is None or last is None:
            return None
        power = math.log(last / first) / math.log(WIDE / NARROW)
        return float(f"{first * (width / NARROW) ** (min(power, 0.0) if width > WIDE else power):.3g}")

    if width > WIDE and any(first and last and last > first for first, last in zip(narrow, wide, strict=True)):
        return wide
    return at(narrow[0], wide[0]), at(narrow[1], wide[1])


class Study:
    """The runs in a folder, and the result file that they are written to."""

    def __init__(self, work: Path, out: Path) -> None:
        self.work, self.out = work, out
        text = library_source()
        files = divide_text(text, work)
        self._train = files["train"]
        self._measured = {name: _in_pieces(files[name]) for name in ("choice", "validation")}
        content = text.encode()
        new = {"machine": machine_facts(), "threads": 1, "trials": {}, "finals": {}}
        facts = {
            "name": "source of Python's standard library", "licence": "PSF", "bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(), "training_bytes": self._train.stat().st_size,
            "measured_tokens": PIECES * PIECE, "tokens_of_a_run": STEPS * BATCH * BLOCK,
        }  # fmt: skip
        self.result = read_result(out, new)
        # Losses on two texts, which the library of another version of Python is, compare nothing.
        if self.result.setdefault("text", facts) != facts:
            sys.exit(f"{out} holds runs on another text ({self.result['text']['bytes']:,} bytes); give another --out")

    def run(self, name: str, plain: dict[str, Any], measured_on: str, points: int) -> dict[str, Any]:
        """Figures of one run, which takes the loss ``points`` times."""
        plain = deepcopy(plain)
        plain["data"] = {
            "name": "text", "tokenizer": "bytes", "path": str(self._train),
            "validation": str(self._measured[measured_on]),
        }  # fmt: skip
        phase = plain["phases"][0]
        phase["eval_every"] = phase["steps"] // points if points else 0
        if not points:
            del phase["eval_batches"]
        file = self.work / f"{name}.yaml"
        file.write_text(dump_yaml(plain), encoding="utf-8")
        shutil.rmtree(self.work / name, ignore_errors=True)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        child = ChildRun.start(file, self.work / name, threads=1)
        ended = child.wait()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if ended.code:
            sys.exit(f"{file}: the run ended with {ended.code}\n{child.log_tail()}")
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        figures = {"processor_seconds": seconds, "peak_bytes": ended.peak_bytes}
        return figures | self._figures(child, phase)

    def _figures(self, child: ChildRun, phase: Mapping[str, Any]) -> dict[str, Any]:
        report = child.report()
        audit = report["audit"]
        lines = (child.directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        tokens = phase["batch_size"] * phase["block_size"]
        measured = [each for each in map(json.loads, lines) if each["event"] == "validation"]
        return {
            "loss": report["validation_loss"], "tokens_per_second": report["tokens_per_second"],
            "parameters": audit["parameters"], "float_parameters": audit["float_parameters"],
            "linear_weights": report["linears"]["weights"], "state_bytes": audit["state_bytes"],
            # What votes are cast of is used up in backward, a matrix at a time.
            "gradient_bytes": audit["float_parameters"] * (2 if phase.get("dtype") == "bfloat16" else 4),
            "curve": [(each["step"] * tokens, each["loss"]) for each in measured],
        }  # fmt: skip

    def write(self) -> None:
        """Write the result file."""
        write_result(self.out, self.result)

    def trials(self) -> dict[str, tuple[Rates, Rates]]:
        """The best rates of every way at the two widths of the trials, after the trials that are missing."""
        chosen: dict[str, tuple[Rates, Rates]] = {}
        for way, rates in TRIALS.items():
            narrow = self._best(way, NARROW, STEPS, rates)
            if way in FOLLOWERS:
                followed = chosen[FOLLOWERS[way]]
                # All votes and floats of the way followed change by factors of their own.
                lr, rate = (_ratio(last, first) for first, last in zip(*followed, strict=True))
                chosen[way] = narrow, (_times(narrow[0], lr), _times(narrow[1], rate))
                continue
            wide = [(_times(narrow[0], each), _times(narrow[1], each)) for each in FACTORS[way]]
            chosen[way] = narrow, self._best(way, WIDE, SHORT, wide)
        self.result["rates"] = chosen
        return chosen

    def _best(self, way: str, width: int, steps: int, rates: Sequence[Any]) -> Rates:
        found = []
        for number, each in enumerate(rates):
            name = f"trial-{way}-{width}-{number}"
            if name not in self.result["trials"]:
                plain = config(way, width, steps, each, seed=TUNING_SEED)
                figures = self.run(name, plain, "choice", 1)
                keys = ("loss", "tokens_per_second", "processor_seconds")
                self.result["trials"][name] = {"rates": each, **{key: figures[key] for key in keys}}
                self.write()
            found.append((self.result["trials"][name]["loss"], number))
        return tuple(rates[min(found)[1]])  # type: ignore[return-value]

    def final(self, way: str, width: int, seed: int, rates: Rates) -> None:
        """A final run, where it is missing."""
        name = f"{way}-{width}-{seed}"
        if name not in self.result["finals"]:
            points = POINTS if width == TIMED else FEW_POINTS
            figures = self.run(name, config(way, width, STEPS, rates, seed=seed), "validation", points)
            facts = {"way": way, "width": width, "seed": seed, "rates": rates}
            self.result["finals"][name] = {**facts, **figures}
            self.write()

    def idle(self) -> None:
        """Peak memory of a run that builds the smallest model and takes one step of one sample."""
        if "idle_bytes" not in self.result:
            plain = config("pure", NARROW, 1, (None, 0.1), seed=0)
            plain["phases"][0] |= {"batch_size": 1}
            self.result["idle_bytes"] = self.run("idle", plain, "choice", 0)["peak_bytes"]
            self.write()

    def compiled_speed(self, way: str, rates: Rates) -> None:
        """Tokens a second of a compiled model after its first steps, in which it is compiled."""
        compiled = self.result.setdefault("compiled_tokens_per_second", {})
        if way not in compiled:
            name = f"compiled-{way}"
            plain = config(way, TIMED, TIMED_STEPS, rates, seed=0)
            plain["phases"][0] |= {"compile_model": True, "log_every": 1}
            self.run(name, plain, "choice", 0)
            log = (self.work / name / "logs" / "train.log").read_text(encoding="utf-8")
            # The speed of a line is that of all steps so far, of which there are fewer than are averaged over.
            speeds = {int(step): float(speed) for step, speed in re.findall(r" step (\d+) .*tok/s (\d+)", log)}
            tokens = BATCH * BLOCK
            first, last = (step * tokens / speeds[step] for step in (COMPILING, TIMED_STEPS))
            compiled[way] = (TIMED_STEPS - COMPILING) * tokens / (last - first)
            self.write()


def _times(rate: float | None, factor: float | None) -> float | None:
    return None if rate is None or factor is None else float(f"{rate * factor:.3g}")


def _ratio(last: float | None, first: float | None) -> float | None:
    return None if last is None or first is None else last / first


def _in_pieces(file: Path) -> Path:
    """A file beside ``file`` with :data:`PIECES` pieces of it."""
    text = file.read_bytes().decode("ascii", "replace").replace("\ufffd", "?")
    distance = len(text) // PIECES
    destination = file.with_name(f"measured-{file.name}")
    destination.write_text("".join(text[at * distance :][:PIECE] for at in range(PIECES)), encoding="utf-8")
    return destination


def main() -> None:
    """Run what is missing, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--out", type=Path, required=True, help="the result, JSON")
    arguments = parser.parse_args()
    work: Path = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    study = Study(work, arguments.out)
    study.idle()
    chosen = study.trials()
    for width, seed, ways in FINALS:
        for way in ways:
            rates = rates_at(width, *chosen[WAYS[way]])
            study.final(way, width, seed, rates)
            if width == TIMED and way in COMPILED:
                study.compiled_speed(way, rates)
    print(table(study.result))


if __name__ == "__main__":
    main()
