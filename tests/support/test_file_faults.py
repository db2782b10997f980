from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from arb_test_support.file_faults import FileFaults


def work(folder: Path) -> None:
    """Do each kind of operation."""
    (folder / "deep").mkdir()
    with (folder / "deep/new").open("w") as file:
        file.write("a line")
        file.flush()
        os.fsync(file.fileno())
    with (folder / "deep/new").open("ab", buffering=0) as file:
        file.write(b", and more")
        file.truncate(6)
    (folder / "deep/new").rename(folder / "deep/old")
    assert (folder / "deep/old").read_text() == "a line"
    shutil.rmtree(folder / "deep")
    os.close(os.open(folder / "other", os.O_WRONLY | os.O_CREAT))


EXPECTED = [
    ("mkdir", "deep"),
    ("create", "new"),
    ("write", "new"),
    ("fsync", "new"),
    ("create", "new"),
    ("write", "new"),
    ("write", "new"),
    ("rename", "old"),
    ("open", "old"),
    ("open", "deep"),
    ("unlink", "old"),
    ("unlink", "deep"),
    ("create", "other"),
]


def test_operations_below_the_folder_are_counted(tmp_path: Path) -> None:
    with FileFaults(tmp_path / "a" / "..") as counted:
        work(tmp_path)
    assert [(kind, path.name) for kind, path in counted.operations] == EXPECTED
    with FileFaults(tmp_path / "elsewhere") as counted:
        (tmp_path / "other").unlink()
    assert counted.operations == []


@pytest.mark.parametrize("number", range(len(EXPECTED)))
def test_the_chosen_operation_fails(number: int, tmp_path: Path) -> None:
    with FileFaults(tmp_path, errno.EIO, number) as faults, pytest.raises(OSError) as failed:
        work(tmp_path)
    assert failed.value.errno == errno.EIO
    assert [(kind, path.name) for kind, path in faults.operations[: number + 1]] == EXPECTED[
        : number + 1
    ]


def test_an_error_that_stays_ends_later_operations_too(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with FileFaults(tmp_path, errno.EROFS, 0):
        for change in ((tmp_path / "file").unlink, (tmp_path / "folder").mkdir):
            with pytest.raises(OSError, match="Read-only file system"):
                change()
        assert (tmp_path / "file").read_text() == ""
