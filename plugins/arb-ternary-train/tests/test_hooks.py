"""The hooks of a run are the published ones, documented, and no plugin's own module can implement
them.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from arb_ternary import hookimpl
from arb_ternary.errors import EnvironmentProblem
from arb_ternary.hookspecs import RUN_HOOKS
from arb_ternary.plugins.hooks import describe_hook
from arb_ternary.plugins.manager import manager

OF_A_RUN = [describe_hook(hook) for hook in RUN_HOOKS]


def test_the_hooks_of_a_run_are_the_published_ones() -> None:
    assert [f"{hook.name}({', '.join(hook.arguments)})" for hook in OF_A_RUN] == [
        "arb_select_backend(request, candidates)",
        "arb_run_start(context)",
        "arb_phase_start(context, phase)",
        "arb_step_end(context, step, metrics)",
        "arb_eval_end(context, step, metrics)",
        "arb_checkpoint_save(context, state)",
        "arb_checkpoint_load(context, state)",
        "arb_phase_end(context, phase)",
        "arb_run_end(context, status)",
    ]
    assert [hook.name for hook in OF_A_RUN if hook.group == "selection"] == ["arb_select_backend"]


@pytest.mark.parametrize("hook", OF_A_RUN, ids=lambda hook: hook.name)
def test_every_hook_says_when_it_is_called_and_what_none_means(hook: object) -> None:
    documentation: str = hook.documentation  # type: ignore[attr-defined]
    assert "Called" in documentation, "when, and how often"
    assert "None" in documentation or "result is ignored" in " ".join(documentation.split())


@pytest.mark.parametrize("hook", [hook.name for hook in OF_A_RUN])
def test_a_plugin_that_implements_one_itself_is_told_to_register_a_tracker(hook: str) -> None:
    def implementation() -> None: ...

    plugin = SimpleNamespace(**{hook: hookimpl(implementation)})
    with pytest.raises(EnvironmentProblem) as caught:
        manager().register(plugin, "watcher")
    assert caught.value.what.endswith(
        f"{hook} is called on the observers of a run only: register a tracker that implements it"
    )
