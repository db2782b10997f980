"""The activation cache: results, misses, budget, and files after a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from arb_ternary.errors import ArbError, UsageProblem
from arb_ternary.ternary.linear import TernaryLinear
from arb_ternary_progressive.activation_cache import ActivationCache, trunk_version
from arb_ternary_progressive.hidden_codec import HiddenCodec

SHAPE = (4, 8)


def sample(number: int) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(number))


def inputs(number: int) -> Tensor:
    return torch.arange(SHAPE[0]) + number


@pytest.fixture(params=["memory", "disk"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    made: list[ActivationCache] = []

    def build(budget: int = 1 << 16, **options: Any) -> ActivationCache:
        folder = tmp_path / "cache" if request.param == "disk" else None
        made.append(ActivationCache(budget, folder, **options))
        return made[-1]

    yield build
    for cache in made:
        cache.close()


def test_float32_comes_back_bit_for_bit(make: Any) -> None:
    cache = make()
    given = torch.tensor([[0.0, -0.0, 1e-45, 3e38], [float("inf"), 1 / 3, -7.5, 1.0]])
    assert torch.equal(cache.put(5, "v", torch.arange(2), given), given)
    back = cache.get(5, "v", torch.arange(2), 4)
    assert torch.equal(back.view(torch.int32), given.view(torch.int32))
    assert (cache.hits, cache.misses) == (1, 0)


def test_bfloat16_rounds_to_the_nearest(make: Any) -> None:
    cache = make(dtype="bfloat16")
    cache.put(1, "v", inputs(1), sample(1))
    assert torch.equal(cache.get(1, "v", inputs(1), SHAPE[1]), sample(1).to(torch.bfloat16).float())


def test_int8_keeps_a_scale_per_position(make: Any) -> None:
    cache = make(dtype="int8")
    given = sample(2)
    given[1] = 0.0
    cache.put(1, "v", inputs(1), given)
    x = given.numpy()
    scale = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    wanted = (
        np.rint(np.divide(x, scale, out=np.zeros_like(x), where=scale > 0)).astype(np.float32)
        * scale
    )
    np.testing.assert_array_equal(cache.get(1, "v", inputs(1), SHAPE[1]).numpy(), wanted)


@pytest.mark.parametrize(
    ("dtype", "bytes_a_sample"), [("float32", 128), ("bfloat16", 64), ("int8", 48)]
)
def test_a_sample_has_the_bytes_of_its_format(dtype: Any, bytes_a_sample: int) -> None:
    codec = HiddenCodec(dtype)
    assert codec.sample_bytes(*SHAPE) == bytes_a_sample
    assert codec.encode(torch.stack([sample(1), sample(2)])).shape == (2, bytes_a_sample)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_rounding_equals_the_cache_and_ignores_the_batch(make: Any, dtype: Any) -> None:
    cache = make(dtype=dtype)
    batch = torch.stack([sample(number) for number in range(3)])
    for row in range(3):
        alone = cache.codec.rounded(batch[row : row + 1])[0]
        assert torch.equal(cache.codec.rounded(batch)[row], alone)
        assert torch.equal(cache.put(row, "v", inputs(row), batch[row]), alone)
        assert torch.equal(cache.get(row, "v", inputs(row), SHAPE[1]), alone)


def test_another_sample_another_trunk_and_other_inputs_are_misses(make: Any) -> None:
    cache = make()
    cache.put(1, "v", inputs(1), sample(1))
    assert cache.get(2, "v", inputs(1), SHAPE[1]) is None
    assert cache.get(1, "w", inputs(1), SHAPE[1]) is None
    assert cache.get(1, "v", inputs(2), SHAPE[1]) is None
    assert cache.get(1, "v", inputs(1), SHAPE[1]) is not None
    assert (cache.hits, cache.misses) == (1, 3)


def test_a_shuffled_second_epoch_hits_every_time(make: Any) -> None:
    cache = make()
    computed = []
    tokens = torch.stack([inputs(number) for number in range(12)])
    hidden = torch.stack([sample(number) for number in range(12)])

    def fetch(ids: Tensor) -> Tensor:
        def compute(rows: Tensor) -> Tensor:
            computed.append(len(rows))
            return hidden[ids[rows]]

        return cache.fetch(ids, "v", tokens[ids], SHAPE[1], compute)

    for epoch in range(3):
        order = torch.randperm(12, generator=torch.Generator().manual_seed(epoch))
        for ids in order.split(4):
            assert torch.equal(fetch(ids), hidden[ids])
    assert computed == [4, 4, 4]
    assert (cache.stats.hits, cache.stats.misses) == (24, 12)


def test_only_the_missing_rows_are_computed(make: Any) -> None:
    cache = make()
    cache.put(1, "v", inputs(1), sample(1))
    tokens = torch.stack([inputs(0), inputs(1), inputs(2)])
    got = cache.fetch(
        torch.tensor([0, 1, 2]),
        "v",
        tokens,
        SHAPE[1],
        lambda rows: torch.stack([sample(int(row) * 10) for row in rows]),
    )
    assert torch.equal(got, torch.stack([sample(0), sample(1), sample(20)]))


def test_the_least_recently_used_sample_is_evicted(make: Any) -> None:
    probe = make()
    probe.put(0, "v", inputs(0), sample(0))
    one = probe.nbytes
    probe.close()
    cache = make(3 * one)
    for number in range(3):
        cache.put(number, "v", inputs(number), sample(number))
    cache.get(0, "v", inputs(0), SHAPE[1])
    cache.put(3, "v", inputs(3), sample(3))
    held = [
        number
        for number in range(4)
        if cache.get(number, "v", inputs(number), SHAPE[1]) is not None
    ]
    assert held == [0, 2, 3]
    assert cache.stats.evictions == 1


def test_memory_stays_within_the_budget() -> None:
    cache = ActivationCache(1000)
    for number in range(50):
        batch = torch.stack([sample(number), sample(number + 50)])
        for row in range(2):
            cache.put(number + 50 * row, "v", inputs(number), batch[row])
        storages = [
            payload.untyped_storage().nbytes() for _, payload in cache._store._entries.values()
        ]  # type: ignore[attr-defined]
        assert sum(storages) == cache.nbytes <= 1000
    assert len(cache) == 7  # of 128 bytes each


def test_the_file_stays_within_the_budget(tmp_path: Path) -> None:
    cache = ActivationCache(4096, tmp_path)
    for number in range(50):
        cache.put(number, "v", inputs(number), sample(number))
        (file,) = tmp_path.glob("*.slots")
        assert cache.nbytes <= file.stat().st_size <= 4096
        assert file.stat().st_blocks * 512 <= 2 * 4096  # in whole pages
    assert cache.stats.evictions == 50 - len(cache)
    cache.close()


def test_a_budget_below_one_sample_is_an_error(make: Any) -> None:
    cache = make(100)
    with pytest.raises(UsageProblem, match="does not hold one sample"):
        cache.put(1, "v", inputs(1), sample(1))


def test_samples_of_other_trunks_can_be_forgotten(make: Any) -> None:
    cache = make()
    for version in ("a", "b", "c"):
        cache.put(1, version, inputs(1), sample(1))
    cache.keep_only(["b", "c"])
    assert [cache.get(1, v, inputs(1), SHAPE[1]) is None for v in ("a", "b", "c")] == [
        True,
        False,
        False,
    ]
    cache.drop(1, "c")
    assert len(cache) == 1


# --- disk


def test_samples_on_disk_are_found_again(tmp_path: Path) -> None:
    with ActivationCache(1 << 16, tmp_path, "int8") as first:
        for number in range(5):
            first.put(number, "v", inputs(number), sample(number))
        wanted = first.get(3, "v", inputs(3), SHAPE[1])
    with ActivationCache(1 << 16, tmp_path, "int8") as second:
        assert torch.equal(second.get(3, "v", inputs(3), SHAPE[1]), wanted)  # type: ignore[arg-type]
        assert len(second) == 5
        second.keep_only(["w"])
        assert len(second) == 0


def test_samples_from_disk_are_evicted_in_writing_order(
    tmp_path: Path,
) -> None:
    with ActivationCache(4096, tmp_path) as first:
        for number in (3, 1, 2):
            first.put(number, "v", inputs(number), sample(number))
        one = first.nbytes // 3
    with ActivationCache(3 * one, tmp_path) as second:
        assert second.get(2, "v", inputs(2), SHAPE[1]) is not None
        second.put(9, "v", inputs(9), sample(9))
        assert second.get(3, "v", inputs(3), SHAPE[1]) is None
        assert second.get(1, "v", inputs(1), SHAPE[1]) is not None


def test_the_last_write_of_a_sample_wins(tmp_path: Path) -> None:
    with ActivationCache(1 << 16, tmp_path) as first:
        first.put(1, "v", inputs(1), sample(1))
        first.put(1, "v", inputs(1), sample(2))
    with ActivationCache(1 << 16, tmp_path) as second:
        assert torch.equal(second.get(1, "v", inputs(1), SHAPE[1]), sample(2))  # type: ignore[arg-type]
        assert len(second) == 1


def test_each_dtype_and_shape_has_its_own_file(tmp_path: Path) -> None:
    with ActivationCache(1 << 16, tmp_path) as first:
        first.put(1, "v", inputs(1), sample(1))
    with ActivationCache(1 << 16, tmp_path, "bfloat16") as second:
        assert second.get(1, "v", inputs(1), SHAPE[1]) is None
        with pytest.raises(UsageProblem, match="4 positions and width 8, not 2 and 8"):
            second.put(2, "v", inputs(2)[:2], sample(2)[:2])


def test_a_damaged_slot_is_a_miss(tmp_path: Path) -> None:
    with ActivationCache(1 << 16, tmp_path) as first:
        first.put(1, "v", inputs(1), sample(1))
        first.put(2, "v", inputs(2), sample(2))
    (file,) = tmp_path.glob("*.slots")
    content = bytearray(file.read_bytes())
    content[70] ^= 1
    file.write_bytes(content)
    with ActivationCache(1 << 16, tmp_path) as second:
        found = [second.get(number, "v", inputs(number), SHAPE[1]) for number in (1, 2)]
        assert sorted(each is None for each in found) == [False, True]
        second.put(1, "v", inputs(1), sample(1))
        assert second.get(1, "v", inputs(1), SHAPE[1]) is not None


WRITER = """
import sys, torch
from arb_ternary_progressive.activation_cache import ActivationCache
cache = ActivationCache(int(sys.argv[2]), sys.argv[1])
number = 0
while True:
    generator = torch.Generator().manual_seed(number % 40)
    cache.put(number % 40, "v", torch.arange(64), torch.randn(64, 64, generator=generator))
    number += 1
    print(number, flush=True)
