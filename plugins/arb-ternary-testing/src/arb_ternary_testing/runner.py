"""``arb plugins check``: the conformance kit on everything that an installed plugin provides."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import attrs
import pytest
from attrs import define, field, frozen

from arb_ternary.config.options import DEFAULT_CHOICE
from arb_ternary.config.structure import options_class
from arb_ternary.errors import ArbError, EnvironmentProblem, UsageProblem
from arb_ternary.plugins.manager import manager
from arb_ternary.plugins.record import PluginRecord, Registered
from arb_ternary.specs import resolve

# : The suites of core's kinds, which cannot name them; other kinds state theirs
# (``Spec.conformance``).
SUITES: Final = {
    "backend": "arb_ternary_testing:BackendSuite",
    "masking": "arb_ternary_testing:MaskingSuite",
    "optimizer": "arb_ternary_testing:OptimizerSuite",
    "phase": "arb_ternary_testing:PhaseSuite",
}
#: What a hook module may not bring in: it is imported by every command, ``arb --help`` included.
HEAVY: Final = ("torch", "triton", "tilelang", "numpy", "cattrs", "yaml", "rich")

_CLASS = """
class Test{number}({package}.{suite}):
    component = "{component}"
"""


@define
class Outcome:
    """What became of one row of the table.

    Attributes:
        what: kind and name of the component, or ``hook module``.
        suite: the suite that was run.
        passed, failed, skipped: numbers of tests.
        failures: name and text of each failure.
    """

    what: str
    suite: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    failures: list[tuple[str, str]] = field(factory=list)

    def count(self, ok: bool, test: str, text: str) -> None:
        """Count one test."""
        if ok:
            self.passed += 1
        else:
            self.failed += 1
            self.failures.append((test, text))


@frozen
class _Collector:
    """A pytest plugin that sorts results by test class."""

    outcomes: dict[str, Outcome]
    errors: list[str] = field(factory=list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test, its set-up or its tear-down has ended."""
        _, cls, test = report.nodeid.split("::", 2)
        outcome = self.outcomes[cls]
        if report.skipped:
            outcome.skipped += 1
        elif report.failed:
            outcome.count(False, test, report.longreprtext)
        elif report.when == "call":
            outcome.count(True, test, "")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file or class has been collected."""
        if report.failed:
            self.errors.append(report.longreprtext)


def check_plugin(name: str, kind: str | None = None) -> int:
    """Check the installed plugin ``name`` and print a table; failures are printed in full.

    Its hook module has to be light, every component has to resolve, and backends, optimizers,
    masking strategies and phases have to pass the suite of their kind with their default options. A
    component that has an option without a default is left to the plugin's own tests, and the table
    says so.

    Args:
        name: the plugin's name (that of its entry point).
        kind: check only components of this kind.

    Returns:
        0 when everything passed, else 1.

    Raises:
        UsageProblem: no plugin has that name, or it has no component of that kind.
        EnvironmentProblem: it could not be loaded.
    """
    record = _record(name)
    components = [found for found in record.components if kind in (None, found.kind)]
    if not components:
        provided = ", ".join(sorted({found.kind for found in record.components})) or "nothing"
        raise UsageProblem(
            f"plugin {name!r} provides no {kind or 'component'}", f"it provides: {provided}"
        )
    outcomes = [_check_hook_module(record), *(_check_resolution(found) for found in components)]
    suited = [found for found in components if _suite(found)]
    outcomes += [
        Outcome(f"{f.kind} {f.name}", _unsuited(f), skipped=1)
        for f in suited
        if _required_options(f)
    ]
    outcomes += _run_suites([found for found in suited if not _required_options(found)])
    _print(record, outcomes)
    return 1 if any(outcome.failed for outcome in outcomes) else 0


def _record(name: str) -> PluginRecord:
    records = manager().records_called(name)
    for record in records:
        if record.reason:
            raise EnvironmentProblem(record.fault)
    return records[0]


def _check_hook_module(record: PluginRecord) -> Outcome:
    """Import the hook module in a process of its own and look at what came with it."""
    outcome = Outcome("hook module", "imports")
    if record.distribution is None:
        outcome.skipped += 1
        return outcome
    code = (
        f"import sys, {record.module}; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    loaded = done.stdout.split()
    text = (
        done.stderr
        if done.returncode
        else f"{record.module} imports {', '.join(loaded)}; import them where needed"
    )
    outcome.count(done.returncode == 0 and not loaded, "the hook module is light", text)
    return outcome


def _check_resolution(found: Registered) -> Outcome:
    """Resolve the lazy targets of a spec."""
    outcome = Outcome(f"{found.kind} {found.name}", "targets")
    for attribute in ("target", "config", "probe"):
        target = getattr(found.spec, attribute, None)
        if target is None:
            continue
        try:
            resolve(target)
        except Exception as error:
            outcome.count(False, attribute, f"{target}: {type(error).__name__}: {error}")
        else:
            outcome.count(True, attribute, "")
    if found.spec.summary:
        outcome.count(True, "summary", "")
    else:
        outcome.count(
            False, "summary", "the spec has no summary: listings show nothing about the component"
        )
    return outcome


def _required_options(found: Registered) -> list[str]:
    """Options without a default; with one of them the suite does not know what to build."""
    try:
        options = options_class(found.spec)
    except ArbError:  # reported by the row of its targets
        return []
    fields = () if options is None else attrs.fields(options)
    return [
        f.name
        for f in fields
        if f.init and f.default is attrs.NOTHING and DEFAULT_CHOICE not in f.metadata
    ]


def _suite(found: Registered) -> str:
    """The conformance suite of the component's kind; empty where there is none."""
    return found.spec.conformance or SUITES.get(found.kind, "")


