"""Test what a file of expected failures excuses, and that out-of-date entries fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from arb_ternary.errors import UsageProblem
from arb_ternary_testing.expected_failures import read_expected_failures

CONFTEST = """
from pathlib import Path
from arb_ternary_testing import expect_failures

pytest_collection_modifyitems = expect_failures(Path(__file__).with_name("expected_failures.txt"))
"""

TESTS = """
import pytest

class TestThing:
    def test_good(self):
        assert True

    @pytest.mark.parametrize("n", [1, 2])
    def test_partly(self, n):
        assert n == 1

    def test_bad(self):
        assert False
"""


def run_with(folder: Path, listed: str, *arguments: str) -> tuple[int, str]:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_thing.py").write_text(TESTS)
    (folder / "expected_failures.txt").write_text(listed)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-c",
        os.devnull,
        "--rootdir",
        folder,
    ]
    done = subprocess.run(
        [*command, *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_listed_failures_are_excused_with_or_without_parameters(tmp_path: Path) -> None:
    code, output = run_with(
        tmp_path, "# gaps\n\nTestThing::test_partly[2]  too large\nTestThing::test_bad\tnot done\n"
    )
    assert code == 0, output
    assert "2 passed, 2 xfailed" in output


def test_an_entry_whose_test_passes_fails(tmp_path: Path) -> None:
    code, output = run_with(
        tmp_path,
        "TestThing::test_partly[2] too large\nTestThing::test_bad not done\nTestThing::test_good "
        "was broken\n",
    )
    assert code == 1
    assert "[XPASS(strict)] was broken" in output


def test_an_entry_without_parameters_stands_for_all_of_them(tmp_path: Path) -> None:
    code, output = run_with(tmp_path, "TestThing::test_partly both\nTestThing::test_bad not done\n")
    assert code == 1
    assert "test_partly[1]" in output
    assert "test_partly[2]" not in output


def test_entry_that_names_no_test_fails_with_its_line(tmp_path: Path) -> None:
    code, output = run_with(
        tmp_path, "TestThing::test_bad not done\nTestThing::test_partly[3] gone\n"
    )
    assert code == 4
    assert (
        "expected failures that name no test:\n  expected_failures.txt:2: TestThing::test_partly[3]"
        in output
    )


def test_run_of_one_test_ignores_the_other_entries(tmp_path: Path) -> None:
    listed = "TestThing::test_bad not done\nTestThing::test_partly[2] too large\n"
    code, output = run_with(tmp_path, listed, "test_thing.py::TestThing::test_bad")
    assert (code, "1 xfailed" in output) == (0, True), output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("test_bad not done", "1: 'test_bad' is not of the form Class::test"),
        ("\nTestThing::test_bad", "2: TestThing::test_bad has no reason"),
        ("TestThing::test_bad[a b]", r"1: TestThing::test_bad\[a b\] has no reason"),
        ("A::test_a one\nA::test_a two", "2: A::test_a is already listed on line 1"),
    ],
)
def test_a_malformed_line_is_an_error_that_names_it(
    text: str, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "expected_failures.txt"
    file.write_text(text)
    with pytest.raises(UsageProblem, match=message):
        read_expected_failures(file)


def test_parameters_may_hold_white_space(tmp_path: Path) -> None:
    file = tmp_path / "expected_failures.txt"
    file.write_text("A::test_a[x y]  the reason\n")
    (entry,) = read_expected_failures(file)
    assert (entry.test, entry.reason) == ("A::test_a[x y]", "the reason")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match="there is no such file of expected failures"):
        read_expected_failures(tmp_path / "absent.txt")
