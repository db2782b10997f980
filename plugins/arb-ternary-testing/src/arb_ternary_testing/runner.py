"""Run the conformance kit on an installed plugin or a plugin file: ``arb plugins check``."""

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

from arb_ternary.cli.output import print_table
from arb_ternary.config.options import DEFAULT_CHOICE
from arb_ternary.config.structure import options_class
from arb_ternary.errors import ArbError, EnvironmentProblem, UsageProblem
from arb_ternary.plugins.manager import manager
from arb_ternary.plugins.record import PluginRecord, Registered
from arb_ternary.specs import resolve

#: The suites of kinds of component.
SUITES: Final = {
    "backend": "arb_ternary_testing:BackendSuite",
    "masking": "arb_ternary_testing:MaskingSuite",
    "optimizer": "arb_ternary_testing:OptimizerSuite",
    "phase": "arb_ternary_testing:PhaseSuite",
}
#: Modules that a hook module must not import: every command imports it, ``arb --help`` included.
HEAVY: Final = ("torch", "triton", "tilelang", "numpy", "cattrs", "yaml", "rich")

_PYTEST_OPTIONS: Final = (
    "--import-mode=importlib",
    *("-p", "no:cacheprovider"),
    *("-p", "no:terminal"),
    *("-p", "no:xdist"),
)
_CLASS: Final = """
import {package}


class Test{number}({package}.{suite}):
    component = "{component}"
"""


@define
class Outcome:
    """One row of the table of results.

    Attributes:
        what: kind and name of the component, or ``hook module``.
        suite: the suite that was run.
        passed: number of tests that passed.
        failed: number of tests that failed.
        skipped: number of tests that were skipped.
        failures: name and text of each failure.
    """

    what: str
    suite: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    failures: list[tuple[str, str]] = field(factory=list)

    def add_pass(self) -> None:
        """Count a test that passed."""
        self.passed += 1

    def add_failure(self, test: str, text: str) -> None:
        """Count and keep a failure."""
        self.failed += 1
        self.failures.append((test, text))


@frozen
class _Collector:
    """A pytest plugin that sorts results by test class."""

    outcomes: dict[str, Outcome]
    errors: list[str] = field(factory=list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count the result of a test, its set-up or its tear-down."""
        _, cls, test = report.nodeid.split("::", 2)
        outcome = self.outcomes[cls]
        if report.skipped:
            outcome.skipped += 1
        elif report.failed:
            outcome.add_failure(test, report.longreprtext)
        elif report.when == "call":
            outcome.add_pass()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep the error of a file or class that cannot be collected."""
        if report.failed:
            self.errors.append(report.longreprtext)


def check_plugin(name: str, kind: str | None = None) -> int:
    """Check the plugin ``name`` and print a table; failures are printed in full.

    The hook module of an installed plugin must be light, every component must resolve, and
    backends, optimizers, masking strategies and phases must pass the suite of their kind with their
    default options. A component that has an option without a default is left to the plugin's own
    tests, and the table says so.

    Args:
        name: the name of an installed plugin (that of its entry point), or a file ``NAME.py``.
        kind: check only components of this kind.

    Returns:
        0 if everything passed, else 1.

    Raises:
        UsageProblem: no plugin has that name, there is no such file, or the plugin has no component
            of that kind.
        EnvironmentProblem: it could not be loaded.
    """
    record = _record(name)
    components = [found for found in record.components if kind in (None, found.kind)]
    if not components and (kind or not any(record.results.values())):
        provided = ", ".join(sorted({found.kind for found in record.components})) or "nothing"
        raise UsageProblem(
            f"plugin {name!r} provides no {kind or 'component'}", f"it provides: {provided}"
        )
    outcomes = [_check_hook_module(record)]
    outcomes += [_check_resolution(found) for found in components]
    testable = []
    for found in components:
        if not _suite(found):
            continue
        required = _required_options(found)
        if required:
            outcomes.append(_left_out(found, required))
        else:
            testable.append(found)
    outcomes += _run_suites(testable)
    _print(record, outcomes)
    return 1 if any(outcome.failed for outcome in outcomes) else 0


def _record(name: str) -> PluginRecord:
    if name.endswith(".py"):
        return manager().load_file(name)
    records = manager().records_called(name)
    for record in records:
        if record.reason:
            raise EnvironmentProblem(record.fault)
    return records[0]


def _check_hook_module(record: PluginRecord) -> Outcome:
    """Import the hook module in a new process and check which modules it imports."""
    outcome = Outcome("hook module", "imports")
    if record.distribution is None:
        outcome.skipped += 1
        return outcome
    code = (
        f"import sys, {record.module}; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    loaded = done.stdout.split()
    test = "the hook module is light"
    if done.returncode:
        outcome.add_failure(test, done.stderr)
    elif loaded:
        text = f"{record.module} imports {', '.join(loaded)}; import them where needed"
        outcome.add_failure(test, text)
    else:
        outcome.add_pass()
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
            outcome.add_failure(attribute, f"{target}: {type(error).__name__}: {error}")
        else:
            outcome.add_pass()
    if found.spec.summary:
        outcome.add_pass()
    else:
        outcome.add_failure(
            "summary", "the spec has no summary: listings show nothing about the component"
        )
    return outcome


def _required_options(found: Registered) -> list[str]:
    """Return the options without a default, whose values the suite cannot know."""
    try:
        options = options_class(found.spec)
    except ArbError:
        # The row of its targets reports it.
        return []
    if options is None:
        return []
    required = []
    for option in attrs.fields(options):
        has_default = option.default is not attrs.NOTHING or DEFAULT_CHOICE in option.metadata
        if option.init and not has_default:
            required.append(option.name)
    return required


def _left_out(found: Registered, required: list[str]) -> Outcome:
    """Return the row of a component that is left to the plugin's own tests."""
    suite = _suite(found).partition(":")[2]
    reason = f"{suite}: left to the plugin's tests, needs {', '.join(required)}"
    return Outcome(f"{found.kind} {found.name}", reason, skipped=1)


def _suite(found: Registered) -> str:
    """Return the conformance suite of the component's kind; empty if there is none."""
    return SUITES.get(found.kind, "")


def _run_suites(components: Iterable[Registered]) -> list[Outcome]:
    """Write a file that subclasses the suites, run it, and sort the results."""
    outcomes: dict[str, Outcome] = {}
    text = '"""Written by `arb plugins check`."""\n'
    for number, found in enumerate(components):
        package, _, suite = _suite(found).partition(":")
        outcomes[f"Test{number}"] = Outcome(f"{found.kind} {found.name}", suite)
        text += _CLASS.format(number=number, package=package, suite=suite, component=found.name)
    if not outcomes:
        return []

    collector = _Collector(outcomes)
    with TemporaryDirectory(prefix="arb-plugins-check-") as folder:
        file = Path(folder, "test_conformance.py")
        file.write_text(text, encoding="utf-8")
        ini = Path(folder, "pytest.ini")
        ini.write_text("[pytest]\n", encoding="utf-8")
        arguments = [*_PYTEST_OPTIONS, "-c", str(ini), "--rootdir", folder, str(file)]
        code = pytest.main(arguments, plugins=[collector])
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
    print(f"plugin {record.described}")
    columns = ("component", "suite", "passed", "failed", "skipped")
    rows = [(each.what, each.suite, each.passed, each.failed, each.skipped) for each in outcomes]
    print_table(columns, rows)
    failed = sum(outcome.failed for outcome in outcomes)
    print(f"{failed} failed" if failed else "all passed")
