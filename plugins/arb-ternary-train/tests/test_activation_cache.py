"""The cache of hidden states: what comes back, budgets, and files after damage or a kill."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from arb_ternary.errors import UsageProblem
from arb_ternary.ternary.linear import TernaryLinear
from arb_ternary_train.activation_cache import (
    ActivationCache,
    decode,
    encode,
    module_version,
    rounded,
    sample_key,
)

SHAPE = (4, 8)
SAMPLE = 4 * 4 * 8
#: Bytes that a sample counts for on disk.
FILE = SAMPLE + 256
LARGE = 1 << 20
Make = Callable[..., ActivationCache]


def sample(number: int) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(number))


def fill(cache: ActivationCache, version: str = "v", count: int = 6) -> None:
    for number in range(count):
        cache.put(version, str(number), sample(number))


def cached(cache: ActivationCache, version: str = "v", count: int = 6) -> list[int]:
    """Return the samples that are cached, each checked."""
    found = []
    for number in range(count):
        value = cache.get(version, str(number))
        if value is not None:
            assert torch.equal(value, sample(number))
            found.append(number)
    return found


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.safetensors"))


@pytest.fixture(params=["memory", "disk", "both"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    made: list[ActivationCache] = []

    def build(**options: Any) -> ActivationCache:
        memory = {"memory": LARGE, "disk": 0, "both": 2 * SAMPLE}[request.param]
        folder = None if request.param == "memory" else tmp_path / "cache"
        made.append(ActivationCache(memory, folder, note=pytest.fail, **options))
        return made[-1]

    yield build
    for cache in made:
        cache.close()


# --- what comes back


def test_float32_comes_back_bit_for_bit(make: Make) -> None:
    cache = make()
    given = torch.tensor([[0.0, -0.0, 1e-45, 3e38], [float("inf"), 1 / 3, -7.5, 1.0]])
    assert torch.equal(cache.put("v", "5", given), given)
    back = cache.get("v", "5")
    assert back is not None
    assert torch.equal(back.view(torch.int32), given.view(torch.int32))


def test_bfloat16_rounds_to_the_nearest() -> None:
    assert torch.equal(rounded(sample(1), "bfloat16"), sample(1).to(torch.bfloat16).float())


def test_int8_keeps_a_scale_per_position() -> None:
    given = sample(2)
    given[1] = 0.0
    x = given.numpy()
    scale = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    ratio = np.divide(x, scale, out=np.zeros_like(x), where=scale > 0)
    wanted = np.rint(ratio).astype(np.float32) * scale
    np.testing.assert_array_equal(rounded(given, "int8").numpy(), wanted)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_rounding_equals_the_cache_and_ignores_the_batch(make: Make, dtype: Any) -> None:
    cache = make(dtype=dtype)
    batch = torch.stack([sample(number) for number in range(3)])
    for row in range(3):
        alone = rounded(batch[row], dtype)
        assert torch.equal(rounded(batch, dtype)[row], alone)
        assert torch.equal(cache.put("v", str(row), batch[row]), alone)
        assert torch.equal(cache.get("v", str(row)), alone)  # type: ignore[arg-type]


@pytest.mark.parametrize(("dtype", "nbytes"), [("float32", 128), ("bfloat16", 64), ("int8", 48)])
def test_a_sample_has_the_bytes_of_its_format(dtype: Any, nbytes: int) -> None:
    stored = encode(sample(1), dtype)
    assert sum(tensor.nbytes for tensor in stored.values()) == nbytes
    assert decode(stored).dtype == torch.float32


def test_another_sample_or_version_is_a_miss(make: Make) -> None:
    cache = make()
    fill(cache)
    assert cached(cache) == [0, 1, 2, 3, 4, 5]
    assert cached(cache, "w") == []
    assert cache.get("v", "9") is None


def test_a_shuffled_second_epoch_hits_every_time(make: Make) -> None:
    cache = make()
    computed = []
    hidden = torch.stack([sample(number) for number in range(12)])

    def fetch(ids: list[int]) -> list[Tensor]:
        def compute(rows: list[int]) -> Tensor:
            computed.append(len(rows))
            return hidden[[ids[row] for row in rows]]

        return cache.fetch("v", [str(number) for number in ids], compute)

    for epoch in range(3):
        order = torch.randperm(12, generator=torch.Generator().manual_seed(epoch))
        for ids in order.split(4):
            assert torch.equal(torch.stack(fetch(ids.tolist())), hidden[ids])
    assert computed == [4, 4, 4]
    assert (cache.hits, cache.misses) == (24, 12)


def test_only_the_missing_rows_are_computed(make: Make) -> None:
    cache = make()
    cache.put("v", "1", sample(1))
    got = cache.fetch("v", ["0", "1", "2"], lambda rows: [sample(row * 10) for row in rows])
    assert torch.equal(torch.stack(got), torch.stack([sample(0), sample(1), sample(20)]))


def test_samples_of_other_versions_can_be_forgotten(make: Make) -> None:
    cache = make()
    for version in ("a", "b", "c"):
        fill(cache, version)
    cache.keep_only(["b", "c"])
    assert [cached(cache, version) for version in ("a", "b")] == [[], [0, 1, 2, 3, 4, 5]]
    cache.drop("c", "1")
    assert len(cache) == 11
    fill(cache, "a")
    assert cached(cache, "a") == [0, 1, 2, 3, 4, 5]


# --- budgets


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_the_least_recently_used_sample_is_evicted(tmp_path: Path, place: str) -> None:
    options: dict[str, Any] = {"memory": 3 * SAMPLE}
    if place == "disk":
        options = {"memory": 0, "folder": tmp_path, "disk": 3 * FILE}
    with ActivationCache(**options) as cache:
        fill(cache, count=3)
        cache.get("v", "0")
        cache.put("v", "3", sample(3))
        assert cached(cache) == [0, 2, 3]
        assert cache.evictions == 1
        assert cache.nbytes == 3 * (SAMPLE if place == "memory" else FILE)


def test_memory_holds_no_more_than_the_budget() -> None:
    cache = ActivationCache(1000)
    for number in range(50):
        cache.put("v", str(number), torch.stack([sample(number), sample(50)])[0])
        storages = [
            entry.tensors["values"].untyped_storage().nbytes()
            for entry in cache._entries.values()
            if entry.tensors is not None
        ]
        assert sum(storages) == cache.nbytes <= 1000
    assert len(cache) == 7  # of 128 bytes each


def test_files_stay_within_the_budget(tmp_path: Path) -> None:
    with ActivationCache(0, tmp_path, 4096) as cache:
        for number in range(50):
            cache.put("v", str(number), sample(number))
            assert sum(file.stat().st_size for file in files(tmp_path)) <= cache.nbytes <= 4096
        assert cache.evictions == 50 - len(cache)


def test_a_budget_below_one_sample_is_an_error(tmp_path: Path) -> None:
    with (
        ActivationCache(100) as memory,
        pytest.raises(UsageProblem, match="does not hold one sample"),
    ):
        memory.put("v", "1", sample(1))
    with (
        ActivationCache(0, tmp_path, 300) as disk,
        pytest.raises(UsageProblem, match="does not hold one sample"),
    ):
        disk.put("v", "1", sample(1))


@pytest.mark.parametrize("memory", [0, 2 * SAMPLE, LARGE])
def test_what_exceeds_the_memory_is_on_disk(tmp_path: Path, memory: int) -> None:
    cache = ActivationCache(memory, tmp_path / "cache", note=pytest.fail)
    fill(cache)
    assert cached(cache) == [0, 1, 2, 3, 4, 5]
    assert len(files(tmp_path / "cache")) == 6 - min(6, memory // SAMPLE)
    cache.close()


def test_a_full_disk_is_noted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1, 1, 0))
    notes: list[str] = []
    with ActivationCache(2 * SAMPLE, tmp_path, note=notes.append) as cache:
        fill(cache)
        assert cached(cache) == [0, 1]
    assert len(notes) == 1
    assert "recomputed when needed" in notes[0]


# --- files


def test_samples_on_disk_are_found_again(tmp_path: Path) -> None:
    with ActivationCache(0, tmp_path, dtype="int8") as first:
        fill(first, count=5)
    with ActivationCache(0, tmp_path, dtype="int8") as second:
        assert len(second) == 5
        assert torch.equal(second.get("v", "3"), rounded(sample(3), "int8"))  # type: ignore[arg-type]
        second.keep_only(["w"])
        assert (len(second), files(tmp_path)) == (0, [])
    with ActivationCache(0, tmp_path) as third:
        fill(third)
    with ActivationCache(0, tmp_path, dtype="bfloat16") as fourth:
        assert fourth.get("v", "1") is None


def test_samples_of_an_earlier_process_are_evicted_by_age(tmp_path: Path) -> None:
    with ActivationCache(0, tmp_path) as first:
        fill(first, count=3)
    for age, number in enumerate((2, 0, 1)):
        (file,) = tmp_path.glob(f"*/{number}.safetensors")
        os.utime(file, (1000 - age, 1000 - age))
    with ActivationCache(0, tmp_path, 4 * FILE) as second:
        second.put("v", "5", sample(5))
        second.put("v", "4", sample(4))
        assert cached(second) == [0, 2, 4, 5]


def test_damaged_or_foreign_samples_are_absent(tmp_path: Path) -> None:
    with ActivationCache(0, tmp_path) as first:
        fill(first)
    flipped, short, empty, renamed, *_ = files(tmp_path)
    content = bytearray(flipped.read_bytes())
    content[-7] ^= 1
    flipped.write_bytes(content)
    short.write_bytes(short.read_bytes()[:-9])
    empty.write_bytes(b"")
    renamed.rename(renamed.with_name("93.safetensors"))
    with ActivationCache(0, tmp_path) as later:
        assert later.get("v", "93") is None, "the checksum knows the sample"
        assert cached(later) == [4, 5]
        fill(later)
        assert cached(later) == [0, 1, 2, 3, 4, 5]


WRITER = """
import sys, torch
from pathlib import Path
from arb_ternary_train.activation_cache import ActivationCache
cache = ActivationCache(0, Path(sys.argv[1]), int(sys.argv[2]))
number = 0
while True:
    generator = torch.Generator().manual_seed(number % 40)
    cache.put("v", str(number % 40), torch.randn(64, 64, generator=generator))
    number += 1
    print(number, flush=True)
