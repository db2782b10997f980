"""The processes of the training bench, seen from the one that started them."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from typing import IO, Any, Final, Self

from attrs import asdict, define, field, frozen

from arb_ternary.environment import for_child
from arb_ternary.errors import ArbError
from arb_ternary_bench.training.child import STEP
from arb_ternary_bench.training.sizes import TrainSize
from arb_ternary_bench.training.trainees import TrainWay
from arb_ternary_train.openmp import NUM_THREADS

# : Name of the setting of malloc by which freed memory stays with the process, and how glibc is
# told.
KEPT: Final = "kept"
_TUNABLES: Final = "glibc.malloc.trim_threshold=8589934592:glibc.malloc.mmap_threshold=8589934592"
#: Seconds that a process gets to end by itself.
_PATIENCE: Final = 30.0


@frozen(kw_only=True)
class Asked:
    """What a process trains.

    Attributes:
        way: how.
        size: what.
        threads: of torch and of the kernels.
        malloc: ``default`` or :data:`KEPT`.
        seed: of the weights.
    """

    way: TrainWay
    size: TrainSize
    threads: int
    malloc: str = "default"
    seed: int = 0

    def environment(self) -> dict[str, str]:
        """Of the process. Compilers get no processes of their own, which would stay and hold
        memory.
        """
        kept = {"GLIBC_TUNABLES": _TUNABLES} if self.malloc == KEPT else {}
        alone = {"TORCHINDUCTOR_COMPILE_THREADS": "1"} if self.way.compiled else {}
        return for_child(**{NUM_THREADS.name: str(self.threads)}, **kept, **alone)


@define(eq=False)
class TrainProcess:
    """A process that trains in one way, a step at a time; for a ``with`` block.

    Attributes:
        asked: what it trains.
        facts: what it said when it was ready, or of its profiled steps.
        last: seconds of the last step, ``wall`` and ``processor``.
    """

    asked: Asked
    facts: dict[str, Any] = field(init=False, factory=dict)
    last: dict[str, float] = field(init=False, factory=dict)
    _process: subprocess.Popen[str] = field(init=False)
    _errors: IO[str] = field(init=False)

    @classmethod
    def profiled(cls, asked: Asked) -> dict[str, Any]:
        """The :class:`~arb_ternary_bench.training.parts.Split` of a profiled step, as plain values.

        Raises:
            ArbError: the process failed.
        """
        process = cls(asked)
        process._start(profile=True)
        process.__exit__()
        return process.facts

    def __enter__(self) -> Self:
        self._start(profile=False)
        return self

    def __exit__(self, *_: object) -> None:
        """End it: it needs no notice."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def step(self, _: int = 0) -> float:
        """One step; the seconds that it took there.

        Raises:
            ArbError: the process failed.
        """
        self._order(STEP)
        self.last = self._answer()
        return self.last["wall"]

    def peak_bytes(self) -> int:
        """The most that it has held. It takes no step after that."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        peak = int(self._answer()["peak_bytes"])
        self._process.wait(_PATIENCE)
        self._process.stdin = None
        return peak

    def _start(self, *, profile: bool) -> None:
        asked = self.asked
        request = {
            "way": asked.way.name,
            "size": asdict(asked.size),
            "threads": asked.threads,
            "seed": asked.seed,
        }
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115  # closed by __exit__
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "arb_ternary_bench.training.child",
                json.dumps({**request, "profile": profile}),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=asked.environment(),
        )
        try:
            self.facts = self._answer()
        except BaseException:
            self.__exit__()
            raise

    def _order(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._fail()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._fail()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _fail(self) -> None:
        code = self._process.wait(_PATIENCE)
        self._errors.seek(0)
        tail = [
            line
            for line in self._errors.read().splitlines()
            if line.strip() and not line.startswith("USDT:")
        ]
        last = tail[-1] if tail else "it said nothing"
        raise ArbError(
            f"{self.asked.way.name}: the process that trains ended with {code}: {last}",
            "\n".join(tail[-12:]),
        )
