"""One contender in a process of its own, so that its memory is its own and no other's threads are
awake.

``python -m arb_ternary_bench.generation.child REQUEST`` measures and prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from attrs import asdict

from arb_ternary_bench.answers import ask_process
from arb_ternary_bench.generation.cases import CLOCKS, Case, ClockName, measure_case, warm_up
from arb_ternary_bench.generation.contenders import LLAMA_CPP, Contender, open_session
from arb_ternary_bench.generation.shapes import SHAPES, GenerationShape

_MODULE: Final = "arb_ternary_bench.generation.child"
_SMALL: Final = SHAPES["tiny"]


def measure_contender(
    contender: Contender,
    shape: GenerationShape,
    cases: Sequence[Case],
    *,
    seconds: float,
    limit: float,
    clock: ClockName,
    file: Path | None,
) -> dict[str, Any]:
    """Load the contender and measure the cases in their order.

    Args:
        contender: who.
        shape: of the model.
        cases: the quicker ones first.
        seconds: for each case, about.
        clock: of the times.
        limit: a case whose prompts would take longer, by the rate of the case before, is left out.
        file: see :func:`~arb_ternary_bench.generation.contenders.open_session`.

    Returns:
        ``base_bytes`` (resident with libraries, before there was a model), ``weight_bytes``, and
        ``cases``: for each what :func:`~arb_ternary_bench.generation.cases.measure_case` returns,
        or ``left_out`` with the reason.

    Raises:
        ArbError: the process failed.
    """
    return _ask(
        contender.title,
        contender.threads,
        {
            "contender": asdict(contender),
            "shape": asdict(shape),
            "cases": [asdict(case) for case in cases],
            "seconds": seconds,
            "limit": limit,
            "clock": clock,
            "file": None if file is None else str(file),
        },
    )


def measure_bandwidth(
    backends: Sequence[str], threads: int, seconds: float, clock: ClockName
) -> dict[str, Any]:
    """The rate at which memory is read, ``bytes_per_second``, and ``how`` it was measured.

    Raises:
        ArbError: the process failed.
    """
    request = {"backends": list(backends), "threads": threads, "seconds": seconds, "clock": clock}
    return _ask("read bandwidth", threads, request)


def _ask(title: str, threads: int, request: dict[str, Any]) -> dict[str, Any]:
    return ask_process(_MODULE, request, threads=threads, title=title, measures="measures it")


def main(request: str) -> dict[str, Any]:
    """Measure what was asked for."""
    asked = json.loads(request)
    return _bandwidth(asked) if "backends" in asked else _contender(asked)


def _bandwidth(asked: dict[str, Any]) -> dict[str, Any]:
    from arb_ternary_bench.kernels.bench import with_threads
    from arb_ternary_bench.kernels.cache import last_level_cache
    from arb_ternary_bench.kernels.probes import read_probe
    from arb_ternary_bench.kernels.timing import Variant, measure

    now = CLOCKS[asked["clock"]]

    def timed(variant: Variant, i: int) -> float:
        before = now()
        variant.call(i)
        return now() - before

    with with_threads(asked["threads"]):
        probe = read_probe(asked["backends"], last_level_cache().nbytes, asked["seconds"] / 8)
        timing = measure([probe.variant], asked["seconds"], timed)[probe.variant.name]
    return {"bytes_per_second": probe.variant.nbytes / timing.least, "how": probe.how}


def _contender(asked: dict[str, Any]) -> dict[str, Any]:
    from arb_ternary_bench.steps.resident import resident_bytes

    contender = Contender(**asked["contender"])
    shape = GenerationShape(**asked["shape"])
    cases = [Case(**each) for each in asked["cases"]]
    if contender.name not in LLAMA_CPP:
        # What libraries load and allocate on their first use is no part of the model.
        warm_up(open_session(contender, _SMALL, 16, None), _SMALL.vocabulary)
    base = resident_bytes()
    file = None if asked["file"] is None else Path(asked["file"])
    session = open_session(contender, shape, max(case.length for case in cases), file)
    warm_up(session, shape.vocabulary)
    measured: list[dict[str, Any]] = []
    rate = 0.0
    for case in cases:
        expected = case.batch * case.prompt / rate if rate else 0.0
        if expected > asked["limit"]:
            measured.append({"left_out": f"its prompts would take about {expected:,.0f} s"})
            continue
        measured.append(
            measure_case(session, case, shape.vocabulary, asked["seconds"], asked["clock"])
        )
        rate = case.batch * case.prompt / min(measured[-1]["prompt_seconds"])
    return {"base_bytes": base, "weight_bytes": session.weight_bytes, "cases": measured}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
