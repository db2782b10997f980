"""Files that are replaced whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from arb_ternary_train.durable import flush, replacing


def test_the_old_content_stays_until_the_new_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file.json"
    path.write_text("old")
    events: list[str] = []
    fsync = os.fsync
    replace = Path.replace

    def synced(descriptor: int) -> None:
        events.append(f"fsync {os.fstat(descriptor).st_ino}")
        fsync(descriptor)

    def replaced(self: Path, target: Path) -> Path:
        events.append(f"replace {target} of {path.read_text()} by {self.read_text()}")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    with replacing(path) as new:
        new.write_text("new")
    assert events == [f"fsync {path.stat().st_ino}", f"replace {path} of old by new"]
    assert [each.name for each in tmp_path.iterdir()] == ["file.json"]
    flush(tmp_path)
    assert events[2:] == [f"fsync {tmp_path.stat().st_ino}"]


def test_what_fails_leaves_the_old_content_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def interrupted() -> None:
        with replacing(path) as new:
            new.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (path.read_text(), [each.name for each in tmp_path.iterdir()]) == ("old", ["file"])
    with pytest.raises(FileNotFoundError), replacing(path):
        pass
    assert path.read_text() == "old"


def test_what_a_killed_writer_left_is_written_over(tmp_path: Path) -> None:
    (tmp_path / ".file.writing").write_text("half of something longer")
    with replacing(tmp_path / "file") as new:
        new.write_text("whole")
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("file", "whole")]


def test_a_file_that_cannot_be_opened_is_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path, flags: int) -> int:
        raise PermissionError(13, "refused", str(path))

    (tmp_path / "file").touch()
    monkeypatch.setattr(os, "open", refused)
    flush(tmp_path)
    with pytest.raises(PermissionError):
        flush(tmp_path / "file")
