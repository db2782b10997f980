from __future__ import annotations

import errno
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from arb_ternary.errors import CheckpointError
from arb_ternary_train.checkpoint import CheckpointStore, read_checkpoint

IDENTITY = {"config": {"seed": 0}}
POINTS = (
    "temporary folder made",
    "model written",
    "state tensors written",
    "state written",
    "manifest written",
    "flushed",
    "renamed",
    "pointer written",
    "pointer replaced",
)


def save(store: CheckpointStore, step: int) -> Path:
    model = {"weight": torch.full((4,), float(step))}
    return store.save(step, model, {"step": step, "moments": {0: torch.arange(step)}}, IDENTITY)


def names(store: CheckpointStore) -> list[str]:
    return [path.name for path in store.paths()]


def test_a_checkpoint_comes_back_as_it_was(tmp_path: Path) -> None:
    path = save(CheckpointStore(tmp_path), 7)
    checkpoint = read_checkpoint(path)
    assert checkpoint.step == 7
    assert checkpoint.identity == IDENTITY
    assert torch.equal(checkpoint.model["weight"], torch.full((4,), 7.0))
    assert checkpoint.state["step"] == 7
    assert torch.equal(checkpoint.state["moments"][0], torch.arange(7))


def test_the_same_state_is_written_as_the_same_bytes(tmp_path: Path) -> None:
    first, second = (save(CheckpointStore(tmp_path / name), 5) for name in "ab")
    for file in first.iterdir():
        assert file.read_bytes() == (second / file.name).read_bytes()


def test_the_newest_keep_stay_and_the_pointer_names_the_newest(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 3, 10, 100_000_000):
        save(store, step)
    assert names(store) == ["step-100000000", "step-00000010"]
    assert (tmp_path / "latest").read_text() == "step-100000000\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "latest",
        "step-00000010",
        "step-100000000",
    ]


def test_keep_0_keeps_all(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=0)
    for step in range(5):
        save(store, step)
    assert len(names(store)) == 5


def test_a_second_checkpoint_at_a_step_is_newer_than_the_first(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for _ in range(3):
        save(store, 4)
    assert names(store) == ["step-00000004.2", "step-00000004.1", "step-00000004"]


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_of_many_checkpoints_at_a_step_the_newest_stay(tmp_path: Path, keep: int) -> None:
    store = CheckpointStore(tmp_path, keep=keep)
    written = [store.save(0, {}, {"number": number}, {}) for number in range(7)]
    assert store.paths() == written[::-1][:keep]
    assert [read_checkpoint(path).state["number"] for path in store.paths()] == [6, 5, 4][:keep]
    assert (tmp_path / "latest").read_text().strip() == written[-1].name


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()]
)
def test_failure_at_any_point_leaves_a_good_checkpoint(
    point: str, error: BaseException, tmp_path: Path
) -> None:
    save(CheckpointStore(tmp_path, keep=1), 1)

    def fail(at: str) -> None:
        if at == point:
            raise error

    expected = CheckpointError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        save(CheckpointStore(tmp_path, keep=1, faults=fail), 2)
    complete = POINTS.index(point) >= POINTS.index("renamed")
    store = CheckpointStore(tmp_path, keep=1)
    checkpoint, problems = store.newest_good()
    assert checkpoint is not None
    assert checkpoint.step == (2 if complete else 1)
    assert problems == ()
    save(store, 3)
    assert names(store) == ["step-00000003"]
    assert not list(tmp_path.glob(".writing*"))


