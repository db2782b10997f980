"""What several processes really send in a step of training by votes: real runs with gloo, counted
twice.

    python plugins/arb-ternary-bench/studies/wire.py --out
    plugins/arb-ternary-bench/results/wire.json

Each run has a network namespace of its own (``unshare -n`` of util-linux, as root), whose loopback
device then carries nothing else. After every step rank 0 reads how many bytes all ranks have sent
through it, headers of TCP and everything that is not votes included. Beside it stands what rank 0
has handed to the collectives of torch. The model is a decoder of width 1024 with 11 million ternary
weights; a result that is in the file already is not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from arb_ternary_bench.compare import machine_facts
from arb_ternary_bench.network.config import (
    ClusterConfig,
    MatrixSizes,
    ModelSizes,
    NetworkConfig,
    VotesConfig,
)
from arb_ternary_bench.network.result import compute

STEPS: Final = 8
#: Steps that are left out: the first casts no votes, and after it ranks have met all messages once.
SETTLING: Final = 2
CONFIG: Final = """\
name: wire
plugins: [{plugin}]
trackers: [{{name: wire}}]
threads: 1
backend: {backend}
data: shakespeare
model:
  name: decoder
  width: 1024
  layers: 1
  heads: 8
  feed_forward: 2048
  activation: swiglu
  max_length: 64
  group_size: row
  scale_rule: frozen
  embedding_scale_rule: frozen
  logit_scale: 1
optimizer: {{name: scaled_votes, lr: {rate}, vote_levels: {levels}}}
phases:
  - name: standard
    steps: {steps}
    batch_size: 4
    block_size: 64
    lr_schedule: constant
    gradient_accumulation_steps: {micro_batches}
    eval_every: 0
checkpoint: {{every: 0}}
"""
#: The tracker of the run; it writes a line a step.
PLUGIN: Final = """
import json
import os
import torch.distributed as dist
from arb_ternary import hookimpl
from arb_ternary_train.specs import TrackerSpec

ARB_API_VERSION = (1, 0)
HANDED = [0]