"""


@pytest.mark.parametrize("writes", [1, 55])
def test_a_kill_during_writes_leaves_only_sound_samples(tmp_path: Path, writes: int) -> None:
    budget = 30 * 17000  # fewer than the 40 samples, so that slots are written over
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
    with ActivationCache(budget, tmp_path) as cache:
        found = 0
        for number in range(40):
            hidden = cache.get(number, "v", torch.arange(64), 64)
            if hidden is not None:
                found += 1
                wanted = torch.randn(64, 64, generator=torch.Generator().manual_seed(number))
                assert torch.equal(hidden, wanted)
        assert found >= min(writes, 29) - 1


def test_a_folder_serves_one_process_at_a_time(tmp_path: Path) -> None:
    with (
        ActivationCache(1 << 16, tmp_path),
        pytest.raises(UsageProblem, match="in use by another process"),
    ):
        ActivationCache(1 << 16, tmp_path)
    ActivationCache(1 << 16, tmp_path).close()


def test_a_full_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    with ActivationCache(1 << 16, tmp_path) as cache:
        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(ArbError, match="No space left"):
            cache.put(1, "v", inputs(1), sample(1))
        monkeypatch.undo()
        cache.put(1, "v", inputs(1), sample(1))
        assert cache.get(1, "v", inputs(1), SHAPE[1]) is not None


# --- versions


def frozen(module: nn.Module) -> nn.Module:
    for part in module.modules():
        if isinstance(part, TernaryLinear):
            part.frozen = True
    return module.requires_grad_(False)


def test_a_changed_trunk_has_another_version() -> None:
    trunk = frozen(nn.Sequential(nn.Linear(4, 4), TernaryLinear(4, 4)))
    before = trunk_version(trunk)
    assert trunk_version(trunk) == before
    assert trunk_version(trunk, base="embedding") != before
    with torch.no_grad():
        trunk[0].weight[0, 0] += 1e-6  # type: ignore[index,operator]
    changed = trunk_version(trunk)
    assert changed != before
    trits = trunk[1].trits()  # type: ignore[operator,index]
    trits[0, 0] = 1 if int(trits[0, 0]) < 1 else 0
    trunk[1].set_trits(trits)  # type: ignore[operator,index]
    assert trunk_version(trunk) not in (changed, before)


def test_the_order_of_modules_is_part_of_the_version() -> None:
    a = frozen(nn.Linear(4, 4))
    b = frozen(nn.Linear(4, 4))
    assert trunk_version(a, b) != trunk_version(b, a)


@pytest.mark.parametrize("learner", ["float", "ternary"])
def test_a_trunk_that_learns_is_refused(learner: str) -> None:
    trunk = frozen(nn.Sequential(nn.Linear(4, 4), TernaryLinear(4, 4)))
    if learner == "float":
        trunk[0].weight.requires_grad_(True)  # type: ignore[operator,union-attr]
    else:
        trunk[1].frozen = False  # type: ignore[assignment]
    with pytest.raises(UsageProblem, match="can learn") as refused:
        trunk_version(trunk)
    assert "streams" in refused.value.hint


@pytest.mark.parametrize(
    ("options", "message"),
    [({"byte_budget": 0}, "at least 1"), ({"dtype": "bfloat15"}, "bfloat16")],
)
def test_bad_options_are_errors(options: Any, message: str) -> None:
    with pytest.raises(UsageProblem) as refused:
        ActivationCache(**options)
    assert message in str(refused.value)