def test_a_full_disk_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    def full(point: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(
        CheckpointError, match=r"step 2 cannot be written: .*No space left on device"
    ) as refused:
        save(CheckpointStore(tmp_path, faults=full), 2)
    assert "--resume" in refused.value.hint


def test_file_size_limit_leaves_the_previous_checkpoint(
    tmp_path: Path,
) -> None:
    """Limit the size of files for a moment, so that write(2) fails below safetensors."""
    resource = pytest.importorskip("resource")
    signal = pytest.importorskip("signal")
    store = CheckpointStore(tmp_path)
    save(store, 1)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(CheckpointError, match=r"step 2 cannot be written: .*File too large"):
            store.save(2, {"weight": torch.zeros(10_000)}, {}, IDENTITY)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert names(store) == ["step-00000001"]
    assert read_checkpoint(store.latest()).step == 1


@pytest.mark.parametrize(
    "name", ["model.safetensors", "state.safetensors", "state.json", "manifest.json"]
)
def test_a_truncated_or_missing_file_is_named(name: str, tmp_path: Path) -> None:
    path = save(CheckpointStore(tmp_path), 9)
    whole = (path / name).read_bytes()
    (path / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        read_checkpoint(path)
    (path / name).unlink()
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.") + ": there is no such file"):
        read_checkpoint(path)


def test_a_flipped_bit_in_the_state_names_the_file(tmp_path: Path) -> None:
    path = save(CheckpointStore(tmp_path), 9)
    content = (path / "state.json").read_bytes().replace(b"9", b"8", 1)
    (path / "state.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"state\.json: the file is damaged"):
        read_checkpoint(path)


def test_newest_good_checkpoint_is_found_behind_damaged_ones(
    tmp_path: Path,
) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 3):
        save(store, step)
    (tmp_path / "step-00000003" / "manifest.json").unlink()
    (tmp_path / "step-00000002" / "model.safetensors").write_bytes(b"")
    checkpoint, problems = store.newest_good()
    assert checkpoint is not None
    assert checkpoint.step == 1
    assert [
        "step-00000003/manifest.json" in problems[0],
        "step-00000002/model.safetensors" in problems[1],
    ] == [True] * 2
    assert names(store) == ["step-00000001"]
    assert (tmp_path / "latest").read_text() == "step-00000001\n"
    assert sorted(path.name for path in (tmp_path / "set-aside").iterdir()) == [
        "step-00000002-0",
        "step-00000003-0",
    ]


def test_without_a_good_checkpoint_every_problem_is_listed(
    tmp_path: Path,
) -> None:
    assert CheckpointStore(tmp_path / "nothing").newest_good() == (None, ())
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        (save(store, step) / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match="none of the checkpoints can be read") as raised:
        store.newest_good()
    assert raised.value.hint.count("state.json: the file is truncated or altered") == 2
    assert names(store) == ["step-00000002", "step-00000001"]
    with pytest.raises(CheckpointError, match="there is no checkpoint here yet"):
        CheckpointStore(tmp_path / "nothing").latest()


def test_a_pickle_is_never_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(CheckpointStore(tmp_path), 1)

    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("pickle was used")

    for name in ("load", "loads", "Unpickler", "dump", "dumps"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr(torch, "save", refuse)
    assert read_checkpoint(path).step == 1
    (path / "model.safetensors").write_bytes(b"\x80\x04\x95")
    with pytest.raises(CheckpointError):
        read_checkpoint(path)


def test_tensor_that_changed_after_verification_is_refused(
    tmp_path: Path,
) -> None:
    path = save(CheckpointStore(tmp_path), 6)
    checkpoint = read_checkpoint(path)
    for name in ("model.safetensors", "state.safetensors"):
        content = (path / name).read_bytes()
        (path / name).write_bytes(content[:-4] + b"\xff" * 4)
    assert torch.equal(checkpoint.state["moments"][0], torch.arange(6))
    with pytest.raises(CheckpointError, match="tensor 'weight' is damaged"):
        checkpoint.model["weight"]
    (path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"tensor 'weight' cannot be read: No such file"):
        checkpoint.model["weight"]


def test_the_manifest_lists_every_file_and_tensor(tmp_path: Path) -> None:
    path = save(CheckpointStore(tmp_path), 2)
    manifest = json.loads((path / "manifest.json").read_text())
    assert set(manifest["files"]) == {file.name for file in path.iterdir()} - {"manifest.json"}
    assert {file: list(tensors) for file, tensors in manifest["tensors"].items()} == {
        "model.safetensors": ["weight"],
        "state.safetensors": ["moments/0"],
    }
