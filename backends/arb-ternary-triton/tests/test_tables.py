"""Choices of tiles: what is shipped, what is measured and kept on disk, and what decides between
them.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch

from arb_ternary.backends.protocol import WeightShape
from arb_ternary.backends.select import get_backend
from arb_ternary_triton import arguments, choice, products, tables, tiles, tuning
from arb_ternary_triton import backend as backend_module
from arb_ternary_triton.choice import chosen_entry, forced
from arb_ternary_triton.entries import KINDS, ROWS, Entry, modelled, operands_of, row_bound
from arb_ternary_triton.gpu import KNOWN, Gpu
from arb_ternary_triton.launch import recording
from arb_ternary_triton.plugin import TUNE
from arb_ternary_triton.tables import (
    Measured,
    UserTable,
    bucket_of,
    shipped,
    shipped_document,
    user_table,
)
from arb_ternary_triton.tuning import best_of, call_on, candidates, tune

H200 = Gpu("sm_90", 132, "NVIDIA H200")
LINEAR = ("linear", "int8")
BUCKET = (16, 4096, 4096)
DEVICE = torch.device("cuda", 0)
FASTER = Measured(Entry(16, 128, 1, 4, 4, 0), 1e-5)
OTHER = Measured(Entry(16, 32, 1, 4, 4, 0), 2e-5)


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
    """As if there were an H200; returns the file of what is measured on it."""
    monkeypatch.setattr(choice, "gpu_of", lambda _index: H200)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(TUNE.name, raising=False)
    return tmp_path / "arb-ternary" / "triton" / "sm-90-nvidia-h200.json"


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def chosen() -> Entry:
    return chosen_entry(LINEAR, 9, 4000, 4096, DEVICE)


# --- shipped


def test_shipped_table_holds_the_choices_of_the_model() -> None:
    text = resources.files("arb_ternary_triton").joinpath("tiles.json").read_text(encoding="utf-8")
    assert json.loads(text) == shipped_document()
    assert "nothing here is measured" in json.loads(text)["origin"]
    assert set(json.loads(text)["gpus"]) == {"sm_80", "sm_90", "gfx942"}


@pytest.mark.parametrize(
    "gpu", [*KNOWN.values(), H200, Gpu("sm_120", 170)], ids=lambda gpu: gpu.name or gpu.family
)
def test_every_gpu_has_a_choice_for_every_kind_and_rows(gpu: Gpu) -> None:
    for kind in KINDS:
        for rows in (1, 2, 16, 17, 33, 129, 513, 10**6):
            assert shipped(kind, rows, gpu) == modelled(kind, row_bound(rows), gpu)


def test_more_multiprocessors_share_sums_among_more_programs() -> None:
    assert [shipped(LINEAR, 16, gpu).fill for gpu in KNOWN.values()] == [216, 264, 608]


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


def test_what_was_measured_comes_before_what_is_shipped(on_h200: Path) -> None:
    assert chosen() == shipped(LINEAR, 16, H200)
    user_table(H200).keep(LINEAR, BUCKET, FASTER)
    assert chosen() == FASTER.entry
    assert chosen_entry(LINEAR, 17, 4000, 4096, DEVICE) == shipped(LINEAR, 32, H200)
    assert on_h200.is_file()


@pytest.mark.usefixtures("deterministic")
def test_deterministic_runs_take_the_shipped_choices(
    on_h200: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TUNE.name, "1")
    user_table(H200).keep(LINEAR, BUCKET, FASTER)
    assert chosen() == shipped(LINEAR, 16, H200)
    torch.use_deterministic_algorithms(True, warn_only=True)  # as tools do, which fill memory
    assert chosen() == FASTER.entry


def test_nothing_is_measured_unasked(on_h200: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "tune", lambda *_: pytest.fail("measured"))
    assert chosen() == shipped(LINEAR, 16, H200)
    monkeypatch.setenv(TUNE.name, "1")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert chosen() == shipped(LINEAR, 16, H200), "a graph that is captured cannot be timed"
    assert not on_h200.exists()


def test_the_variable_has_every_bucket_measured_once(
    on_h200: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def measure(kind: Any, bucket: Any, gpu: Gpu, _device: Any, table: UserTable) -> Measured:
        asked.append((kind, bucket, gpu))
        return table.keep(kind, bucket, FASTER)

    monkeypatch.setenv(TUNE.name, "1")
    monkeypatch.setattr(tuning, "tune", measure)
    assert [chosen(), chosen()] == [FASTER.entry] * 2
    assert asked == [(LINEAR, BUCKET, H200)]


def test_compiling_for_another_gpu_takes_its_shipped_choice() -> None:
    with recording(KNOWN["gfx942"]):
        assert chosen() == shipped(LINEAR, 16, KNOWN["gfx942"])
    with forced(FASTER.entry):
        assert chosen() == FASTER.entry


def test_choice_shares_sums_until_the_gpu_is_full(
    on_h200: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "INTERPRETED", False)
    assert tiles.choose_row(4096, 4096, True, DEVICE) == tiles.RowTile(16, 16, 1, 4, 3)
    assert tiles.choose_linear(16, 4096, 4096, torch.int8, False, DEVICE) == tiles.ProductTile(
        16, 64, 2, 4, 4, 3
    )
    large = tiles.choose_linear(2048, 4096, 4096, torch.int8, False, DEVICE)
    assert large == tiles.ProductTile(128, 128, 1, 1, 4, 3)
    grad = tiles.choose_grad_input(16, 4096, 4096, torch.int8, False, DEVICE)
    assert grad == tiles.ProductTile(16, 128, 4, 8, 4, 3)
    assert tiles.choose_votes(2048, 4096, 4096, torch.int8, True, DEVICE) == tiles.VoteTile(
        64, 128, 64, 4, 3
    )
    assert not on_h200.exists()


# --- measuring


@pytest.mark.parametrize("kind", KINDS, ids=" ".join)
def test_candidates_start_with_the_shipped_choice(kind: Any) -> None:
    for rows in ROWS:
        found = candidates(kind, rows, H200)
        assert found[0] == shipped(kind, rows, H200)
        assert len(found) == len(set(found)) >= 4


def test_fastest_candidate_that_runs_is_taken() -> None:
    taken = {FASTER.entry: 1e-5, OTHER.entry: 2e-5}

    def seconds(entry: Entry) -> float:
        if entry not in taken:
            raise RuntimeError("out of resources: shared memory")
        return taken[entry]

    assert best_of([Entry(16, 16, 1, 4, 4, 0), OTHER.entry, FASTER.entry], seconds) == FASTER
    assert best_of([Entry(16, 16, 1, 4, 4, 0)], seconds) is None


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
    with recording(KNOWN["sm_90"]), pytest.raises(Reached):
        call_on(kind, (ROWS[0] if kind[0] == "row" else 16, 128, 256), torch.device("cpu"))()
    assert asked == [kind]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA or ROCm device")
@pytest.mark.parametrize("kind", KINDS, ids=" ".join)
def test_a_gpu_measures_a_choice_and_keeps_it(kind: Any, tmp_path: Path) -> None:
    from arb_ternary_triton.gpu import gpu_of

    table = UserTable(tmp_path / "gpu.json", "3")
    bucket = (1 if kind[0] == "row" else 16, 256, 512)
    found = tune(kind, bucket, gpu_of(0), DEVICE, table)
    assert found is not None
    assert found.seconds > 0
    assert UserTable(table.path, "3").find(kind, bucket) == found


# --- on disk


def test_what_is_kept_is_found_by_the_next_process(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "gpu.json"
    assert UserTable(path, "3.9.0").keep(LINEAR, BUCKET, FASTER) == FASTER
    assert UserTable(path, "3.9.0").find(LINEAR, BUCKET) == FASTER
    assert UserTable(path, "3.9.0").find(LINEAR, (32, 4096, 4096)) is None
    assert sorted(found.name for found in path.parent.iterdir()) == ["gpu.json", "gpu.lock"], (
        "no temporary file is left"
    )


def test_of_two_findings_on_one_bucket_the_first_holds(tmp_path: Path) -> None:
    one, two = (UserTable(tmp_path / "gpu.json", "3.9.0") for _ in range(2))
    assert two.find(LINEAR, BUCKET) is None
    assert one.keep(LINEAR, BUCKET, FASTER) == FASTER
    assert two.keep(LINEAR, BUCKET, OTHER) == FASTER
    assert two.find(LINEAR, BUCKET) == FASTER


def test_what_another_release_of_triton_measured_does_not_count(tmp_path: Path) -> None:
    UserTable(tmp_path / "gpu.json", "3.8.0").keep(LINEAR, BUCKET, FASTER)
    new = UserTable(tmp_path / "gpu.json", "3.9.0")
    assert new.find(LINEAR, BUCKET) is None
    assert new.keep(LINEAR, BUCKET, OTHER) == OTHER


def _keep_many(path: Path, start: int) -> None:
    table = UserTable(path, "3.9.0")
    for number in range(start, start + 20):
        table.keep(LINEAR, (number, 128, 128), FASTER)


def test_two_processes_keep_both_of_their_findings(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    path = tmp_path / "gpu.json"
    running = [context.Process(target=_keep_many, args=(path, start)) for start in (0, 100)]
    for process in running:
        process.start()
    for process in running:
        process.join()
    assert [process.exitcode for process in running] == [0, 0]
    table = UserTable(path, "3.9.0")
    assert all(
        table.find(LINEAR, (start + number, 128, 128)) for start in (0, 100) for number in range(20)
    )


DAMAGED = {
    "cut off": b'{"format": "arb-ternary-triton-ti',
    "no text": b"\xff\xfe\x00",
    "of another kind": b'{"format": "poem", "version": 1}',
    "a list": b"[1, 2]",
    "without tiles": b'{"format": "arb-ternary-triton-tiles", "version": 1, "triton": "3.9.0"}',
    "an impossible tile": (
        b'{"format": "arb-ternary-triton-tiles", "version": 1, "triton": "3.9.0",'
        b' "measured": {"linear int8, 16 x 4096 x 4096": {"tile": [3, 64, 1, 4, 3, 0], "seconds": '
        b"1}}}"
    ),
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_told_of_ignored_and_replaced(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "gpu.json"
    path.write_bytes(content)
    table = UserTable(path, "3.9.0")
    with caplog.at_level(logging.WARNING, logger="arb_ternary.backends"):
        assert table.find(LINEAR, BUCKET) is None
    assert f"{path}: not a table of measured tiles, so it is ignored" in caplog.text
    assert table.keep(LINEAR, BUCKET, FASTER) == FASTER
    assert UserTable(path, "3.9.0").find(LINEAR, BUCKET) == FASTER


def test_finding_holds_if_the_folder_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("not a folder")
    table = UserTable(tmp_path / "file" / "gpu.json", "3.9.0")
    with caplog.at_level(logging.WARNING, logger="arb_ternary.backends"):
        assert table.keep(LINEAR, BUCKET, FASTER) == FASTER
    assert "measured tiles cannot be kept" in caplog.text
    assert table.find(LINEAR, BUCKET) == FASTER


def test_an_interrupted_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = UserTable(tmp_path / "gpu.json", "3.9.0")
    table.keep(LINEAR, BUCKET, FASTER)

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(json, "dump", interrupted)
    with pytest.raises(KeyboardInterrupt):
        table.keep(LINEAR, (32, 128, 128), OTHER)
    assert UserTable(tmp_path / "gpu.json", "3.9.0").find(LINEAR, BUCKET) == FASTER
    assert sorted(found.name for found in tmp_path.iterdir()) == ["gpu.json", "gpu.lock"]


@pytest.mark.parametrize("value", ["", "relative/path"])
def test_cache_is_in_the_home_directory_or_the_variables_place(
    value: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert user_table(Gpu("gfx942", 304, "AMD Instinct MI300X")).path == (
        tmp_path / ".cache" / "arb-ternary" / "triton" / "gfx942-amd-instinct-mi300x.json"
    )


# --- explaining


def test_what_was_measured_is_explained(on_h200: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = get_backend("triton")
    shape = WeightShape(4000, 4096, 128)
    monkeypatch.setattr(backend_module, "INTERPRETED", False)
    monkeypatch.setattr(backend_module, "gpu_of", lambda _index: H200)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert built.measured("linear", 9, shape, True) is None
    user_table(H200).keep(LINEAR, BUCKET, FASTER)
    user_table(H200).keep(("row", "int8"), (1, 4096, 4096), OTHER)
    assert built.measured("linear", 9, shape, True) == {"seconds": 1e-5, "shape": [16, 4096, 4096]}
    assert built.measured("linear", 1, shape, True) == {"seconds": 2e-5, "shape": [1, 4096, 4096]}
    assert built.measured("linear", 9, shape, False) is None
    assert built.measured("apply_votes", 9, shape, True) is None
    assert on_h200.is_file()


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


def test_one_row_of_whole_blocks_is_not_copied() -> None:
    shape = WeightShape(64, 256, 128)
    packed = torch.zeros((64, 64), dtype=torch.uint8)
    exponent = torch.zeros((64, 2), dtype=torch.int8)
    x = torch.zeros((1, 256), dtype=torch.int8)
    with recording(KNOWN["sm_90"]) as launches:
        products.linear(x, torch.ones(1), packed, exponent, None, shape, torch.float32)
    assert launches[0].arguments[0].data_ptr() == x.data_ptr()
    short = WeightShape(64, 200, 128)
    x = torch.zeros((1, 200), dtype=torch.int8)
    with recording(KNOWN["sm_90"]) as launches:
        products.linear(x, torch.ones(1), packed, exponent, None, short, torch.float32)
    assert launches[0].arguments[0].numel() == 64  # words of four
