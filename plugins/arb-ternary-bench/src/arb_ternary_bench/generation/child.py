"""One contender in a process of its own, whose memory is its own, while no other computes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from attrs import asdict

from arb_ternary_bench.child import answer, ask
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
    """Load the contender in a process and measure the cases in their order.

    Args:
        contender: who.
        shape: of the model.
        cases: the quicker ones first.
        seconds: about how long each case takes.
        limit: a case is left out if its prompts would take more seconds than this, by the rate of
            the case before.
        clock: of the times.
        file: see :func:`~arb_ternary_bench.generation.contenders.open_session`.

    Returns:
        ``base_bytes`` (resident with libraries, before there was a model), ``weight_bytes``, and
        ``cases``: for each what :func:`~arb_ternary_bench.generation.cases.measure_case` returns,
        or ``left_out`` with the reason.

    Raises:
        ArbError: the process failed.
    """
    request = {
        "contender": asdict(contender),
        "shape": asdict(shape),
        "cases": [asdict(case) for case in cases],
        "seconds": seconds,
        "limit": limit,
        "clock": clock,
        "file": None if file is None else str(file),
    }
    return ask(_MODULE, request, title=contender.title, threads=contender.threads)


def measure_bandwidth(
    backends: Sequence[str], threads: int, seconds: float, clock: ClockName
) -> dict[str, Any]:
    """Measure in a process at which rate memory is read.

    Returns:
        ``bytes_per_second``, and ``how`` it was measured.

    Raises:
        ArbError: the process failed.
    """
    request = {"backends": list(backends), "threads": threads, "seconds": seconds, "clock": clock}
    return ask(_MODULE, request, title="read bandwidth", threads=threads)


def respond(request: dict[str, Any]) -> dict[str, Any]:
    """Measure in the process what was asked for."""
    if "backends" in request:
        return _respond_bandwidth(request)
    return _respond_contender(request)


def _respond_bandwidth(request: dict[str, Any]) -> dict[str, Any]:
    from arb_ternary_bench.kernels.cache import last_level_cache
    from arb_ternary_bench.kernels.probes import read_probe
    from arb_ternary_bench.kernels.timing import Variant, measure
    from arb_ternary_bench.machine import with_threads

    now = CLOCKS[request["clock"]]

    def timed(variant: Variant, i: int) -> float:
        before = now()
        variant.call(i)
        return now() - before

    seconds = request["seconds"]
    with with_threads(request["threads"]):
        probe = read_probe(request["backends"], last_level_cache().nbytes, seconds / 8)
        timing = measure([probe.variant], seconds, timed)[probe.variant.name]
    return {"bytes_per_second": probe.variant.nbytes / timing.least, "how": probe.how}


def _respond_contender(request: dict[str, Any]) -> dict[str, Any]:
    from arb_ternary_bench.memory import resident_bytes

    contender = Contender(**request["contender"])
    shape = GenerationShape(**request["shape"])
    cases = [Case(**each) for each in request["cases"]]
    if contender.name not in LLAMA_CPP:
        # What libraries load and allocate on their first use is not part of the model.
        warm_up(open_session(contender, _SMALL, 16, None), _SMALL.vocabulary)
    base = resident_bytes()

    file = None if request["file"] is None else Path(request["file"])
    session = open_session(contender, shape, max(case.length for case in cases), file)
    warm_up(session, shape.vocabulary)
    measured: list[dict[str, Any]] = []
    rate = 0.0
    for case in cases:
        expected = case.batch * case.prompt / rate if rate else 0.0
        if expected > request["limit"]:
            measured.append({"left_out": f"its prompts would take about {expected:,.0f} s"})
            continue
        times = measure_case(session, case, shape.vocabulary, request["seconds"], request["clock"])
        measured.append(times)
        rate = case.batch * case.prompt / min(times["prompt_seconds"])
    return {"base_bytes": base, "weight_bytes": session.weight_bytes, "cases": measured}


if __name__ == "__main__":
    answer(lambda request, _orders: [respond(request)])
