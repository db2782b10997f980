"""Functions that run on several ranks at once, each in a process of its own, over gloo."""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from arb_ternary.environment import for_child

__all__ = ["on_ranks"]

_CHILD = """
import importlib.util, pickle, sys, traceback
from pathlib import Path
import torch
import torch.distributed as dist
from arb_ternary_train.ranks.world import Ranks
folder, source, name, rank, size = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
torch.set_num_threads(1)
spec = importlib.util.spec_from_file_location("functions_on_ranks", source)
module = importlib.util.module_from_spec(spec)
sys.modules["functions_on_ranks"] = module
spec.loader.exec_module(module)
arguments = pickle.loads((folder / "arguments").read_bytes())
dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), size), rank=rank, world_size=size)
world = Ranks(torch.device("cpu"))
result = getattr(module, name)(world, *arguments)
(folder / f"result-{rank}").write_bytes(pickle.dumps(result))
world.close()
"""


def on_ranks(size: int, function: Callable[..., Any], *arguments: Any, seconds: float = 120.0) -> list[Any]:
    """What ``function(world, *arguments)`` returns on each of ``size`` ranks, by rank.

    Args:
        size: how many ranks.
        function: of a module that can be loaded from its file; it gets the ``World`` and is called in new processes.
        arguments: plain values or tensors, the same for all.
        seconds: how long it may take.

    Raises:
        AssertionError: a rank failed; with what it printed.
    """
    with tempfile.TemporaryDirectory(prefix="arb-ranks-") as name:
        folder = Path(name)
        (folder / "arguments").write_bytes(pickle.dumps(arguments))
        source = str(Path(function.__code__.co_filename).resolve())
        command = [sys.executable, "-c", _CHILD, name, source, function.__name__]
        children = [
            subprocess.Popen(
                [*command, str(rank), str(size)],
                env=for_child(OMP_NUM_THREADS="1"),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(size)
        ]
        try:
            told = [child.communicate(timeout=seconds)[0] for child in children]
        finally:
            for child in children:
                child.kill()
                child.wait()
        for rank, child in enumerate(children):
            assert child.returncode == 0, f"rank {rank} ended with {child.returncode}:\n{told[rank]}"
        return [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(size)]