def _unsuited(found: Registered) -> str:
    return (
        f"{_suite(found).partition(':')[2]}: left to the plugin's tests, needs "
        f"{', '.join(_required_options(found))}"
    )


def _run_suites(components: Iterable[Registered]) -> list[Outcome]:
    """Subclass the suites in a file of their own, run it, and sort the results."""
    outcomes: dict[str, Outcome] = {}
    text = '"""Written by `arb plugins check`."""\n\n'
    for number, found in enumerate(components):
        package, _, suite = _suite(found).partition(":")
        outcomes[f"Test{number}"] = Outcome(f"{found.kind} {found.name}", suite)
        text += f"import {package}\n" + _CLASS.format(
            number=number, package=package, suite=suite, component=found.name
        )
    if not outcomes:
        return []
    collector = _Collector(outcomes)
    with TemporaryDirectory(prefix="arb-plugins-check-") as folder:
        file = Path(folder, "test_conformance.py")
        file.write_text(text, encoding="utf-8")
        ini = Path(folder, "pytest.ini")
        ini.write_text("[pytest]\n", encoding="utf-8")
        options = [
            "--import-mode=importlib",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:terminal",
            "-p",
            "no:xdist",
        ]
        code = pytest.main(
            [*options, "-c", str(ini), "--rootdir", folder, str(file)], plugins=[collector]
        )
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        details = "\n".join(collector.errors)
        raise EnvironmentProblem(
            f"the conformance suites could not be run: pytest ended with code {int(code)}", details
        )
    return list(outcomes.values())


def _print(record: PluginRecord, outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        for test, text in outcome.failures:
            print(f"--- {outcome.what}: {test}\n{text}\n")
    rows = [("component", "suite", "passed", "failed", "skipped")]
    rows += [(o.what, o.suite, str(o.passed), str(o.failed), str(o.skipped)) for o in outcomes]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    print(f"plugin {record.described}")
    for row in rows:
        left = [cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True)]
        right = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
        print("  ".join([*left, *right]).rstrip())
    failed = sum(outcome.failed for outcome in outcomes)
    print(f"{failed} failed" if failed else "all passed")
