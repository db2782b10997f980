"""Runs on several ranks, which are forked from a helper process that has imported everything.

A run then starts in a fraction of a second. The helper hosts the store where ranks meet, as
torchrun does, and reports how each rank ended. Tests of real torchrun are in ``test_torchrun``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

from arb_ternary.environment import for_child

HELPER = """
import json, os, signal, sys, time
from functools import partial
import torch
import torch._dynamo  # torch's AdamW imports it, which takes longer than a whole run
import torch.distributed as dist
torch.set_num_threads(1)
import arb_ternary_text.models.decoder
import arb_ternary_train.optim.split
import arb_ternary_votes.scaled_votes
import arb_ternary_train.optim.adamw
import arb_ternary_train.standard
import arb_ternary_distributed.launch
from pathlib import Path
from arb_ternary.errors import ArbError, render
from arb_test_support.file_faults import FileFaults
from arb_ternary_train.loading import load_config
from arb_ternary_train.progress import Silent
from arb_ternary_train.runner import RunRequest, train

COLLECTIVES = [
    "all_reduce", "all_gather_single", "all_gather_into_tensor", "all_to_all_single",
    "broadcast_object_list", "all_gather_object",
]

def moments(order, rank):
    # A moment: before and after every collective, and between two effects on the disk.
    seen = 0
    def moment(_=None):
        nonlocal seen
        seen += 1
        if (rank, seen) == tuple(order["kill"]):
            os.kill(os.getpid(), signal.SIGKILL)
        if (rank, seen) == tuple(order["ask"]):
            os.kill(os.getpid(), signal.SIGTERM)
        if (rank, seen) == tuple(order["halt"]):
            os.kill(os.getpid(), signal.SIGSTOP)
        if (rank, seen) == tuple(order["fail"]):
            raise ValueError("bad luck")
    def counted(function):
        def around(*args, **kwargs):
            moment()
            result = function(*args, **kwargs)
            moment()
            return result
        return around
    for name in filter(partial(hasattr, dist), COLLECTIVES):
        setattr(dist, name, counted(getattr(dist, name)))
    return moment, lambda: seen

def run(order, rank):
    faults, seen = moments(order, rank)
    request = RunRequest(
        directory=Path(order["directory"]), resume=order["resume"], reporter=Silent, faults=faults
    )
    failing, error, number = order["fault"]
    if rank != failing:
        number = None
    files = FileFaults(Path(order["directory"]).parent, error, number)
    try:
        with files:
            train(load_config(order["config"], order["overrides"]).config, request)
    finally:
        print("operations", json.dumps([[kind, str(path)] for kind, path in files.operations]))
        print("moments", seen(), flush=True)

def child(order, rank):
    log = os.open(order["log"] + f".{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1), os.dup2(log, 2)
    if order["size"] > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    try:
        run(order, rank)
    except ArbError as error:
        print(render(error), file=sys.stderr, flush=True)
        os._exit(error.exit_code)
    except BaseException:
        import traceback
        traceback.print_exc()
        os._exit(1)
    os._exit(0)

print("ready", flush=True)
store, port = None, 0
for line in sys.stdin:
    order = json.loads(line)
    for name in [each for each in os.environ if each.startswith(("WORLD_", "MASTER_",
        "TORCHELASTIC_"))]:
        del os.environ[name]  # one process is started without a launcher
    os.environ.update(order["environment"])
    if order["size"] > 1:
        if not order["attempt"]:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.environ.update(
            WORLD_SIZE=str(order["size"]),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port), TORCHELASTIC_USE_AGENT_STORE="1",
            TORCHELASTIC_RESTART_COUNT=str(order["attempt"]),
        )
    children = []
    for rank in range(order["size"]):
        pid = os.fork()
        if pid == 0:
            child(order, rank)
        children.append(pid)
    left, statuses, until = set(children), {}, time.monotonic() + order["seconds"]
    while left:
        for pid in list(left):
            if time.monotonic() > until:
                os.kill(pid, signal.SIGKILL)
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                left.discard(pid)
                statuses[pid] = os.waitstatus_to_exitcode(status)
        halted = order["halt"][0]
        if halted >= 0 and left == {children[halted]}:
            os.kill(children[halted], signal.SIGKILL)
        time.sleep(0.01)
    print(json.dumps([[pid, statuses[pid]] for pid in children]), flush=True)
