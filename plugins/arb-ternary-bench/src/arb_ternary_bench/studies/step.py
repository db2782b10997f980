"""One training step of a linear or of a decoder block: time and memory of every way to train it.

A step is forward, backward (also to the input) and update: every backend with scaled votes,
bfloat16 with fused AdamW, and quantisation-aware training of BitNet, eager and compiled, in turns.
Each also trains in a process of its own, for its peak memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from attrs import asdict, frozen

from arb_ternary.config.options import option, optional, positive
from arb_ternary.errors import ArbError
from arb_ternary.ternary.module import GroupSize
from arb_ternary_bench.cli.options import usable_backends
from arb_ternary_bench.kernels.gpu import WaitingClock, check_device, gpu_facts, on_device
from arb_ternary_bench.kernels.timing import Clock, Timing, Variant, measure, processor_clock
from arb_ternary_bench.machine import bench_facts, describe, load_average, with_threads
from arb_ternary_bench.steps.child import measure_memory
from arb_ternary_bench.steps.trainees import (
    FLOAT_TRAINEES,
    StepShape,
    Trainee,
    build_trainee,
    trainee_names,
)
from arb_ternary_bench.study import Session, Study
from arb_ternary_bench.table import Column, Record, ResultTable, mebibytes, number, ratio

#: Steps before the timing: the first ones cast no votes, compile, and allocate.
_SETTLING: Final = 3
#: Ways that speeds are compared with, by the key of the ratio.
_BASELINES: Final[Mapping[str, tuple[str, ...]]] = {
    "bfloat16": ("bfloat16", "bfloat16 autocast"),
    "qat": ("BitLinear QAT",),
    "qat_compiled": ("BitLinear QAT compiled",),
}


@frozen(kw_only=True)
class StepOptions:
    """Options of the study."""

    outputs: int = option(4096, "outputs of the linear, or hidden features", validator=positive)
    inputs: int = option(4096, "inputs of the linear, or the block's width", validator=positive)
    block: bool = option(False, "a decoder block instead of a linear")
    tokens: int = option(512, "tokens per step", validator=positive)
    group_size: GroupSize = option(128, "weights that share an exponent")
    device: str = option("cpu", "cpu, cuda or cuda:N")
    backends: tuple[str, ...] = option((), "all that the device can use if empty")
    compiled: bool = option(True, "whether the baseline takes part that needs a compiler")
    threads: int | None = option(None, "null = torch's", validator=optional(positive))
    seconds: float = option(5.0, "for each way of training", validator=positive)

    def shape(self) -> StepShape:
        """Return what is trained."""
        return StepShape(
            out_features=self.outputs,
            in_features=self.inputs,
            rows=self.tokens,
            group_size=self.group_size,
            block=self.block,
            device=self.device,
        )


def run(options: StepOptions, session: Session) -> dict[str, Any]:
    """Measure everything.

    Raises:
        ArbError: a way of training fails or leaves its weights unchanged. The compiled baseline may
            fail: if no compiler works it is left out, with the reason.
        EnvironmentProblem: the device is missing.
    """
    device = options.device
    shape = options.shape()
    check_device(device)
    backends = options.backends or usable_backends(device)
    excluded: list[dict[str, str]] = []
    memory: dict[str, dict[str, int]] = {}
    trainees: dict[str, Trainee] = {}
    with with_threads(options.threads) as threads, on_device(device):
        facts = bench_facts(backends)
        for name in trainee_names(backends, compiled=options.compiled):
            try:
                memory[name] = measure_memory(name, shape, threads)
                trainees[name] = _settled(name, shape)
            except Exception as error:
                if not name.endswith(" compiled"):
                    raise
                excluded.append({"name": name, "reason": _reason(error)})
                continue
            session.say(f"{name}: peak {mebibytes(memory[name]['peak_bytes'])} MiB")
        variants = [Variant(name=name, call=_caller(trainee)) for name, trainee in trainees.items()]
        timings = measure(variants, options.seconds, _clock(device))
    return {
        "machine": {**facts, "gpu": gpu_facts(device), "load_average_at_end": load_average()},
        "shape": asdict(shape),
        "title": shape.title,
        "seconds": options.seconds,
        "excluded": excluded,
        "rows": step_rows(trainees, timings, memory, shape.rows),
    }


def _reason(error: Exception) -> str:
    if isinstance(error, ArbError):
        return str(error).strip()
    return f"{type(error).__name__}: {error}".strip()


def _clock(device: str) -> Clock:
    if device == "cpu":
        return processor_clock
    return WaitingClock(lambda: torch.cuda.synchronize(device))


def _settled(name: str, shape: StepShape) -> Trainee:
    trainee = build_trainee(name, shape)
    before = trainee.fingerprint()
    for _ in range(_SETTLING):
        trainee.step()
    if trainee.fingerprint() == before:
        raise ArbError(f"{name}: {_SETTLING} steps left every weight and vote as it was")
    return trainee


def _caller(trainee: Trainee) -> Callable[[int], None]:
    return lambda _: trainee.step()


def step_rows(
    trainees: Mapping[str, Trainee],
    timings: Mapping[str, Timing],
    memory: Mapping[str, Mapping[str, int]],
    tokens: int,
) -> list[dict[str, Any]]:
    """Return the figures of each way of training.

    A ratio is the baseline's time over the row's: 2 is twice as fast.
    """
    rows: dict[str, dict[str, Any]] = {}
    for name, trainee in trainees.items():
        timing = timings[name]
        weights = trainee.weights()
        rows[name] = {
            "name": name,
            "role": "float" if name in FLOAT_TRAINEES else "ternary",
            "what": FLOAT_TRAINEES.get(name, "scaled votes"),
            "seconds_min": timing.least,
            "seconds_median": timing.median,
            "steps": timing.calls,
            "tokens_per_second": tokens / timing.median,
            "peak_bytes": memory[name]["peak_bytes"],
            "base_bytes": memory[name]["base_bytes"],
            "weights": weights,
            "state_bytes_per_weight": trainee.state_bytes() / weights,
        }
    for row in rows.values():
        row["speedup"] = {}
        for key, candidates in _BASELINES.items():
            times = [rows[name]["seconds_min"] for name in candidates if name in rows]
            row["speedup"][key] = min(times) / row["seconds_min"] if times else None
    return list(rows.values())


def _own_bytes(row: Record) -> int:
    """Return the peak memory beyond what Python and torch hold without a model."""
    return max(1, int(row["peak_bytes"]) - int(row["base_bytes"]))


def _speedup(title: str, baseline: str) -> Column:
    return Column(title, lambda row: ratio(row["speedup"][baseline]))


def notes(result: Record) -> list[str]:
    """Return what a reader of the table has to know."""
    machine = result["machine"]
    gpu = ""
    held = "that of a process"
    if machine.get("gpu"):
        gpu = f"{machine['gpu']['name']}, "
        held = "of the tensors on the GPU of a process"
    lines = [
        f"One step of a {result['title']}: forward, backward (also to the input) and update. "
        f"{gpu}{describe(machine)}",
        "x: how many times as fast, of least times; bf16 is the faster of the two. Peak memory is "
        f"{held} that trains nothing else; bytes per weight count gradients where they are stored.",
    ]
    lines += [f"{row['name']}: {row['what']}." for row in result["rows"]]
    for each in result["excluded"]:
        reason = each["reason"].splitlines()[0]
        lines.append(f"{each['name']} is left out: {reason}")
    return lines


TABLE = ResultTable(
    columns=(
        Column("training", lambda row: row["name"], left=True),
        Column("min ms", lambda row: number(row["seconds_min"], 2, 1e3)),
        Column("median ms", lambda row: number(row["seconds_median"], 2, 1e3)),
        Column("tokens/s", lambda row: number(row["tokens_per_second"])),
        _speedup("x bf16", "bfloat16"),
        _speedup("x QAT", "qat"),
        _speedup("x QAT compiled", "qat_compiled"),
        Column("peak MiB", lambda row: mebibytes(row["peak_bytes"])),
        Column("of it model MiB", lambda row: mebibytes(_own_bytes(row))),
        Column("bytes per weight", lambda row: number(row["state_bytes_per_weight"], 2)),
    ),
    records=lambda result: result["rows"],
    notes=notes,
)
STUDY = Study(options=StepOptions, run=run, table=TABLE)
