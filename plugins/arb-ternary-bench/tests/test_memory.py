"""Memory of a process: what is held, and what the system does not say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from arb_ternary_bench import memory


def test_resident_memory_grows_with_what_is_held() -> None:
    before = memory.resident_bytes()
    # Above 32 MiB glibc maps new memory, whatever is free in its heap.
    held = torch.ones(64 << 20, dtype=torch.uint8)
    assert memory.resident_bytes() - before > 48 << 20
    assert memory.peak_bytes() >= memory.resident_bytes() - (1 << 20)
    del held
    available = memory.available_bytes()
    assert available is None or available > 0


def test_the_peak_stands_in_where_the_system_says_no_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "none")
    monkeypatch.setattr(memory, "_MEMORY", tmp_path / "none")
    assert memory.resident_bytes() == memory.peak_bytes() > 10 << 20
    assert memory.available_bytes() is None
