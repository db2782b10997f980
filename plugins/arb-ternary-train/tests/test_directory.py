from __future__ import annotations

from pathlib import Path

import pytest

from arb_ternary.errors import ArbError, UsageProblem
from arb_ternary_testing.fakes import RUN_RECORD
from arb_ternary_train.directory import RunDirectory


def make(path: Path) -> RunDirectory:
    directory = RunDirectory(path)
    directory.create(
        "name: x\n", RUN_RECORD, {"tokenizer": {"kind": "bytes"}, "classes": ["0", "1"]}
    )
    return directory


def test_a_directory_is_made_whole_and_reads_back(tmp_path: Path) -> None:
    made = make(tmp_path / "deep" / "run")
    assert made.config_file.read_text() == "name: x\n"
    assert RunDirectory.existing(made.path).record()["seed"] == 1
    assert made.attachments() == {"tokenizer": {"kind": "bytes"}, "classes": ["0", "1"]}
    assert sorted(path.name for path in made.path.parent.iterdir()) == ["run"]


def test_another_run_is_not_overwritten_nor_are_other_files(tmp_path: Path) -> None:
    made = make(tmp_path / "run")
    with pytest.raises(UsageProblem, match="a run was started here already") as refused:
        made.create("name: y\n", {}, {})
    assert "--resume" in refused.value.hint
    assert made.config_file.read_text() == "name: x\n"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("precious")
    with pytest.raises(UsageProblem, match="exists and is not a run directory"):
        make(tmp_path / "other")
    (tmp_path / "empty").mkdir()
    make(tmp_path / "empty")


def test_names_are_made_unique_and_the_newest_is_found(tmp_path: Path) -> None:
    assert RunDirectory.newest("demo", tmp_path) is None
    for expected in ("demo", "demo-2", "demo-3"):
        directory = RunDirectory.unused("demo", tmp_path)
        assert directory.path.name == expected
        make(directory.path)
    newest = RunDirectory.newest("demo", tmp_path)
    assert newest is not None
    assert newest.path.name == "demo-3"


def test_what_is_no_run_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match="there is no such directory"):
        RunDirectory.existing(tmp_path / "nothing")
    with pytest.raises(UsageProblem, match=r"it has no run\.json"):
        RunDirectory.existing(tmp_path)
    make(tmp_path / "shakespeare-2")
    with pytest.raises(UsageProblem, match="there is no such directory") as unknown:
        RunDirectory.existing(tmp_path / "shakespere-2")
    assert f"did you mean {tmp_path / 'shakespeare-2'}?" in unknown.value.hint
    (tmp_path / "run.json").write_text('{"format": "another", "version": 1}')
    with pytest.raises(ArbError, match="format 'another' version 1"):
        RunDirectory.existing(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(ArbError, match=r"run\.json: the file is damaged"):
        RunDirectory.existing(tmp_path)


def test_failed_creation_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArbError, match="cannot be made"):
        make(tmp_path / "file" / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_a_kill_left_is_removed_unless_it_is_in_use(tmp_path: Path) -> None:
    names = {".run.making-1", ".run.making-2", ".run-2.making-1", ".[a]un.making-1"}
    for name in names:
        (tmp_path / name / "logs").mkdir(parents=True)
    with RunDirectory(tmp_path / ".run.making-2").locked():
        make(tmp_path / "run")
    names.remove(".run.making-1")
    assert {path.name for path in tmp_path.iterdir()} == names | {"run"}


def test_a_directory_in_the_making_is_not_removed(tmp_path: Path) -> None:
    def interfere(made: RunDirectory) -> None:
        with pytest.raises(UsageProblem, match="another process"), made.locked():
            pass

    RunDirectory(tmp_path / "run").create("name: x\n", RUN_RECORD, {}, interfere)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_the_lock_is_exclusive_and_given_back(tmp_path: Path) -> None:
    directory = make(tmp_path / "run")
    with (
        directory.locked(),
        pytest.raises(UsageProblem, match="another process"),
        directory.locked(),
    ):
        pass
    with directory.locked():
        pass
