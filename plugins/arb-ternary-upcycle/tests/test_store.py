"""A store survives a kill, and starts again from another plan."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch

from arb_ternary.errors import ArbError
from arb_ternary_upcycle.store import PLAN_FILE, Store, save_json, stored_plan

PLAN = {"seed": 1, "sizes": (1, 2)}


def test_content_stays_for_the_same_plan_only(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", PLAN)
    store.write_tensors("a", {"x": torch.ones(2)})
    store.write_json("b", {"value": float("inf")})
    again = Store(tmp_path / "store", {"seed": 1, "sizes": [1, 2]})
    assert torch.equal(again.tensors("a")["x"], torch.ones(2))
    assert again.json("b") == {"value": float("inf")}
    assert "a" in again
    assert "c" not in again
    other = Store(tmp_path / "store", {"seed": 2})
    assert [file.name for file in other.folder.iterdir()] == [PLAN_FILE]


def test_file_is_complete_or_unchanged(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", PLAN)
    store.write_json("a", {"value": 1})

    def fail() -> None:
        with store.writing("a") as new:
            new.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert store.json("a") == {"value": 1}
    assert sorted(file.name for file in store.folder.iterdir()) == ["a", PLAN_FILE]


def test_kill_during_removal_leaves_no_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "store", PLAN)
    store.write_json("a", {})
    monkeypatch.setattr("shutil.rmtree", lambda folder, ignore_errors=False: None)
    store.remove()
    assert stored_plan(tmp_path / "store") is None
    monkeypatch.undo()
    Store(tmp_path / "store", PLAN).remove()
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_deleted_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(tmp_path / "store", PLAN)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("os.unlink", refuse)
    store.remove()
    assert stored_plan(tmp_path / "store") is None
    assert f"{tmp_path}/.store.removed: no longer needed, and cannot be deleted" in caplog.text


def test_errors_name_the_file(tmp_path: Path) -> None:
    folder = Store(tmp_path / "store", PLAN).folder
    (folder / PLAN_FILE).write_text("{")
    with pytest.raises(ArbError, match=r"plan\.json: cannot be read") as caught:
        Store(folder, PLAN)
    assert caught.value.hint == "Remove the folder."
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ArbError, match="cannot be written"):
        save_json(tmp_path / "file" / "a.json", {})


def test_saved_json_has_texts_for_nan_and_infinity(tmp_path: Path) -> None:
    save_json(tmp_path / "a" / "b.json", {"x": [float("nan"), float("-inf"), 1.5]})
    assert (tmp_path / "a" / "b.json").read_text().split() == (
        ["{", '"x":', "[", '"nan",', '"-inf",', "1.5", "]", "}"]
    )
