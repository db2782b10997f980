"""A run whose phases train nothing is not evaluated at its end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from arb_ternary.plugins.manager import manager, reset_manager

PLUGIN = """
from typing import ClassVar

from attrs import frozen

from arb_ternary import hookimpl
from arb_ternary.config.options import option
from arb_ternary.protocols.runs import PhaseResult
from arb_ternary.specs import PhaseSpec

ARB_API_VERSION = (1, 0)


@frozen(kw_only=True)
class Options:
    times: int = option(1, "how often it looks")


@frozen(kw_only=True)
class Leaving(Options):
    no_training: ClassVar[bool] = True


@frozen(kw_only=True)
class Changing(Options):
    no_training: ClassVar[bool] = False


@hookimpl
def arb_register_phases():
    names = {"looking": "Options", "leaving": "Leaving", "changing": "Changing"}
    return [PhaseSpec(name=name, target="idle:Idle", config=f"idle:{made}") for name,
        made in names.items()]


class Idle:
    name = "idle"

    def __init__(self, config):
        pass

    def run(self, context):
        return PhaseResult(steps=0)

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass
"""


@pytest.fixture(autouse=True)
def plugin(tmp_path: Path) -> Iterator[None]:
    """Load the phases from a file."""
    file = tmp_path / "idle.py"
    file.write_text(PLUGIN)
    reset_manager()
    manager().load_file(file)
    yield
    reset_manager()


@pytest.mark.parametrize(
    ("phases", "evaluated"),
    [
        ("leaving, leaving", False),
        ("leaving, looking", True),
        ("leaving, changing", True),
        ("looking", True),
    ],
)
def test_a_run_that_leaves_the_model_is_not_evaluated(
    tiny: Any, phases: str, evaluated: bool
) -> None:
    _, report = tiny.run("run", f"phases=[{phases}]")
    assert (report.validation_loss is not None) == evaluated
