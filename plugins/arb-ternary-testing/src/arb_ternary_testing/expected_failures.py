"""A file of expected failures in the repository of an implementation, in which a stale entry fails.

An implementation that does not yet pass a suite keeps its suite green and its gaps in sight::

    # expected_failures.txt
    TestMine::test_int8_products_are_exact[sizes0-32]   needs a 64-bit accumulator

and in the ``conftest.py`` beside it::

    from pathlib import Path
    from arb_ternary_testing import expect_failures

    _FILE = Path(__file__).with_name("expected_failures.txt")
    pytest_collection_modifyitems = expect_failures(_FILE)

An entry is ``Class::test``, which stands for all its parameters, or ``Class::test[parameters]``,
and after white space the reason. An entry whose test passes fails, and so does one that names no
test.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from attrs import frozen

from arb_ternary.errors import UsageProblem


@frozen
class ExpectedFailure:
    """One line of the file."""

    test: str
    reason: str
    line: int

    def names(self, identity: str) -> bool:
        """Whether the entry stands for the test ``Class::test[parameters]``."""
        return identity == self.test or identity.partition("[")[0] == self.test


def read_expected_failures(path: Path) -> tuple[ExpectedFailure, ...]:
    """Read the file; empty lines and lines that start with ``#`` are comments.

    Raises:
        UsageProblem: the file is missing, or a line has no ``::``, no reason, or names a test a
            second time.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise UsageProblem(f"{path}: there is no such file of expected failures") from None
    entries: dict[str, ExpectedFailure] = {}
    for number, text in enumerate(lines, start=1):
        line = text.strip()
        if not line or line.startswith("#"):
            continue
        test, reason = _split(line)
        if "::" not in test:
            raise UsageProblem(
                f"{path}:{number}: {test!r} is not of the form Class::test or "
                f"Class::test[parameters]"
            )
        if not reason:
            raise UsageProblem(
                f"{path}:{number}: {test} has no reason",
                "write it after the test, on the same line",
            )
        if test in entries:
            raise UsageProblem(
                f"{path}:{number}: {test} is already listed on line {entries[test].line}"
            )
        entries[test] = ExpectedFailure(test, reason, number)
    return tuple(entries.values())


def _split(line: str) -> tuple[str, str]:
    """The test and the reason: parameters in brackets may hold white space."""
    opening = line.find("[")
    first_space = next((index for index, letter in enumerate(line) if letter.isspace()), len(line))
    if 0 <= opening < first_space:
        end = line.rfind("]") + 1 or len(line)
        return line[:end], line[end:].strip()
    return line[:first_space], line[first_space:].strip()


def expect_failures(path: Path) -> Callable[[pytest.Config, list[pytest.Item]], None]:
    """A ``pytest_collection_modifyitems`` hook that marks the tests listed in ``path`` as strict
    expected failures.

    A listed test that passes fails. A listed test that does not exist ends the session with a usage
    error as soon as the whole folder of ``path`` is collected (a run of one file or one test says
    nothing about the others).
    """

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
        entries = read_expected_failures(path)
        used: set[str] = set()
        for item in items:
            identity = "::".join(item.nodeid.split("::")[1:])
            for entry in entries:
                if entry.names(identity):
                    used.add(entry.test)
                    item.add_marker(pytest.mark.xfail(strict=True, reason=entry.reason))
        stale = [entry for entry in entries if entry.test not in used]
        if stale and _collects_all_of(path.parent, config):
            listing = "\n".join(f"  {path.name}:{entry.line}: {entry.test}" for entry in stale)
            raise pytest.UsageError(f"expected failures that name no test:\n{listing}")

    return pytest_collection_modifyitems


def _collects_all_of(folder: Path, config: pytest.Config) -> bool:
    """Whether the session was asked for the whole of ``folder``."""
    asked = [
        Path(config.invocation_params.dir, argument)
        for argument in config.args
        if "::" not in argument
    ]
    return any(folder.resolve().is_relative_to(argument.resolve()) for argument in asked)