"""


@pytest.mark.parametrize("writes", [1, 55])
def test_a_kill_during_writes_leaves_only_sound_samples(tmp_path: Path, writes: int) -> None:
    budget = 30 * 17000  # fewer than the 40 samples, so that some are dropped
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path), str(budget)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) >= writes:
            os.kill(process.pid, signal.SIGKILL)
            break
    process.stdout.close()
    process.wait()
    with ActivationCache(0, tmp_path, budget) as cache:
        found = 0
        for number in range(40):
            hidden = cache.get("v", str(number))
            if hidden is not None:
                found += 1
                wanted = torch.randn(64, 64, generator=torch.Generator().manual_seed(number))
                assert torch.equal(hidden, wanted)
        assert found >= min(writes, 29) - 1


def test_a_folder_serves_one_process_at_a_time(tmp_path: Path) -> None:
    with (
        ActivationCache(0, tmp_path),
        pytest.raises(UsageProblem, match="in use by another process"),
    ):
        ActivationCache(0, tmp_path)
    ActivationCache(0, tmp_path).close()


# --- names


def test_a_key_depends_on_sample_inputs_and_time() -> None:
    keys = {
        sample_key(sample, torch.tensor(inputs), time)
        for sample in (1, 2)
        for inputs in ([1, 2], [1, 3])
        for time in (None, 0.1, 0.4)
    }
    assert len(keys) == 12
    assert sample_key(1, torch.tensor([1, 2]), 0.4) in keys


def test_a_version_depends_on_every_number_and_their_order() -> None:
    first = nn.Sequential(nn.Linear(4, 4), TernaryLinear(4, 4))
    second = nn.Linear(4, 4)
    before = module_version(first)
    assert module_version(first) == before
    assert module_version(first, base="embedding") != before
    assert module_version(first, second) != module_version(second, first)
    with torch.no_grad():
        first[0].weight[0, 0] += 1e-6  # type: ignore[index,operator]
    changed = module_version(first)
    trits = first[1].trits()  # type: ignore[operator]
    trits[0, 0] = 1 if int(trits[0, 0]) < 1 else 0
    first[1].set_trits(trits)  # type: ignore[operator]
    assert len({before, changed, module_version(first)}) == 3
