"""Weights on huge pages: the same values, side by side."""

from __future__ import annotations

import ctypes
import io
import itertools
import re
import resource
from pathlib import Path

import pytest
import torch
from torch import nn

from arb_ternary.ternary.huge_pages import HUGE_PAGE, Region, move_to_huge_pages
from arb_ternary.ternary.linear import TernaryLinear


def model() -> nn.Sequential:
    """Ten megabytes of weights and accumulators; no tensor is larger than a huge page."""
    torch.manual_seed(0)
    layers = [TernaryLinear(2048, 1024, backend="torch") for _ in range(4)]
    return nn.Sequential(nn.Embedding(100, 2048), *layers, nn.LayerNorm(1024))


def addresses(module: nn.Module) -> list[tuple[int, int]]:
    """Return where each tensor begins and ends, in the order of modules."""
    found = []
    for part in module.modules():
        tensors = (*part._parameters.values(), *part._buffers.values())
        given = [tensor for tensor in tensors if tensor is not None and tensor.numel()]
        found += [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in given]
    return found


def test_a_model_lies_in_one_region_in_the_order_of_its_modules() -> None:
    module = model()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    objects = [id(each) for each in (*module.parameters(), *module.buffers())]
    moved = move_to_huge_pages(module)
    after = module.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert [id(each) for each in (*module.parameters(), *module.buffers())] == objects
    places = addresses(module)
    assert places == sorted(places)
    assert places[0][0] % HUGE_PAGE == 0
    assert all(first % 64 == 0 for first, _ in places)
    assert all(start - end < 64 for (_, end), (start, _) in itertools.pairwise(places))
    assert moved >= sum(end - first for first, end in places)


def test_a_moved_model_computes_learns_and_is_saved_as_before() -> None:
    module = model()[1]
    twin = model()[1]
    wide = nn.Sequential(module, nn.Linear(1024, 1024))
    assert move_to_huge_pages(wide)
    x = torch.randn(3, 2048)
    assert torch.equal(module(x), twin(x))
    for each in (module, twin):
        each(x).square().sum().backward()
    assert torch.equal(module.votes, twin.votes)
    saved = io.BytesIO()
    torch.save(module.state_dict(), saved)
    # A tensor is saved with its own bytes, and not with those of the region.
    assert saved.tell() < HUGE_PAGE * 2
    saved.seek(0)
    assert torch.equal(torch.load(saved)["weight"], twin.state_dict()["weight"])


def test_tensors_that_share_their_memory_keep_it() -> None:
    module = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 1024))
    module[1].weight.data = module[0].weight.data
    shared = module[0].weight.data_ptr()
    assert move_to_huge_pages(module) > 4 * 1024 * 1024
    assert module[0].weight.data_ptr() == module[1].weight.data_ptr() == shared
    tied = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024))
    tied[1].weight = tied[0].weight
    move_to_huge_pages(tied)
    assert tied[0].weight is tied[1].weight


def test_the_memory_of_before_is_returned() -> None:
    if not Path("/proc/self/statm").exists() or not hasattr(ctypes.CDLL(None), "malloc_trim"):
        pytest.skip("this system does not say what is resident, or its allocator is another one")
    # Each takes its memory from the heap, of which only the end would be returned by itself.
    module = nn.Sequential(*(nn.Linear(128, 128) for _ in range(1000)))
    held = torch.zeros(128, 128)
    before = resident_bytes()
    size = move_to_huge_pages(module)
    assert size > 60 << 20
    assert resident_bytes() - before < size / 4
    assert not held.any()


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def test_a_small_model_stays_where_it_is() -> None:
    module = nn.Linear(64, 64)
    place = module.weight.data_ptr()
    assert move_to_huge_pages(module) == 0
    assert module.weight.data_ptr() == place


def test_a_region_is_on_huge_pages_where_the_system_has_them() -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text(encoding="ascii"):
        pytest.skip("this system has no huge pages")
    taken = Region(8 * HUGE_PAGE).take((8 * HUGE_PAGE,), torch.uint8)
    taken.fill_(1)
    first = taken.data_ptr()
    maps = Path("/proc/self/smaps").read_text(encoding="ascii")
    inside = False
    huge = 0
    for line in maps.splitlines():
        span = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if span is not None:
            inside = int(span[1], 16) < first + taken.nbytes and first < int(span[2], 16)
        if inside and line.startswith("AnonHugePages:"):
            huge += int(line.split()[1]) * 1024
    if not huge:
        pytest.skip("the system had no huge page to give")
    assert huge >= HUGE_PAGE
