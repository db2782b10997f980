"""What a way of training is worth at equal memory: twelve ways, decoders of 0.3 to 16 million
linear weights, one text.

    python plugins/arb-ternary-bench/studies/ladder.py --work DIR --out RESULT.json

Every run trains on the same tokens of the source of Python's standard library (PSF licence, on
every machine with Python), in less than one epoch. Settings are chosen on a part of the text that
is held aside, by runs of a quarter of the length, at widths 96 and 640: the rates of votes and of
the float parts beside them apart, and of the ways without votes the one rate, weight decay and the
decay of the second moment. Votes of 8 bits, float32 and QAT have as many trials, the others fewer;
AdamW with 8-bit moments takes the settings of float32, and those of votes of 8 bits are taken by
votes of orthogonalised gradients, which are float, also where float vectors are beside them: gains
of all norms and factors of rows; and by plain ones beside those vectors (``vectors``). Those of QAT
are taken with gains of all norms. Between the two widths a rate is a power of the width, and other
options are those of the nearer one. Final runs are measured on a part that nothing else reads.
Speeds are those of short runs at the end, for which the machine should have nothing else to do. A
run whose result is in ``--out`` is not repeated; every finished run is written at once. ``--only``
names final runs and makes no others, and no speeds; ``--float32`` has them multiply in float32,
which a processor without instructions for bfloat16 does faster.
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
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, Final, NamedTuple

from ladder_figures import table

from arb_ternary.config.yaml_document import dump_yaml
from arb_ternary_bench.child import ChildRun
from arb_ternary_bench.compare import machine_facts
from arb_ternary_bench.quality.protocol import rate_for
from arb_ternary_bench.result_file import read_result, write_result
from arb_ternary_bench.texts import divide_text, library_source

PLUGIN: Final = Path(__file__).with_name("ladder_adamw8.py")
#: Samples of a batch, predictions of a sample; optimizer steps of a run and of a trial.
BATCH: Final = 16
BLOCK: Final = 128
STEPS: Final = 1024
TRIAL_STEPS: Final = 256
#: Characters that losses are taken on: so many pieces of so many, at equal distances.
PIECES: Final = 64
PIECE: Final = 1024
#: Seed of trials; final runs count from 0.
TUNING_SEED: Final = 1000
#: Layers of the decoder of a width.
LAYERS: Final[Mapping[int, int]] = {96: 3, 192: 3, 320: 4, 640: 4}
# : Widths of the trials; at the wider one time is compared, too. Options are those of the narrower
# one below the middle.
NARROW: Final = 96
WIDE: Final = 640
MIDDLE: Final = 256
# : Steps of a run that says how fast a way is, and of those left out for it, in which a model is
# compiled.
TIMED_STEPS: Final = 30
COMPILING: Final = 6
#: Whose speed is measured, and what is compiled for it, too.
TIMED: Final = ("votes8", "pure", "qat", "float32", "bfloat16")
COMPILED: Final = ("qat", "float32", "bfloat16")
#: Points of a loss curve, at that width and at the others.
POINTS: Final = 8
FEW_POINTS: Final = 2
FLOAT: Final = {"float_parts": ["embedding", "head", "norms", "linears"], "activations": "float"}
QAT: Final[Mapping[str, Any]] = {"name": "bitnet", "float_parts": ["embedding", "head", "linears"]}
QAT_GAINS: Final = {**QAT, "float_parts": [*QAT["float_parts"], "norms"], "inner_gains": True}
VOTES: Final = {"group_size": "row", "scale_rule": "frozen", "gradients": "int8"}
FLOAT_ENDS: Final = {**VOTES, "float_parts": ["embedding", "head"]}
ORTHOGONAL: Final = {**FLOAT_ENDS, "gradients": "float"}
#: Every float vector that there is beside.
VECTORS: Final = {
    "float_parts": ["embedding", "head", "norms"],
    "inner_gains": True,
    "row_scales": True,
}
#: What ways of votes with float embedding and head add to the decoder.
BESIDE: Final[Mapping[str, Mapping[str, Any]]] = {
    "orthogonal": ORTHOGONAL,
    "gains": {**ORTHOGONAL, **VECTORS},
    "vectors": {**FLOAT_ENDS, **VECTORS},
}
PURE: Final = {**VOTES, "float_parts": [], "embedding_scale_rule": "frozen", "logit_scale": 0}
#: Without a float parameter: gains of all norms and factors of rows are means of trits.
TRITS: Final = {
    **PURE,
    "gradients": "float",
    "learned_norms": True,
    "inner_gains": True,
    "row_scales": True,
    "vector_trits": 8,
}


class Setting(NamedTuple):
    """Rates, written for 2,560 steps, of float parts and of votes; options of AdamW that differ
    from its defaults.
    """

    floats: float | None
    votes: float | None = None
    options: Mapping[str, float] = {}


DECAYED: Final = {"weight_decay": 0.1}
UNDECAYED: Final = {"weight_decay": 0.0}
SLOWER: Final = {"beta2": 0.99}


def _rates(*rates: float) -> tuple[Setting, ...]:
    return tuple(map(Setting, rates))


def _options(rate: float, *options: Mapping[str, float]) -> tuple[Setting, ...]:
    return tuple(Setting(rate, None, each) for each in options)


#: Trials by width and way.
TRIALS: Final[Mapping[int, Mapping[str, tuple[Setting, ...]]]] = {
    NARROW: {
        "float32": _rates(2e-3, 4e-3, 5.6e-3, 8e-3, 16e-3)
        + _options(4e-3, DECAYED, UNDECAYED, SLOWER),
        "bfloat16": _rates(2e-3, 4e-3, 8e-3, 16e-3),
        "qat": _rates(3e-3, 6e-3, 8.5e-3, 12e-3, 24e-3)
        + _options(6e-3, DECAYED, UNDECAYED, SLOWER),
        "votes8": (
            Setting(3e-3, 0.05),
            Setting(4e-3, 0.08),
            Setting(6e-3, 0.12),
            Setting(8e-3, 0.18),
            Setting(3e-3, 0.12),
            Setting(12e-3, 0.12),
            Setting(3e-3, 0.18),
            Setting(6e-3, 0.08),
        ),
        "votes4": (
            Setting(4e-3, 0.08),
            Setting(5.6e-3, 0.12),
            Setting(8e-3, 0.18),
            Setting(11e-3, 0.27),
        ),
        "pure": tuple(Setting(None, rate) for rate in (0.05, 0.08, 0.12, 0.18)),
    },
    WIDE: {
        "float32": _rates(0.5e-3, 0.7e-3, 1e-3, 1.4e-3, 2e-3) + _options(1e-3, DECAYED, SLOWER),
        "bfloat16": _rates(1e-3, 2e-3),
        "qat": _rates(0.75e-3, 1.1e-3, 1.5e-3, 2.1e-3, 3e-3) + _options(1.5e-3, DECAYED, SLOWER),
        "votes8": (
            Setting(1.5e-3, 0.03),
            Setting(2.52e-3, 0.0504),
            Setting(4.2e-3, 0.084),
            Setting(1.26e-3, 0.0504),
            Setting(1.26e-3, 0.075),
            Setting(1.26e-3, 0.11),
            Setting(0.63e-3, 0.075),
        ),
        "votes4": (Setting(1.2e-3, 0.075), Setting(1.2e-3, 0.12)),
        "pure": tuple(Setting(None, rate) for rate in (0.03, 0.05, 0.08)),
    },
}
#: The ways, and whose settings they take.
WAYS: Final[Mapping[str, str]] = {
    "votes8": "votes8",
    "votes4": "votes4",
    "pure": "pure",
    "qat": "qat",
    "float32": "float32",
    "bfloat16": "bfloat16",
    "adamw8": "float32",
    "orthogonal": "votes8",
    "gains": "votes8",
    "vectors": "votes8",
    "trits": "pure",
    "qat_gains": "qat",
}
#: Final runs, in this order, so that what is cut short lacks least: width, seed and ways.
ALL: Final = ("votes8", "float32", "qat", "bfloat16", "adamw8", "pure", "votes4")
FINALS: Final[tuple[tuple[int, int, tuple[str, ...]], ...]] = (
    (640, 0, ALL[:4]),
    (320, 0, ALL),
    (192, 0, ALL),
    (96, 0, ALL),
    (96, 1, ALL),
    (192, 1, ALL[:3]),
    (320, 1, ALL[:3]),
    (640, 0, ("pure",)),
    *((width, seed, ("orthogonal",)) for seed in (0, 1) for width in (96, 192, 320)),
    *((width, 0, ("vectors",)) for width in (192, 320, 640)),
    (640, 0, ("orthogonal",)),
    *((width, seed, ("gains",)) for seed in (0, 1) for width in (96, 192, 320)),
    *((width, 0, ("qat_gains",)) for width in (96, 192)),
    *((width, 0, ("trits",)) for width in (96, 192, 320, 640)),
    *((width, 1, ("trits",)) for width in (96, 192, 320)),
)


def config(way: str, width: int, steps: int, setting: Setting, *, seed: int) -> dict[str, Any]:
    """The config of a run but its data."""
    lr, rate = (None if each is None else rate_for(steps, each) for each in setting[:2])
    decoder = {
        "name": "decoder",
        "width": width,
        "layers": LAYERS[width],
        "heads": width // 32,
        "feed_forward": 2 * width,
        "activation": "swiglu",
        "query_key_norm": True,
        "max_length": BLOCK,
    }
    phase: dict[str, Any] = {
        "name": "standard",
        "steps": steps,
        "batch_size": BATCH,
        "block_size": BLOCK,
        "lr_schedule": "linear",
        "warmup_steps": steps // 10,
        "grad_clip": 1.0,
        "use_amp": True,
        "log_every": 32,
        "eval_batches": None,
    }
    result: dict[str, Any] = {
        "name": "ladder",
        "seed": seed,
        "threads": 1,
        "checkpoint": {"every": 0},
    }
    if way in ("float32", "bfloat16", "adamw8"):
        decoder |= FLOAT
        result["optimizer"] = {
            "name": "adamw8" if way == "adamw8" else "adamw",
            "lr": lr,
            **setting.options,
        }
    elif way in ("qat", "qat_gains"):
        decoder |= QAT_GAINS if way == "qat_gains" else QAT
        result["optimizer"] = {
            "name": "bitnet_adamw",
            "lr": lr,
            "weight_decay": 0.01,
            **setting.options,
        }
    elif way in ("pure", "trits"):
        decoder |= TRITS if way == "trits" else PURE
        del phase["grad_clip"]
        result["optimizer"] = {
            "name": "scaled_votes",
            "lr": rate,
            **({"orthogonal": True} if way == "trits" else {}),
        }
    else:
        votes: dict[str, Any] = {"name": "scaled_votes", "lr": rate}
        if way in ("orthogonal", "gains"):
            votes["orthogonal"] = True
        decoder |= BESIDE.get(way, FLOAT_ENDS)
        if way == "votes4":
            decoder["vote_bits"] = 4
            votes["carry"] = False
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
    if WAYS[way] in ("votes8", "votes4", "pure"):
        result["backend"] = "cpu"
    return {**result, "model": decoder, "phases": [phase]}


def setting_at(width: int, narrow: Setting, wide: Setting) -> Setting:
    """The setting at a width from the best at widths 96 and 640: rates are powers of the width."""

    def at(first: float | None, last: float | None) -> float | None:
        if first is None or last is None:
            return None
        power = math.log(last / first) / math.log(WIDE / NARROW)
        return float(f"{first * (width / NARROW) ** power:.3g}")

    options = (narrow if width < MIDDLE else wide).options
    return Setting(at(narrow.floats, wide.floats), at(narrow.votes, wide.votes), options)


class Source(NamedTuple):
    """A text, what it is, and its licence."""

    name: str
    licence: str
    text: str


class Study:
    """The runs in a folder, and the result file that they are written to."""

    def __init__(self, work: Path, out: Path, source: Source, steps: int) -> None:
        self.work = work
        self.out = out
        self.steps = steps
        text = source.text
        files = divide_text(text, work)
        self._train = files["train"]
        self._measured = {name: _in_pieces(files[name]) for name in ("choice", "validation")}
        content = text.encode()
        new = {"machine": machine_facts(), "threads": 1, "trials": {}, "finals": {}}
        facts = {
            "name": source.name,
            "licence": source.licence,
            "bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
            "training_bytes": self._train.stat().st_size,
            "measured_tokens": PIECES * PIECE,
            "tokens_of_a_run": steps * BATCH * BLOCK,
        }
        self.result = read_result(out, new)
        # Losses on two texts, which the same package of another version is, compare nothing.
        if self.result.setdefault("text", facts) != facts:
            there = self.result["text"]
            sys.exit(
                f"{out} holds runs of {there['tokens_of_a_run']:,} tokens on a text of "
                f"{there['bytes']:,} bytes, and this asks for {facts['tokens_of_a_run']:,} on "
                f"{facts['bytes']:,}; give another --out"
            )

    def run(
        self, name: str, plain: dict[str, Any], measured_on: str, points: int
    ) -> dict[str, Any]:
        """Figures of one run, which takes the loss ``points`` times."""
        plain = deepcopy(plain)
        plain["data"] = {
            "name": "text",
            "tokenizer": "bytes",
            "path": str(self._train),
            "validation": str(self._measured[measured_on]),
        }
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
            "loss": report["validation_loss"],
            "tokens_per_second": report["tokens_per_second"],
            "parameters": audit["parameters"],
            "float_parameters": audit["float_parameters"],
            "linear_weights": report["linears"]["weights"],
            "state_bytes": audit["state_bytes"],
            # What votes are cast of is used up in backward, a matrix at a time.
            "gradient_bytes": audit["float_parameters"]
            * (2 if phase.get("dtype") == "bfloat16" else 4),
            "curve": [(each["step"] * tokens, each["loss"]) for each in measured],
        }

    def write(self) -> None:
        """Write the result file."""
        write_result(self.out, self.result)

    def trials(self) -> dict[str, tuple[Setting, Setting]]:
        """The best settings of every way at the two widths of the trials, after the trials that are
        missing.
        """
        chosen = {way: (self._best(way, NARROW), self._best(way, WIDE)) for way in TRIALS[NARROW]}
        self.result["settings"] = {
            way: [each._asdict() for each in pair] for way, pair in chosen.items()
        }
        return chosen

    def _best(self, way: str, width: int) -> Setting:
        """The setting of the trial with the least loss."""
        offered = TRIALS[width][way]
        losses = [self._trial(way, width, number, each) for number, each in enumerate(offered)]
        return offered[losses.index(min(losses))]

    def _trial(self, way: str, width: int, number: int, setting: Setting) -> float:
        """The loss of a trial, which is made where it is missing."""
        name = f"trial-{way}-{width}-{number}"
        if name not in self.result["trials"]:
            figures = self.run(
                name, config(way, width, TRIAL_STEPS, setting, seed=TUNING_SEED), "choice", 1
            )
            keys = ("loss", "tokens_per_second", "processor_seconds")
            self.result["trials"][name] = {
                **setting._asdict(),
                **{key: figures[key] for key in keys},
            }
            self.write()
        found: float = self.result["trials"][name]["loss"]
        return found

    def final(
        self,
        way: str,
        width: int,
        seed: int,
        setting: Setting,
        *,
        compiled: bool = False,
        float32: bool = False,
    ) -> None:
        """A final run, where it is missing; ``float32``: its products are."""
        name = f"{way}-{width}-{seed}"
        if name not in self.result["finals"]:
            points = POINTS if width == WIDE else FEW_POINTS
            plain = config(way, width, self.steps, setting, seed=seed)
            plain["phases"][0]["compile_model"] = compiled
            facts = {"way": way, "width": width, "seed": seed, **setting._asdict()}
            if float32:
                plain["phases"][0]["use_amp"] = False
                facts["float32"] = True
            figures = self.run(name, plain, "validation", points)
            facts["processor"] = machine_facts()["processor"]
            self.result["finals"][name] = {**facts, **figures}
            self.write()

    def idle(self) -> None:
        """Peak memory of a run that builds the smallest model and takes one step of one sample."""
        if "idle_bytes" not in self.result:
            plain = config("pure", NARROW, 1, Setting(None, 0.1), seed=0)
            plain["phases"][0] |= {"batch_size": 1}
            self.result["idle_bytes"] = self.run("idle", plain, "choice", 0)["peak_bytes"]
            self.write()

    def speed(self, way: str, setting: Setting, *, compiled: bool) -> None:
        """Tokens a second at the wider width, after the first steps, in which a model is
        compiled.
        """
        name = f"{way}-compiled" if compiled else way
        speeds = self.result.setdefault("tokens_per_second", {})
        if name not in speeds:
            plain = config(way, WIDE, TIMED_STEPS, setting, seed=0)
            plain["phases"][0] |= {"compile_model": compiled, "log_every": 1}
            self.run(f"speed-{name}", plain, "choice", 0)
            log = (self.work / f"speed-{name}" / "logs" / "train.log").read_text(encoding="utf-8")
            # The speed of a line is that of all steps so far, of which there are fewer than are
            # averaged over.
            so_far = {
                int(step): float(speed)
                for step, speed in re.findall(r" step (\d+) .*tok/s (\d+)", log)
            }
            tokens = BATCH * BLOCK
            first, last = (step * tokens / so_far[step] for step in (COMPILING, TIMED_STEPS))
            speeds[name] = (TIMED_STEPS - COMPILING) * tokens / (last - first)
            self.write()


def _in_pieces(file: Path) -> Path:
    """A file beside ``file`` with :data:`PIECES` pieces of it."""
    text = file.read_bytes().decode("ascii", "replace").replace("\ufffd", "?")
    distance = len(text) // PIECES
    destination = file.with_name(f"measured-{file.name}")
    destination.write_text(
        "".join(text[at * distance :][:PIECE] for at in range(PIECES)), encoding="utf-8"
    )
    return destination


def main() -> None:
    """Run what is missing, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--out", type=Path, required=True, help="the result, JSON")
    parser.add_argument("--only", help="final runs to make, WAY-WIDTH-SEED,... (default: all)")
    parser.add_argument(
        "--float32", action="store_true", help="multiply in float32, in the runs of --only"
    )
    arguments = parser.parse_args()
    if arguments.float32 and not arguments.only:
        parser.error("--float32 goes with --only: the other ways compare at bfloat16")
    work: Path = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    source = Source("source of Python's standard library", "PSF", library_source())
    study = Study(work, arguments.out, source, STEPS)
    study.idle()
    chosen = study.trials()
    for width, seed, ways in FINALS:
        for way in ways:
            if arguments.only and f"{way}-{width}-{seed}" not in arguments.only.split(","):
                continue
            setting = setting_at(width, *chosen[WAYS[way]])
            study.final(way, width, seed, setting, float32=arguments.float32)
    for way in () if arguments.only else TIMED:
        for compiled in (False, True) if way in COMPILED else (False,):
            study.speed(way, chosen[WAYS[way]][1], compiled=compiled)
    print(table(study.result))


if __name__ == "__main__":
    main()
