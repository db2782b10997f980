"""Outputs come back bit for bit or not at all."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from arb_ternary_upcycle.output_cache import OutputCache, Place, inputs_digest

HERE = Place("teacher", 1)
NEXT = Place("teacher", 2)
BYTES = 5 * 8 * 4


def sample(number: int) -> torch.Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(number))


def digest(number: int) -> bytes:
    return inputs_digest(torch.tensor([number, 1, 2]))


def fill(cache: OutputCache, place: Place = HERE, count: int = 6) -> None:
    for number in range(count):
        cache.put(place, number, digest(number), sample(number))


def cached(cache: OutputCache, place: Place = HERE, count: int = 6) -> list[int]:
    """Return the samples that are cached, each checked."""
    found = []
    for number in range(count):
        value = cache.get(place, number, digest(number))
        if value is not None:
            assert torch.equal(value, sample(number))
            found.append(number)
    return found


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.safetensors"))


@pytest.mark.parametrize("memory", [0, 2 * BYTES, 1 << 20])
def test_outputs_come_back_as_they_were(tmp_path: Path, memory: int) -> None:
    cache = OutputCache(tmp_path / "cache", memory, "one", pytest.fail)
    fill(cache)
    assert cached(cache) == [0, 1, 2, 3, 4, 5]
    assert cached(cache, NEXT) == []
    assert cache.get(HERE, 0, digest(1)) is None, "a sample with other inputs is another"
    assert len(files(tmp_path / "cache")) == 6 - min(6, memory // BYTES)
    cache.remove()
    assert not (tmp_path / "cache").exists()


def test_memory_is_free_again_after_keep_only(tmp_path: Path) -> None:
    cache = OutputCache(tmp_path / "cache", 6 * BYTES, "one", pytest.fail)
    fill(cache)
    cache.keep_only([NEXT])
    fill(cache, NEXT)
    assert not files(tmp_path / "cache")
    assert cached(cache, NEXT) == [0, 1, 2, 3, 4, 5]
    assert cached(cache) == []
    fill(cache)
    assert {file.parent.name for file in files(tmp_path / "cache")} == {"teacher-00001"}
    cache.keep_only([NEXT])
    assert not files(tmp_path / "cache")


def test_damaged_or_foreign_outputs_are_absent(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    fill(OutputCache(folder, 0, "one", pytest.fail))
    first, second, third, fourth, *_ = files(folder)
    content = bytearray(first.read_bytes())
    content[-7] ^= 1
    first.write_bytes(content)
    second.write_bytes(second.read_bytes()[:-9])
    third.write_bytes(b"")
    fourth.rename(fourth.with_name("9" + fourth.name))
    later = OutputCache(folder, 0, "one", pytest.fail)
    assert cached(later) == [4, 5]
    assert later.get(HERE, 93, digest(3)) is None, "the digest knows the sample's number"
    fill(later)
    assert cached(later) == [0, 1, 2, 3, 4, 5]
    assert cached(OutputCache(folder, 0, "another", pytest.fail)) == []


def test_full_disk_is_noted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1, 1, 0))
    notes: list[str] = []
    cache = OutputCache(tmp_path / "cache", 2 * BYTES, "one", notes.append)
    fill(cache)
    assert cached(cache) == [0, 1]
    assert len(notes) == 1
    assert "recomputed when needed" in notes[0]