"""


@frozen
class Ended:
    """How ranks have ended.

    Attributes:
        codes: exit code of each rank; negative = the signal that killed it.
        pids: process id of each rank.
        said: output of each rank.
    """

    codes: list[int]
    pids: list[int]
    said: list[str]

    @property
    def operations(self) -> list[list[tuple[str, str]]]:
        """File operations of each rank, next to its directory and below: kind and path."""
        found = [text.rpartition("operations ")[2].partition("\n")[0] for text in self.said]
        return [[(kind, path) for kind, path in json.loads(text)] for text in found]

    @property
    def moments(self) -> list[int]:
        """Number of moments of each rank: before and after collectives and writes."""
        return [int(text.rpartition("moments ")[2].split()[0]) for text in self.said]


class Ranks:
    """Starts runs on several ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-c", HELPER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # It finds the helpers of tests where pytest does.
            env=for_child(OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(filter(None, sys.path))),
        )
        assert self._line() == "ready"

    def run(
        self,
        config: Path,
        directory: Path,
        *overrides: str,
        size: int = 1,
        attempt: int = 0,
        resume: str | None = None,
        kill: tuple[int, int] = (-1, 0),
        ask: tuple[int, int] = (-1, 0),
        halt: tuple[int, int] = (-1, 0),
        fail: tuple[int, int] = (-1, 0),
        fault: tuple[int, int, int] = (-1, 0, 0),
        environment: dict[str, str] | None = None,
        seconds: float = 240.0,
    ) -> Ended:
        """Train ``config`` in ``directory`` on ``size`` ranks, and wait for all to end.

        Args:
            attempt: how often a launcher has restarted the ranks.
            kill: rank, and the moment at which it receives SIGKILL.
            ask: rank, and the moment at which it receives SIGTERM.
            halt: rank, and the moment at which it receives SIGSTOP; it is killed when the others
                have ended.
            fail: rank, and the moment at which it raises an unexpected error.
            fault: rank, and error and number of its file operation that fails.
            seconds: time after which all ranks are killed.
        """
        log = self.folder / f"{directory.name}.log"
        order = {
            "config": str(config),
            "directory": str(directory),
            "overrides": overrides,
            "size": size,
            "attempt": attempt,
            "resume": resume,
            "kill": kill,
            "ask": ask,
            "halt": halt,
            "fail": fail,
            "fault": fault,
            "environment": {"ARB_TERNARY_RANK_TIMEOUT": "60", **(environment or {})},
            "log": str(log),
            "seconds": seconds,
        }
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        ended = json.loads(self._line())
        said = [Path(f"{log}.{rank}").read_text() for rank in range(size)]
        return Ended([code for _, code in ended], [pid for pid, _ in ended], said)

    def must(self, config: Path, directory: Path, *overrides: str, **options: Any) -> Ended:
        """Call :meth:`run`, and check that every rank finishes."""
        ended = self.run(config, directory, *overrides, **options)
        assert set(ended.codes) == {0}, "\n".join(ended.said)
        return ended

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()


@pytest.fixture(scope="package")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    made = Ranks(tmp_path_factory.mktemp("ranks"))
    yield made
    made.close()


@pytest.fixture(scope="package")
def text(ranks: Ranks) -> Path:
    path = ranks.folder / "text.txt"
    path.write_text("to be or not to be, that is the question; " * 40)
    return path


def files_of(directory: Path) -> dict[str, bytes]:
    """Return every file of a run, without the log and the speed in ``result.json``."""
    files = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    found = {
        str(path.relative_to(directory)): path.read_bytes()
        for path in files
        if path.name not in (".lock", "train.log")
    }
    if "result.json" in found:
        result = json.loads(found["result.json"])
        del result["tokens_per_second"]
        found["result.json"] = json.dumps(result).encode()
    return found


@pytest.fixture(scope="session")
def same_files() -> Callable[[Path, Path], None]:
    def compare(one: Path, other: Path) -> None:
        left = files_of(one)
        right = files_of(other)
        assert left.keys() == right.keys()
        different = [name for name in left if left[name] != right[name]]
        assert not different, f"{one} and {other}: {', '.join(different)}"

    return compare
