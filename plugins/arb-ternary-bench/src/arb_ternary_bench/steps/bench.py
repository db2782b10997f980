"""The step bench: forward, backward and update of a linear or a block, in every way of training it,
in turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from attrs import asdict, frozen

from arb_ternary.errors import ArbError
from arb_ternary_bench.kernels.bench import with_threads
from arb_ternary_bench.kernels.facts import bench_facts, load_average
from arb_ternary_bench.kernels.gpu import WaitingClock, check_device, gpu_facts, on_device
from arb_ternary_bench.kernels.timing import Clock, Timing, Variant, measure, processor_clock
from arb_ternary_bench.steps.child import measure_memory
from arb_ternary_bench.steps.trainees import (
    FLOAT_TRAINEES,
    StepShape,
    Trainee,
    build_trainee,
    trainee_names,
)

FORMAT: Final = "arb-bench-step"
VERSION: Final = 1
#: Steps before the timing: the first ones cast no votes, compile, and allocate.
_SETTLING: Final = 3
#: What speeds and memory are compared with, by the key of the ratio.
_BASELINES: Final[Mapping[str, tuple[str, ...]]] = {
    "bfloat16": ("bfloat16", "bfloat16 autocast"),
    "qat": ("BitLinear QAT",),
    "qat_compiled": ("BitLinear QAT compiled",),
}


@frozen(kw_only=True)
class StepBench:
    """What to measure.

    Attributes:
        shape: what is trained, and where.
        backends: names.
        compiled: whether the compiled baseline takes part.
        threads: of all; None leaves torch's number.
        seconds: for each way of training, about.
    """

    shape: StepShape
    backends: tuple[str, ...]
    compiled: bool = True
    threads: int | None = None
    seconds: float = 5.0


def run_step_bench(
    bench: StepBench, *, say: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Measure everything; the content of ``result.json``.

    Raises:
        ArbError: a way of training fails or leaves its weights as they were. The compiled baseline
            may fail: where no compiler works it is left out, with the reason.
        EnvironmentProblem: the device is not there.
    """
    device = bench.shape.device
    check_device(device)
    names = trainee_names(bench.backends, compiled=bench.compiled)
    excluded: list[dict[str, str]] = []
    with with_threads(bench.threads) as threads, on_device(device):
        facts = bench_facts(bench.backends)
        memory: dict[str, dict[str, int]] = {}
        trainees: dict[str, Trainee] = {}
        for name in names:
            try:
                memory[name] = measure_memory(name, bench.shape, threads)
                trainees[name] = _settled(name, bench.shape)
            except Exception as error:
                if not name.endswith(" compiled"):
                    raise
                reason = (
                    error if isinstance(error, ArbError) else f"{type(error).__name__}: {error}"
                )
                excluded.append({"name": name, "reason": str(reason).strip()})
                continue
            say(f"{name}: peak {memory[name]['peak_bytes'] / 2**20:,.0f} MiB")
        variants = [Variant(name=name, call=_caller(trainee)) for name, trainee in trainees.items()]
        timings = measure(variants, bench.seconds, _clock(device))
    return {
        "format": FORMAT,
        "version": VERSION,
        "machine": {**facts, "gpu": gpu_facts(device), "load_average_at_end": load_average()},
        "shape": asdict(bench.shape),
        "title": bench.shape.title,
        "seconds": bench.seconds,
        "excluded": excluded,
        "rows": step_rows(trainees, timings, memory, bench.shape.rows),
    }


def _clock(device: str) -> Clock:
    return (
        processor_clock if device == "cpu" else WaitingClock(lambda: torch.cuda.synchronize(device))
    )


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
    """The figures of each way of training. A ratio is the baseline's over the row's: 2 is twice as
    fast, or half.
    """
    rows: list[dict[str, Any]] = []
    for name, trainee in trainees.items():
        timing = timings[name]
        held = memory[name]
        weights = trainee.weights()
        state = trainee.state_bytes()
        rows.append(
            {
                "name": name,
                "role": "float" if name in FLOAT_TRAINEES else "ternary",
                "what": FLOAT_TRAINEES.get(name, "scaled votes"),
                "seconds_min": timing.least,
                "seconds_median": timing.median,
                "steps": timing.calls,
                "tokens_per_second": tokens / timing.median,
                "peak_bytes": held["peak_bytes"],
                "base_bytes": held["base_bytes"],
                "weights": weights,
                "state_bytes_per_weight": state / weights,
            }
        )
    by_name = {row["name"]: row for row in rows}
    for row in rows:
        row["speedup"] = {}
        row["speedup_median"] = {}
        row["memory_ratio"] = {}
        for key, candidates in _BASELINES.items():
            there = [by_name[name] for name in candidates if name in by_name]
            fastest = min(there, key=lambda each: each["seconds_min"], default=None)
            smallest = min(
                there, key=lambda each: each["peak_bytes"] - each["base_bytes"], default=None
            )
            row["speedup"][key] = fastest and fastest["seconds_min"] / row["seconds_min"]
            row["speedup_median"][key] = (
                fastest and fastest["seconds_median"] / row["seconds_median"]
            )
            row["memory_ratio"][key] = smallest and _own(smallest) / _own(row)
    return rows


def _own(row: Mapping[str, Any]) -> int:
    """Peak memory beyond what Python and torch hold without a model."""
    return max(1, int(row["peak_bytes"]) - int(row["base_bytes"]))
