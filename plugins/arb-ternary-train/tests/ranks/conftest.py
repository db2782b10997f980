"""Two ranks, started once for several files of tests: what each does there is its ``on_rank(world,
folder)``.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch._dynamo  # torch's optimizers import it: here once, and not on every rank  # noqa: F401

from arb_ternary_testing.ranks import on_ranks
from arb_ternary_train.ranks.world import World

FILES = ("test_ordered_sums", "test_dealing", "test_saving")


def on_all(world: World, folder: str) -> dict[str, Any]:
    told = {}
    for name in FILES:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        told[name] = module.on_rank(world, Path(folder) / name)
    return told


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    """What ``on_rank`` of each file has returned, by rank and file; and the folder, which has one
    for each file.
    """
    folder = tmp_path_factory.mktemp("ranks")
    for name in FILES:
        (folder / name).mkdir()
    return on_ranks(2, on_all, str(folder)), folder
