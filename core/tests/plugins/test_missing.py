"""What a user reads who names something that is not there."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from arb_ternary.errors import ArbError, EnvironmentProblem, UsageProblem, render
from arb_ternary.plugins import missing
from arb_ternary.plugins.manager import manager
from arb_ternary.plugins.missing import known_distribution, known_names, not_installed
from arb_ternary.plugins.surface import NOUNS

OPTIMIZER = """
from arb_ternary import hookimpl
from arb_ternary.specs import OptimizerSpec
ARB_API_VERSION = (1, 0)
@hookimpl
def arb_register_optimizers():
    return [OptimizerSpec(name="swift", target="nowhere:build", accepts={"float"})]
"""


def problem(kind: str, name: str) -> ArbError:
    with pytest.raises(ArbError) as caught:
        manager().registry.get(kind, name)
    return caught.value


def test_an_optimizer_that_is_not_installed_names_the_command_that_installs_it(install_plugin):
    error = problem("optimizer", "signgsd")

    assert render(error) == "error: optimizer 'signgsd' is not installed\n  pip install arb-ternary-signgsd"
    assert error.exit_code == 3


def test_a_member_of_a_family_that_is_not_installed_names_the_distribution_of_the_family(install_plugin):
    error = problem("optimizer", "gqc.gnts")

    assert render(error) == "error: optimizer 'gqc.gnts' is not installed\n  pip install arb-ternary-gqc"
    assert error.exit_code == 3


def test_a_misspelt_optimizer_gets_the_nearest_name_and_the_choices(install_plugin):
    error = problem("optimizer", "sign_vote")

    assert render(error) == (
        "error: no optimizer is called 'sign_vote'\n"
        "  did you mean 'sign_votes'?\n"
        "  available: adamw, scaled_votes, sign_votes, split\n"
        "  not installed: bitnet_adamw (pip install arb-ternary-qat)\n"
        "  not installed: bop (pip install arb-ternary-qat)\n"
        "  not installed: dqt (pip install arb-ternary-qat)\n"
        "  not installed: gqc.* (pip install arb-ternary-gqc)\n"
        "  not installed: momentum_votes (pip install arb-ternary-votes)\n"
        "  not installed: signgsd (pip install arb-ternary-signgsd)"
    )
    assert error.exit_code == 2


def test_a_misspelt_name_that_is_near_an_announced_one_is_told_so(install_plugin):
    assert "did you mean 'signgsd'?\n" in problem("optimizer", "singsd").hint


def test_an_announced_component_whose_plugin_failed_says_so_and_not_to_install_it(install_plugin):
    install_plugin("signgsd", "raise RuntimeError('half written')")

    error = problem("optimizer", "signgsd")

    assert render(error) == (
        "error: optimizer 'signgsd' may come from plugin 'signgsd' (arb-ternary-signgsd 1.0), "
        "which failed to load: RuntimeError: half written\n"
        "  see: arb plugins show signgsd"
    )
    assert error.exit_code == 3


def test_an_announced_component_whose_plugin_is_blocked_says_so(install_plugin, monkeypatch):
    install_plugin("signgsd", OPTIMIZER)
    monkeypatch.setenv("ARB_PLUGINS_DISABLED", "signgsd")

    assert problem("optimizer", "signgsd").what == (
        "optimizer 'signgsd' may come from plugin 'signgsd' (arb-ternary-signgsd 1.0), "
        "which is blocked: ARB_PLUGINS_DISABLED lists it"
    )


def test_an_installed_plugin_that_does_not_have_the_announced_component_is_not_offered_for_installation(install_plugin):
    install_plugin("signgsd", OPTIMIZER)

    error = problem("optimizer", "signgsd")

    assert isinstance(error, UsageProblem)
    assert "pip install arb-ternary-signgsd" not in error.hint
    assert "available: adamw, scaled_votes, sign_votes, split, swift" in error.hint


def test_an_unheard_of_name_may_come_from_any_plugin_that_failed(install_plugin):
    install_plugin("one", "import a_module_that_is_not_there")
    install_plugin("two", OPTIMIZER.replace("(1, 0)", "(1, 9)"))

    error = problem("optimizer", "zigzag")

    assert render(error) == (
        "error: optimizer 'zigzag' may come from plugin 'one' (arb-ternary-one 1.0), which failed to load: "
        "ModuleNotFoundError: No module named 'a_module_that_is_not_there' or from plugin 'two' (arb-ternary-two 1.0), "
        "which is incompatible: it is written for plugin interface 1.9, this program provides 1.3; "
        "upgrade arb-ternary-core or install an older release of the plugin\n"
        "  see: arb plugins show one two"
    )
    assert error.exit_code == 3


def test_a_misspelling_stays_a_misspelling_when_some_plugin_failed(install_plugin):
    install_plugin("one", "import a_module_that_is_not_there")

    error = problem("optimizer", "sign_vote")

    assert isinstance(error, UsageProblem)
    assert (
        "not loaded: plugin 'one' (arb-ternary-one 1.0), which failed to load: "
        "ModuleNotFoundError: No module named 'a_module_that_is_not_there'"
    ) in error.hint


def test_blocked_plugins_are_mentioned_to_whoever_misses_a_name(install_plugin, monkeypatch):
    install_plugin("extra", OPTIMIZER)
    monkeypatch.setenv("ARB_PLUGINS", "")

    assert problem("optimizer", "swift").hint.endswith(
        "not loaded: plugin 'extra' (arb-ternary-extra 1.0), which is blocked: ARB_PLUGINS does not list it"
    )


@pytest.mark.parametrize("kind", NOUNS)
def test_every_kind_explains_an_unknown_name(install_plugin, kind):
    assert problem(kind, "qqqqqqqq").what == f"no {NOUNS[kind]} is called 'qqqqqqqq'"


def test_a_kind_that_does_not_exist_is_a_mistake_of_the_caller(install_plugin):
    with pytest.raises(ValueError, match="no kind of component is called 'optimiser'"):
        manager().registry.get("optimiser", "adamw")


def test_the_list_of_announced_components_names_only_kinds_that_exist_and_our_distributions():
    announced = tomllib.loads(Path(missing.__file__).with_name("known.toml").read_text())
    assert set(announced) <= set(NOUNS)
    for names in announced.values():
        assert all(distribution.startswith("arb-ternary-") for distribution in names.values())
    assert known_names("backend") == {
        "cpu": "arb-ternary-cpu",
        "tilelang": "arb-ternary-tilelang",
        "triton": "arb-ternary-triton",
    }
    assert known_distribution("optimizer", "signgsd") == "arb-ternary-signgsd"
    assert known_distribution("phase", "upcycle.blockwise") == "arb-ternary-upcycle"
    assert known_distribution("phase", "upcycle") is None
    assert known_distribution("optimizer", "adamw") is None


def test_what_is_installed_is_not_listed_as_missing(install_plugin):
    install_plugin("signgsd", OPTIMIZER, distribution="arb_ternary_signgsd")

    missing_names = not_installed("optimizer", manager().records)
    assert "signgsd" not in missing_names
    assert missing_names["gqc.*"] == "arb-ternary-gqc"


def test_errors_of_a_registry_are_of_the_class_that_has_the_right_exit_code(install_plugin):
    assert isinstance(problem("backend", "triton"), EnvironmentProblem)
    assert isinstance(problem("backend", "torhc"), UsageProblem)
