"""One way of training in a process of its own: the parent says when it takes a step, or has some
profiled.

``python -m arb_ternary_bench.training.child '{"way": ..., "size": {...}, "threads": 1, "seed": 0,
"profile": false}'`` prints a line of JSON when it is ready, one for every line ``step`` that it
reads, and one at the end of its input. With ``profile`` it prints one line and ends.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

from arb_ternary_bench.training.sizes import SIZES, TrainSize

#: What the parent writes for a step.
STEP = "step"


def answers(asked: dict[str, Any], orders: Iterable[str]) -> Iterator[dict[str, Any]]:
    """What is told of one way of training: when it is ready, after each of ``orders``, and at their
    end.
    """
    size = TrainSize(**asked["size"])
    import torch
    from attrs import asdict, evolve

    from arb_ternary_bench.steps.resident import peak_bytes, resident_bytes
    from arb_ternary_bench.training.loop import Learner
    from arb_ternary_bench.training.profile import profile_steps
    from arb_ternary_bench.training.trainees import TrainWay

    torch.set_num_threads(asked["threads"])
    way = TrainWay(asked["way"])
    if asked["profile"]:
        yield asdict(profile_steps(way, size, asked["seed"]))
        return
    # What libraries load and allocate on their first use is no part of the model.
    Learner(evolve(way, name=way.name.removesuffix("/compiled")), SIZES["tiny"]).step()
    base = resident_bytes()
    learner = Learner(way, size, asked["seed"])
    losses = learner.check()
    yield {**learner.facts(), "losses": losses, "base_bytes": base}
    for _ in orders:
        wall = time.perf_counter()
        processor = time.process_time()
        learner.step()
        yield {"wall": time.perf_counter() - wall, "processor": time.process_time() - processor}
    yield {"peak_bytes": peak_bytes()}


def main(request: str) -> None:
    """Answer on what was the standard output; what libraries print there goes to the error
    output.
    """
    from arb_ternary_train.openmp import wait_passively

    wait_passively()  # as `arb train` does, before torch is imported
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as output:
        os.dup2(2, 1)
        for answer in answers(json.loads(request), sys.stdin):
            print(json.dumps(answer), file=output, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
