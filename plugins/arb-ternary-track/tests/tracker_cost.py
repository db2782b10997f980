"""Measure what a tracker that misbehaves costs a whole run of `arb train`.

Usage::

    python plugins/arb-ternary-track/tests/tracker_cost.py [--steps N] [--rounds N] [--before CMD]

Each round trains one config once per kind of tracker, each in a process of its own. It prints
seconds of wall clock and of processor time of the whole command, and the seconds that the training
thread spends in the tracker; and fails unless all runs have the same bytes. ``CMD`` starts each
measured process.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

#: Kinds of trackers, with what they do.
KINDS = {
    "none": "no tracker",
    "hangs": "the first write hangs for 60 s",
    "freezes": "the first write never ends",
    "raises": "every call raises",
    "disconnects": "every write raises after the third",
}
PLUGIN = """
import sys
import time
from arb_ternary import hookimpl
from arb_ternary.specs import TrackerSpec
from arb_ternary_track.tracker import Tracker
from arb_ternary_track.writer import Writer

ARB_API_VERSION = (1, 0)

class Misbehaves(Writer):
    def __init__(self, kind):
        self.key = kind
        self.calls = 0

    def open(self, run):
        if self.key == "raises":
            raise OSError("refused")

    def write(self, points):
        self.calls += 1
        if self.key == "hangs" and self.calls == 1:
            time.sleep(60)
        if self.key == "freezes":
            time.sleep(86_400)
        if self.key == "disconnects" and self.calls > 3:
            raise ConnectionResetError("gone")

    def close(self, failed):
        pass

class Timed(Tracker):
    spent = 0.0

    def timed(self, hook, *arguments):
        began = time.perf_counter()
        hook(*arguments)
        self.spent += time.perf_counter() - began

    @hookimpl
    def arb_run_start(self, context):
        self.timed(super().arb_run_start, context)

    @hookimpl
    def arb_step_end(self, context, step, metrics):
        self.timed(super().arb_step_end, context, step, metrics)

    @hookimpl
    def arb_run_end(self, context, status):
        self.timed(super().arb_run_end, context, status)
        print("SPENT", self.spent, file=sys.stderr)

def hangs(config): return Timed("hangs", config, Misbehaves("hangs"))
def freezes(config): return Timed("freezes", config, Misbehaves("freezes"))
def raises(config): return Timed("raises", config, Misbehaves("raises"))
def disconnects(config): return Timed("disconnects", config, Misbehaves("disconnects"))

@hookimpl
def arb_register_trackers():
    return [
        TrackerSpec(name=name, target=f"misbehaving:{name}", summary=name,
                    config="arb_ternary_track.config:TrackerConfig")
        for name in ("hangs", "freezes", "raises", "disconnects")
    ]
"""
CONFIG = """
name: cost
data: shakespeare
model: {name: decoder, width: 128, layers: 4, heads: 4, max_length: 128}
optimizer: scaled_votes
threads: 2
phases: [{name: standard, batch_size: 16, block_size: 128, eval_every: 0}]
"""


def measure(kind: str, steps: int) -> dict[str, Any]:
    """Train once; return seconds, and a digest of the metrics and the checkpoints."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        plugin = folder / "misbehaving.py"
        plugin.write_text(PLUGIN, encoding="utf-8")
        config = folder / "cost.yaml"
        config.write_text(CONFIG, encoding="utf-8")
        trackers = "[]" if kind == "none" else f"[{kind}]"
        command = [sys.executable, "-m", "arb_ternary", "--plugin", str(plugin), "train"]
        command += [str(config), "--run-dir", str(folder / "run"), "-o", f"trackers={trackers}"]
        command += ["-o", f"phases.0.steps={steps}"]
        began = time.perf_counter()
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        wall = time.perf_counter() - began
        assert done.returncode == 0, done.stderr
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        digest = hashlib.sha256((folder / "run" / "metrics.jsonl").read_bytes())
        for file in sorted((folder / "run" / "checkpoints").glob("*/*.safetensors")):
            digest.update(file.read_bytes())
        spent = [line.split()[1] for line in done.stderr.splitlines() if line.startswith("SPENT")]
        notes = [line for line in done.stderr.splitlines() if f"tracker {kind}" in line]
    return {
        "wall": wall,
        "processor": used.ru_utime + used.ru_stime,
        "hooks": float(spent[0]) if spent else 0.0,
        "digest": digest.hexdigest(),
        "notes": notes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--before", default="")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--once", choices=KINDS)
    chosen = parser.parse_args()
    if chosen.once is not None:
        print(json.dumps(measure(chosen.once, chosen.steps)))
        return
    before = [shutil.which(chosen.before) or chosen.before] if chosen.before else []
    kinds = chosen.kinds.split(",")
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    for index in range(chosen.rounds):
        # Every second round is backwards, so that a drift of the machine favours nobody.
        for kind in kinds if index % 2 == 0 else reversed(kinds):
            command = [*before, sys.executable, __file__, "--once", kind]
            command += ["--steps", str(chosen.steps)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found[kind].append(json.loads(done.stdout))
            print(index, kind, found[kind][-1], flush=True)
    assert len({each["digest"] for runs in found.values() for each in runs}) == 1
    for kind, runs in found.items():
        wall = statistics.median(each["wall"] for each in runs)
        processor = statistics.median(each["processor"] for each in runs)
        hooks = statistics.median(each["hooks"] for each in runs)
        print(f"| {KINDS[kind]} | {wall:.1f} | {processor:.1f} | {hooks:.2f} |")


if __name__ == "__main__":
    main()
