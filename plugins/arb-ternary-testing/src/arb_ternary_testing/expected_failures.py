"""Mark the tests that a file lists as expected failures; an entry that is out of date fails.

An implementation that does not pass a suite yet keeps its test run green and its gaps visible::

    # expected_failures.txt
    TestMine::test_int8_products_are_exact[sizes0-32]   needs a 64-bit accumulator

and in the ``conftest.py`` in the same folder::

    from pathlib import Path
    from arb_ternary_testing import expect_failures

    _FILE = Path(__file__).with_name("expected_failures.txt")
    pytest_collection_modifyitems = expect_failures(_FILE)

An entry is ``Class::test``, which stands for all its parameters, or ``Class::test[parameters]``,
then white space and the reason. An entry fails if its test passes, or if it names no test.
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
        """Return whether the entry stands for the test ``Class::test[parameters]``."""
        return identity == self.test or identity.partition("[")[0] == self.test


def read_expected_failures(path: Path) -> tuple[ExpectedFailure, ...]:
    """Read the file. Empty lines and lines that start with ``#`` are comments.

    Raises:
        UsageProblem: the file is missing, or a line has no ``::``, has no reason, or names a test
            that an earlier line names.
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
        where = f"{path}:{number}: "
        if "::" not in test:
            raise UsageProblem(
                f"{where}{test!r} is not of the form Class::test or Class::test[parameters]"
            )
        if not reason:
            raise UsageProblem(
                f"{where}{test} has no reason", "write it after the test, on the same line"
            )
        if test in entries:
            raise UsageProblem(f"{where}{test} is already listed on line {entries[test].line}")
        entries[test] = ExpectedFailure(test, reason, number)
    return tuple(entries.values())


def _split(line: str) -> tuple[str, str]:
    """Return the test and the reason. Parameters in brackets may hold white space."""
    test, *rest = line.split(maxsplit=1)
    if "[" in test:
        end = line.rfind("]") + 1 or len(line)
        return line[:end], line[end:].strip()
    return test, "".join(rest)


def expect_failures(path: Path) -> Callable[[pytest.Config, list[pytest.Item]], None]:
    """Return a ``pytest_collection_modifyitems`` hook for the tests listed in ``path``.

    It marks them as strict expected failures: a listed test that passes fails. A listed test that
    does not exist ends the session with a usage error if the whole folder of ``path`` is collected
    (a run of one file or one test says nothing about the others).
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
    """Return whether the session was asked for the whole of ``folder``."""
    for argument in config.args:
        if "::" in argument:
            continue
        asked = Path(config.invocation_params.dir, argument)
        if folder.resolve().is_relative_to(asked.resolve()):
            return True
    return False