def counted(name, count):
    original = getattr(dist, name)

    def call(*args, **kwargs):
        HANDED[0] += count(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(dist, name, call)


def to_others(_, sent, received_sizes=None, sizes=None, **others):
    rank, size = dist.get_rank(), dist.get_world_size()
    own = sent[rank : rank + 1].numel() * (sent.shape[0] // size) if sizes is None else sizes[rank]
    return sent.element_size() * (sent.numel() - own)


counted("all_to_all_single", to_others)
for name in ("all_gather_into_tensor",
    "all_gather_single"):  # one function, of older and of newer torch
    if hasattr(dist, name):
        counted(name, lambda _, own, **others: own.nbytes * (dist.get_world_size() - 1))
counted("all_reduce", lambda value, *_,
    **others: 2 * value.nbytes - 2 * value.nbytes // dist.get_world_size())


def device_bytes():
    with open("/proc/net/dev") as file:
        line = next(line for line in file if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


class Wire:
    def __init__(self, _config=None):
        self.before = None

    @hookimpl
    def arb_step_end(self, context, step, metrics):
        now = (device_bytes(), HANDED[0])
        if self.before is not None:
            figures = dict(zip(("device", "handed"), (b - a for a, b in zip(self.before, now))))
            with open(os.environ["WIRE_OUT"], "a") as file:
                file.write(json.dumps({"step": step, **figures,
                    "flips": metrics.get("flips")}) + "\\n")
        self.before = now


@hookimpl
def arb_register_trackers():
    return [TrackerSpec(name="wire", target="wire_plugin:Wire")]
"""
# : Rows by columns of the model's matrices; the embedding is looked up, and its votes are sent like
# the others'.
MATRICES: Final = ((1024, 1024, 4), (2048, 1024, 2), (1024, 2048, 1), (256, 1024, 2))


def cases() -> dict[str, dict[str, Any]]:
    """Ranks, one micro-batch each; three levels, and votes in quanta below and above one."""
    found = {}
    for ranks in (2, 4):
        common = {"ranks": ranks, "micro_batches": ranks}
        found[f"{ranks} ranks, vote_levels 3"] = {**common, "levels": 3, "rate": 0.1}
        found[f"{ranks} ranks, rate {ranks / 161:.4f}"] = {
            **common,
            "levels": None,
            "rate": round(ranks / 161, 6),
        }
        found[f"{ranks} ranks, rate 0.1"] = {**common, "levels": None, "rate": 0.1}
    return found


def measured(case: dict[str, Any], backend: str) -> dict[str, Any]:
    """One run: bytes a rank has sent in a step, by device and by calls, and what the formulas
    say.
    """
    with tempfile.TemporaryDirectory() as folder:
        plugin, config, out = (
            Path(folder) / name for name in ("wire_plugin.py", "wire.yaml", "wire.jsonl")
        )
        plugin.write_text(PLUGIN, encoding="utf-8")
        levels = json.dumps(case["levels"])
        options = {"rate": case["rate"], "levels": levels, "micro_batches": case["micro_batches"]}
        config.write_text(
            CONFIG.format(plugin=plugin.name, backend=backend, steps=STEPS, **options),
            encoding="utf-8",
        )
        ranks = case["ranks"]
        command = f"{sys.executable} -m arb_ternary train {config} --run-dir {folder}/run"
        script = "\n".join(
            ["set -e", "ip link set lo up", "pids="]
            + [
                f'RANK={rank} LOCAL_RANK={rank} {command} & pids="$pids $!"'
                for rank in range(ranks)
            ]
            + ["for pid in $pids; do wait $pid; done"]
        )
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
            "GLOO_SOCKET_IFNAME": "lo",
            "WIRE_OUT": str(out),
            "PYTHONPATH": os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")]),
        }
        subprocess.run(
            ["unshare", "-n", "bash", "-c", script],
            check=True,
            env=environment,
            stdout=subprocess.DEVNULL,
        )
        steps = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()][
            SETTLING - 1 :
        ]
    weights = sum(rows * columns * count for rows, columns, count in MATRICES)
    sent = {name: statistics.median(step[name] for step in steps) for name in ("device", "handed")}
    share = statistics.median(step["flips"] for step in steps) / weights
    return {
        **case,
        "weights": weights,
        "flip_share": share,
        "device_bits": 8 * sent["device"] / ranks / weights,
        "handed_bits": 8 * sent["handed"] / weights,
        "computed_bits": {
            row["scheme"]: row["bits_per_weight"] for row in formulas(case, share)["rows"]
        },
    }


def formulas(case: dict[str, Any], share: float) -> dict[str, Any]:
    """What ``arb bench network`` says of the same."""
    cluster = ClusterConfig(
        name="here", nodes=1, gpus=case["ranks"], micro_batches=case["micro_batches"]
    )
    matrices = tuple(
        MatrixSizes(rows=rows, columns=columns, count=count) for rows, columns, count in MATRICES
    )
    votes = VotesConfig(levels=case["levels"], rate=case["rate"], flip_share=share)
    schemes = ("votes", "ddp", "powersgd", "one_bit_adam")
    return compute(
        NetworkConfig(
            model=ModelSizes(matrices=matrices), clusters=(cluster,), votes=votes, schemes=schemes
        )
    )


def table(result: dict[str, Any]) -> str:
    """Bits a weight and step that a rank sends, as Markdown."""
    lines = [
        "| one micro-batch a rank | flips | sent, by the network device | handed to collectives | "
        "computed | DDP, bfloat16 | 1-bit Adam | PowerSGD, rank 4 |",
        "|---|" + "---:|" * 7,
    ]
    for name, row in result["cases"].items():
        computed = row["computed_bits"]
        figures = [
            row["device_bits"],
            row["handed_bits"],
            *(computed[s] for s in ("votes", "ddp", "one_bit_adam")),
        ]
        cells = [
            f"{100 * row['flip_share']:.3f} %",
            *(f"{each:.2f}" for each in figures),
            f"{computed['powersgd']:.3f}",
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    machine = result["machine"]
    note = (
        f"Medians of {STEPS - SETTLING} steps. Command: `{result['command']}`. "
        f"Machine: {machine['processor']}, torch {machine['torch']}."
    )
    return "\n".join([*lines, "", note])


def main() -> None:
    """Run what is missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--backend", default="cpu", help="kernel backend (default: %(default)s)")
    arguments = parser.parse_args()
    out: Path = arguments.out
    result: dict[str, Any] = {
        "command": f"python plugins/arb-ternary-bench/studies/wire.py --backend "
        f"{arguments.backend}",
        "machine": machine_facts(),
        "cases": {},
    }
    if out.exists():
        result = json.loads(out.read_text(encoding="utf-8"))
    for name, case in cases().items():
        if name not in result["cases"]:
            result["cases"][name] = measured(case, arguments.backend)
            out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
            print(f"{name}: {json.dumps(result['cases'][name])}", flush=True)
    print(table(result))


if __name__ == "__main__":
    main()
