"""Outputs are given back bit for bit or not at all."""

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


def held(cache: OutputCache, place: Place = HERE, count: int = 6) -> list[int]:
    """The samples that are there, each checked."""
    found = []
    for number in range(count):
        value = cache.get(place, number, digest(number))
        if value is not None:
            assert torch.equal(value, sample(number))
            found.append(number)
    return found


@pytest.mark.parametrize("memory", [0, 2 * BYTES, 1 << 20])
def test_what_is_put_in_comes_out(tmp_path: Path, memory: int) -> None:
    cache = OutputCache(tmp_path / "cache", memory, "one", pytest.fail)
    fill(cache)
    assert held(cache) == [0, 1, 2, 3, 4, 5]
    assert held(cache, NEXT) == []
    assert cache.get(HERE, 0, digest(1)) is None, "a sample with other inputs is another"
    files = [*(tmp_path / "cache").glob("*")]
    assert sum(file.stat().st_size for file in files) == (6 - min(6, memory // BYTES)) * (
        BYTES + 56
    )
    cache.remove()
    assert not (tmp_path / "cache").exists()


def test_memory_is_free_again_once_a_place_is_forgotten(tmp_path: Path) -> None:
    cache = OutputCache(tmp_path / "cache", 6 * BYTES, "one", pytest.fail)
    fill(cache)
    cache.keep_only([NEXT])
    fill(cache, NEXT)
    assert not (tmp_path / "cache").exists()
    assert held(cache, NEXT) == [0, 1, 2, 3, 4, 5]
    assert held(cache) == []
    fill(cache)
    assert [file.name[:13] for file in (tmp_path / "cache").glob("*")] == ["teacher-00001"]
    cache.keep_only([NEXT])
    assert not [*(tmp_path / "cache").glob("*")]


def test_a_later_process_finds_what_is_whole_and_of_the_same_models(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    cache = OutputCache(folder, 0, "one", pytest.fail)
    fill(cache)
    cache.close()
    assert held(OutputCache(folder, 0, "another", pytest.fail)) == []
    (file,) = folder.glob("*")
    entry = BYTES + 56
    content = bytearray(file.read_bytes())
    assert len(content) == 6 * entry
    content[2 * entry + 100] ^= 1  # a number of the third
    content[3 * entry + 8] ^= 64  # the id of the fourth
    file.write_bytes(content[: 5 * entry + 90])  # the sixth is cut
    later = OutputCache(folder, 0, "one", pytest.fail)
    assert held(later) == [0, 1, 4]
    fill(later)
    assert held(later) == [0, 1, 2, 3, 4, 5]


def test_a_full_disk_is_told_once_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1, 1, 0))
    notes: list[str] = []
    cache = OutputCache(tmp_path / "cache", 2 * BYTES, "one", notes.append)
    fill(cache)
    assert held(cache) == [0, 1]
    assert len(notes) == 1
    assert "computed as it is needed" in notes[0]
