"""The size of the last-level cache, and operands that do not fit it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from arb_ternary_bench.kernels.cache import copies_beyond, last_level_cache
from arb_ternary_bench.kernels.cells import Cell
from arb_ternary_bench.kernels.operands import Operands
from arb_ternary_bench.kernels.ops import OPS


def write_cache(
    root: Path, cpu: int, index: int, level: int, kind: str, size: str, shared: str
) -> None:
    folder = root / f"cpu{cpu}" / "cache" / f"index{index}"
    folder.mkdir(parents=True)
    for name, text in (
        ("level", str(level)),
        ("type", kind),
        ("size", size),
        ("shared_cpu_list", shared),
    ):
        (folder / name).write_text(f"{text}\n")


def test_last_cache_level_counts_once_per_cache(tmp_path: Path) -> None:
    for cpu in range(4):
        write_cache(tmp_path, cpu, 0, 1, "Data", "48K", str(cpu))
        write_cache(tmp_path, cpu, 1, 1, "Instruction", "64M", str(cpu))
        write_cache(tmp_path, cpu, 2, 3, "Unified", "16M", "0-1" if cpu < 2 else "2-3")
    found = last_level_cache(tmp_path)
    assert found.nbytes == 2 * 16 << 20
    assert "level 3" in found.source


def test_a_system_that_does_not_tell_gives_a_guess_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.platform", "plan9")
    assert "guess" in last_level_cache(tmp_path).source


@pytest.mark.parametrize("operand", [1, 1000, 1 << 19, 1 << 20, 3 << 20, 4 << 20, 9 << 20])
def test_copies_take_more_than_the_cache(operand: int) -> None:
    cache = 1 << 20
    copies = copies_beyond(cache, operand)
    assert copies * operand >= 2 * cache
    assert copies > 1 or operand >= 4 * cache


@pytest.mark.parametrize("op", OPS)
def test_cold_contenders_rotate_among_more_bytes_than_the_cache(
    op: str, make_cell: Callable[..., Cell]
) -> None:
    cell = make_cell(op, cold=True, cache_bytes=1 << 17)
    for contender in OPS[op].contenders(cell, Operands(cell, 1), ["torch"]):
        variant = contender.variant
        if variant.rotated_bytes:  # a product of a gradient and activations has no weight to rotate
            assert variant.copies * variant.rotated_bytes > cell.cache_bytes, variant.name
            for copy in range(variant.copies):
                variant.call(copy)


def test_hot_contenders_have_one_copy(make_cell: Callable[..., Cell]) -> None:
    cell = make_cell("linear")
    contenders = OPS["linear"].contenders(cell, Operands(cell, 1), ["torch"])
    assert {contender.variant.copies for contender in contenders} == {1}
