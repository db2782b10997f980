"""Choices of tiles: what a model says, what is measured and kept on disk, and what decides between
them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from arb_ternary_triton import arguments, choice, tables, tiles, tuning
from arb_ternary_triton.choice import chosen_entry, forced
from arb_ternary_triton.entries import KINDS, ROWS, Entry, modelled, operands_of, row_bound
from arb_ternary_triton.gpu import Gpu
from arb_ternary_triton.plugin import TUNE
from arb_ternary_triton.tables import UserTable, bucket_of, user_table
from arb_ternary_triton.tuning import best_of, call_on, candidates, tune

A100 = Gpu("sm_80", 108)
MI300X = Gpu("gfx942", 304)
H200 = Gpu("sm_90", 132, "NVIDIA H200")
LINEAR = ("linear", "int8")
BUCKET = (16, 4096, 4096)
DEVICE = torch.device("cuda", 0)
FILE = "linear-int8-16x4096x4096.json"
FASTER = Entry(16, 128, 1, 4, 4, 0)
OTHER = Entry(16, 32, 1, 4, 4, 0)


@pytest.fixture(autouse=True)
def _environment_is_read_again() -> Iterator[None]:
    """What the environment says is kept from the first call on."""
    for known in (user_table, choice.tunes):
        known.cache_clear()
    yield
    for known in (user_table, choice.tunes):
        known.cache_clear()


@pytest.fixture
def on_h200(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As if there were an H200; returns the file of what is measured on it for the bucket."""
    monkeypatch.setattr(choice, "gpu_of", lambda _device: H200)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(TUNE.name, raising=False)
    folder = tmp_path / "arb-ternary" / "triton" / "sm-90-nvidia-h200"
    return folder / triton.__version__ / FILE


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def chosen() -> Entry:
    return chosen_entry(LINEAR, 9, 4000, 4096, DEVICE)


# --- the model


def test_more_multiprocessors_share_sums_among_more_programs() -> None:
    assert [modelled(LINEAR, 16, gpu).fill for gpu in (A100, H200, MI300X)] == [216, 264, 608]


