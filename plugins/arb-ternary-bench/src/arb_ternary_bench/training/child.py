"""One way of training in a process of its own, which takes one step per request.

The process answers when it is ready, after every step, and at the end of its orders with its peak
memory. Asked for a profile, it answers once, with the parts of a step.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any, Final, Self

from attrs import asdict, define, field, frozen

from arb_ternary_bench.child import AnsweringChild, answer
from arb_ternary_bench.training.sizes import SIZES, TrainSize
from arb_ternary_bench.training.trainees import TrainWay

_MODULE: Final = "arb_ternary_bench.training.child"
_STEP: Final = "step"


@frozen(kw_only=True)
class Trainee:
    """The training that a process runs.

    Attributes:
        way: how.
        size: the decoder.
        threads: of torch and of the kernels.
        seed: of the weights.
    """

    way: TrainWay
    size: TrainSize
    threads: int
    seed: int = 0

    def environment(self) -> dict[str, str]:
        """Return the variables that its process is started with."""
        # Compilers in processes of their own would stay and hold memory.
        return {"TORCHINDUCTOR_COMPILE_THREADS": "1"} if self.way.compiled else {}

    def start(self, *, profile: bool = False) -> AnsweringChild:
        """Start its process."""
        request = {
            "way": self.way.name,
            "size": asdict(self.size),
            "threads": self.threads,
            "seed": self.seed,
            "profile": profile,
        }
        return AnsweringChild.start(
            _MODULE,
            request,
            title=self.way.name,
            threads=self.threads,
            environment=self.environment(),
        )


@define(eq=False)
class TrainProcess:
    """A process that trains in one way, a step at a time; for a ``with`` block.

    Attributes:
        trainee: what it trains.
        facts: what it said when it was ready.
        last: seconds of the last step, ``wall`` and ``processor``.
    """

    trainee: Trainee
    facts: dict[str, Any] = field(init=False, factory=dict)
    last: dict[str, float] = field(init=False, factory=dict)
    _child: AnsweringChild = field(init=False)

    @staticmethod
    def profiled(trainee: Trainee) -> dict[str, Any]:
        """Return the parts of a profiled step, as :class:`arb_ternary_bench.training.parts.Split`.

        Raises:
            ArbError: the process failed.
        """
        with trainee.start(profile=True) as child:
            return child.receive()

    def __enter__(self) -> Self:
        self._child = self.trainee.start()
        try:
            self.facts = self._child.receive()
        except BaseException:
            self._child.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._child.__exit__()

    def step(self) -> None:
        """Take one step.

        Raises:
            ArbError: the process failed.
        """
        self._child.send(_STEP)
        self.last = self._child.receive()

    def peak_bytes(self) -> int:
        """Return the peak of its memory. It takes no step after that."""
        self._child.end_orders()
        return int(self._child.receive()["peak_bytes"])


def respond(request: dict[str, Any], orders: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Train in the process: answer when ready, after each order, and at their end."""
    from arb_ternary_train.freed_memory import keep_freed_memory
    from arb_ternary_train.openmp import wait_passively

    # As `arb train` does, before torch is imported.
    wait_passively()
    keep_freed_memory()
    import torch
    from attrs import evolve

    from arb_ternary_bench.memory import peak_bytes, resident_bytes
    from arb_ternary_bench.training.loop import Learner
    from arb_ternary_bench.training.profile import profile_steps

    torch.set_num_threads(request["threads"])
    way = TrainWay(request["way"])
    size = TrainSize(**request["size"])
    if request["profile"]:
        yield asdict(profile_steps(way, size, request["seed"]))
        return

    # What libraries load and allocate on their first use is not part of the model.
    Learner(evolve(way, name=way.name.removesuffix("/compiled")), SIZES["tiny"]).step()
    base = resident_bytes()

    learner = Learner(way, size, request["seed"])
    losses = learner.check()
    yield {**learner.facts(), "losses": losses, "base_bytes": base}
    for _ in orders:
        wall = time.perf_counter()
        processor = time.process_time()
        learner.step()
        yield {"wall": time.perf_counter() - wall, "processor": time.process_time() - processor}
    yield {"peak_bytes": peak_bytes()}


if __name__ == "__main__":
    answer(respond)
