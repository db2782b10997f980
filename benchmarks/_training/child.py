"""A run of ``arb train`` whose steps are timed, in a process of its own."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from harness.child import answer, ask

_MODULE: Final = "_training.child"


def measure_run(
    config: Path, folder: Path, *, title: str, threads: int, device: str
) -> dict[str, Any]:
    """Train in a process.

    Returns:
        ``seconds`` between the ends of updates, one for each step after the first, and
        ``peak_bytes`` at the last of them: of the process, or of the tensors on a GPU.

    Raises:
        ArbError: the run failed.
    """
    request = {"config": str(config), "folder": str(folder), "threads": threads, "device": device}
    return ask(_MODULE, request, title=title, threads=threads)


def respond(request: dict[str, Any]) -> dict[str, Any]:
    """Train in the process that was asked."""
    from arb_ternary_train.freed_memory import keep_freed_memory
    from arb_ternary_train.openmp import wait_passively

    # As `arb train` does, before torch is imported.
    wait_passively()
    keep_freed_memory()
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from arb_ternary.cli.main import main
    from harness.memory import device_peak_bytes

    ends: dict[int, list[float]] = {}
    peak = 0

    def note(optimizer: torch.optim.Optimizer, *_: object) -> None:
        nonlocal peak
        ends.setdefault(id(optimizer), []).append(time.perf_counter())
        peak = device_peak_bytes(request["device"])

    register_optimizer_step_post_hook(note)
    torch.set_num_threads(request["threads"])
    code = main(["train", request["config"], "--run-dir", request["folder"]])
    if code:
        raise SystemExit(code)
    # An optimizer may hand parts of the model to others, which end a step before it does.
    times = next(reversed(ends.values()))
    seconds = [after - before for before, after in pairwise(times)]
    return {"seconds": seconds, "peak_bytes": peak}


if __name__ == "__main__":
    answer(respond)