def test_numbers_of_rows_up_to_a_bound_share_a_choice() -> None:
    for kind in KINDS:
        for rows in (2, 17, 33, 129, 513, 10**6):
            assert modelled(kind, rows, H200) == modelled(kind, row_bound(rows), H200)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ((3, 64, 2, 4, 3, 0), "rows must be a power of two, got 3"),
        ((16, 0, 2, 4, 3, 0), "outputs must be a power of two"),
        ((16, 64, 2, 4, 9, 0), "stages"),
        ((16, 64, 2, 4, 3, -1), "fill"),
    ],
)
def test_an_entry_that_no_kernel_takes_is_refused(entry: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Entry(*entry)


def test_shapes_that_one_choice_serves_share_a_bucket() -> None:
    assert bucket_of(9, 4000, 4096) == BUCKET
    assert bucket_of(1, 1, 1) == (1, 128, 128)
    assert bucket_of(10**6, 10**6, 11008) == (2048, 65536, 16384)
    assert [row_bound(rows) for rows in (1, 2, 17, 32, 33, 512, 513, 2048, 2049)] == [
        1,
        16,
        32,
        32,
        128,
        512,
        2048,
        2048,
        2048,
    ]


def test_operands_are_told_apart_by_what_they_cost() -> None:
    assert operands_of(torch.int8) == "int8"
    assert operands_of(torch.int8, wide=True) == "wide"
    assert operands_of(torch.int8, shifts=True) == "shifts"
    assert {operands_of(dtype) for dtype in (torch.bfloat16, torch.float16)} == {"16 bits"}
    assert operands_of(torch.float32) == "float32"


# --- choosing


def test_what_was_measured_comes_before_the_model(on_h200: Path) -> None:
    assert chosen() == modelled(LINEAR, 16, H200)
    user_table(H200).keep(LINEAR, BUCKET, FASTER)
    assert chosen() == FASTER
    assert chosen_entry(LINEAR, 17, 4000, 4096, DEVICE) == modelled(LINEAR, 32, H200)
    assert on_h200.is_file()


@pytest.mark.usefixtures("deterministic")
def test_deterministic_runs_take_the_choices_of_the_model(
    on_h200: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TUNE.name, "1")
    user_table(H200).keep(LINEAR, BUCKET, FASTER)
    assert chosen() == modelled(LINEAR, 16, H200)
    torch.use_deterministic_algorithms(True, warn_only=True)  # as tools do, which fill memory
    assert chosen() == FASTER


def test_nothing_is_measured_unasked(on_h200: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "tune", lambda *_: pytest.fail("measured"))
    assert chosen() == modelled(LINEAR, 16, H200)
    monkeypatch.setenv(TUNE.name, "1")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert chosen() == modelled(LINEAR, 16, H200), "a graph that is captured cannot be timed"
    assert not on_h200.exists()


def test_the_variable_has_every_bucket_measured_once(
    on_h200: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def measure(kind: Any, bucket: Any, gpu: Gpu, _device: Any, table: UserTable) -> Entry:
        asked.append((kind, bucket, gpu))
        return table.keep(kind, bucket, FASTER)

    monkeypatch.setenv(TUNE.name, "1")
    monkeypatch.setattr(tuning, "tune", measure)
    assert [chosen(), chosen()] == [FASTER] * 2
    assert asked == [(LINEAR, BUCKET, H200)]


def test_an_entry_that_is_being_measured_is_used(on_h200: Path) -> None:
    with forced(FASTER):
        assert chosen() == FASTER
    assert not on_h200.exists()


def test_choice_shares_sums_until_the_gpu_is_full(
    on_h200: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "INTERPRETED", False)
    assert tiles.choose_row(4096, 4096, True, DEVICE) == tiles.ProductTile(1, 16, 16, 1, 4, 3)
    assert tiles.choose_linear(16, 4096, 4096, torch.int8, False, DEVICE) == tiles.ProductTile(
        16, 64, 2, 4, 4, 3
    )
    large = tiles.choose_linear(2048, 4096, 4096, torch.int8, False, DEVICE)
    assert large == tiles.ProductTile(128, 128, 1, 1, 4, 3)
    grad = tiles.choose_grad_input(16, 4096, 4096, torch.int8, False, DEVICE)
    assert grad == tiles.ProductTile(16, 128, 4, 8, 4, 3)
    assert tiles.choose_votes(2048, 4096, 4096, torch.int8, True, DEVICE) == tiles.ProductTile(
        64, 64, 1, 1, 4, 3
    )
    assert not on_h200.exists()


# --- measuring


@pytest.mark.parametrize("kind", KINDS, ids=" ".join)
def test_candidates_start_with_the_choice_of_the_model(kind: Any) -> None:
    for rows in ROWS:
        found = candidates(kind, rows, H200)
        assert found[0] == modelled(kind, rows, H200)
        assert len(found) == len(set(found)) >= 4


def test_fastest_candidate_that_runs_is_taken() -> None:
    taken = {FASTER: 1.0, OTHER: 2.0}

    def milliseconds(entry: Entry) -> float:
        if entry not in taken:
            raise RuntimeError("out of resources: shared memory")
        return taken[entry]

    assert best_of([Entry(16, 16, 1, 4, 4, 0), OTHER, FASTER], milliseconds) == FASTER
    assert best_of([Entry(16, 16, 1, 4, 4, 0)], milliseconds) is None


@pytest.mark.parametrize("kind", KINDS, ids=" ".join)
def test_a_candidate_is_timed_on_a_call_of_its_own_kernel(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    class Reached(Exception):
        """The kernel would be started now."""

    def note(found: Any, *_: Any) -> Entry:
        asked.append(found)
        raise Reached

    for module in (tiles, arguments):
        monkeypatch.setattr(module, "INTERPRETED", False)
    monkeypatch.setattr(tiles, "chosen_entry", note)
    monkeypatch.setattr(arguments, "serves", lambda tensor: tensor.is_cpu)
    with pytest.raises(Reached):
        call_on(kind, (ROWS[0] if kind[0] == "row" else 16, 128, 256), torch.device("cpu"))()
    assert asked == [kind]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA or ROCm device")
@pytest.mark.parametrize("kind", KINDS, ids=" ".join)
def test_a_gpu_measures_a_choice_and_keeps_it(kind: Any, tmp_path: Path) -> None:
    from arb_ternary_triton.gpu import gpu_of

    table = UserTable(tmp_path)
    bucket = (1 if kind[0] == "row" else 16, 256, 512)
    found = tune(kind, bucket, gpu_of(DEVICE), DEVICE, table)
    assert found is not None
    assert UserTable(tmp_path).find(kind, bucket) == found


# --- on disk


def test_what_is_kept_is_found_by_the_next_process(tmp_path: Path) -> None:
    folder = tmp_path / "deep"
    assert UserTable(folder).keep(LINEAR, BUCKET, FASTER) == FASTER
    assert UserTable(folder).find(LINEAR, BUCKET) == FASTER
    assert UserTable(folder).find(LINEAR, (32, 4096, 4096)) is None
    assert [found.name for found in folder.iterdir()] == [FILE], "no temporary file is left"


def test_of_two_findings_on_one_bucket_the_first_holds(tmp_path: Path) -> None:
    one, two = (UserTable(tmp_path) for _ in range(2))
    assert two.find(LINEAR, BUCKET) is None
    assert one.keep(LINEAR, BUCKET, FASTER) == FASTER
    assert two.keep(LINEAR, BUCKET, OTHER) == FASTER
    assert two.find(LINEAR, BUCKET) == FASTER


DAMAGED = {
    "cut off": b"[16, 128, 1,",
    "no text": b"\xff\xfe\x00",
    "of another kind": b'{"format": "poem", "version": 1}',
    "too short": b"[16, 128]",
    "an impossible tile": b"[3, 64, 1, 4, 3, 0]",
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_told_of_ignored_and_replaced(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / FILE
    path.write_bytes(content)
    table = UserTable(tmp_path)
    with caplog.at_level(logging.WARNING, logger="arb_ternary.backends"):
        assert table.find(LINEAR, BUCKET) is None
    assert f"{path}: not a measured tile, so it is ignored" in caplog.text
    assert table.keep(LINEAR, BUCKET, FASTER) == FASTER
    assert UserTable(tmp_path).find(LINEAR, BUCKET) == FASTER


def test_finding_holds_if_the_folder_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("not a folder")
    table = UserTable(tmp_path / "file")
    with caplog.at_level(logging.WARNING, logger="arb_ternary.backends"):
        assert table.keep(LINEAR, BUCKET, FASTER) == FASTER
    assert "measured tiles cannot be kept" in caplog.text
    assert table.find(LINEAR, BUCKET) == FASTER


def test_an_interrupted_write_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(json, "dump", interrupted)
    with pytest.raises(KeyboardInterrupt):
        UserTable(tmp_path).keep(LINEAR, BUCKET, OTHER)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", ["", "relative/path"])
def test_cache_is_in_the_home_directory_or_the_variables_place(
    value: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    cache = tmp_path / ".cache" / "arb-ternary" / "triton"
    gpu = Gpu("gfx942", 304, "AMD Instinct MI300X")
    # What another release of Triton measured does not count.
    assert user_table(gpu).folder == cache / "gfx942-amd-instinct-mi300x" / triton.__version__


def test_a_call_forms_no_path_and_reads_no_file_again(
    on_h200: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = chosen()

    def refused(*_: object) -> None:
        raise AssertionError("done before each call")

    monkeypatch.setattr(tables.re, "sub", refused)
    monkeypatch.setattr(Path, "read_text", refused)
    assert chosen() is first
    assert not on_h200.exists()
