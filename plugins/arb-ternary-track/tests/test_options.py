"""Options and libraries that are not there."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from arb_ternary.errors import ConfigError, EnvironmentProblem


@pytest.mark.parametrize("library", ["tensorboard", "wandb", "trackio"])
def test_a_library_that_is_not_installed_is_named(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    monkeypatch.delitem(sys.modules, f"arb_ternary_track.{library}_writer", raising=False)
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(EnvironmentProblem, match=f"tracker '{library}': needs a package") as found:
        tiny.run("run", f"trackers=[{library}]")
    assert found.value.hint.startswith("pip install ")
    assert f"[{library}]" in found.value.hint
    assert not (tiny.folder / "run").exists()


@pytest.mark.parametrize("project", ["", "a/b", "what?"])
def test_names_that_no_project_can_have_are_refused(tiny: Any, project: str) -> None:
    with pytest.raises(ConfigError, match=r"trackers\[0\]\.project: .*must not"):
        tiny.config(f"trackers=[{{name: trackio, project: '{project}'}}]")
