"""The errors for names that are missing."""

from __future__ import annotations

import shlex
import shutil

import pytest

from arb_ternary.errors import ArbError, EnvironmentProblem, UsageProblem, render
from arb_ternary.plugins.discovery import install_command
from arb_ternary.plugins.manager import manager
from arb_ternary.specs import KINDS

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


def test_a_missing_optimizer_names_the_install_command(install_plugin):
    error = problem("optimizer", "signgsd")

    assert (
        render(error)
        == "error: optimizer 'signgsd' is not installed\n  pip install arb-ternary-signgsd"
    )
    assert error.exit_code == 3


def test_a_missing_member_names_the_distribution_of_its_family(
    install_plugin,
):
    error = problem("optimizer", "gqc.gnts")

    assert (
        render(error)
        == "error: optimizer 'gqc.gnts' is not installed\n  pip install arb-ternary-gqc"
    )
    assert error.exit_code == 3


def test_a_misspelt_name_gets_the_nearest_and_all_names(install_plugin):
    install_plugin("extra", OPTIMIZER)

    error = problem("optimizer", "swfit")

    assert render(error) == (
        "error: no optimizer is called 'swfit'\n"
        "  did you mean 'swift'?\n"
        "  available: swift\n"
        "  not installed: adamw (pip install arb-ternary-train)\n"
        "  not installed: gqc (pip install arb-ternary-gqc)\n"
        "  not installed: signgsd (pip install arb-ternary-signgsd)"
    )
    assert error.exit_code == 2


def test_a_misspelt_name_gets_the_nearest_announced_one(install_plugin):
    assert "did you mean 'signgsd'?\n" in problem("optimizer", "singsd").hint


def test_a_component_of_a_failed_plugin_says_so(install_plugin):
    install_plugin("signgsd", "raise RuntimeError('half written')")

    error = problem("optimizer", "signgsd")

    assert render(error) == (
        "error: optimizer 'signgsd' may come from plugin 'signgsd' (arb-ternary-signgsd 1.0), "
        "which failed to load: RuntimeError: half written\n"
        "  see: arb plugins show signgsd"
    )
    assert error.exit_code == 3


def test_a_component_of_a_disabled_plugin_says_so(install_plugin, monkeypatch):
    install_plugin("signgsd", OPTIMIZER)
    monkeypatch.setenv("ARB_PLUGINS_DISABLED", "signgsd")

    assert problem("optimizer", "signgsd").what == (
        "optimizer 'signgsd' may come from plugin 'signgsd' (arb-ternary-signgsd 1.0), "
        "which is disabled: ARB_PLUGINS_DISABLED lists it"
    )


def test_installed_plugin_without_the_component_is_not_suggested(
    install_plugin,
):
    install_plugin("signgsd", OPTIMIZER)

    error = problem("optimizer", "signgsd")

    assert isinstance(error, UsageProblem)
    assert "pip install arb-ternary-signgsd" not in error.hint
    assert "available: swift\n" in error.hint


def test_an_unheard_of_name_may_come_from_any_plugin_that_failed(install_plugin):
    install_plugin("one", "import a_module_that_is_not_there")
    install_plugin("two", OPTIMIZER.replace("(1, 0)", "(1, 9)"))

    error = problem("optimizer", "zigzag")

    assert render(error) == (
        "error: optimizer 'zigzag' may come from plugin 'one' (arb-ternary-one 1.0), which failed "
        "to load: "
        "ModuleNotFoundError: No module named 'a_module_that_is_not_there' or from plugin 'two' "
        "(arb-ternary-two 1.0), "
        "which failed to load: it is written for plugin interface 1.9, this program provides 1.0; "
        "upgrade arb-ternary-core or install an older release of the plugin\n"
        "  see: arb plugins show one two"
    )
    assert error.exit_code == 3


def test_a_misspelt_name_is_one_even_if_a_plugin_failed(install_plugin):
    install_plugin("one", "import a_module_that_is_not_there")

    error = problem("optimizer", "singsd")

    assert isinstance(error, UsageProblem)
    assert (
        "not loaded: plugin 'one' (arb-ternary-one 1.0), which failed to load: "
        "ModuleNotFoundError: No module named 'a_module_that_is_not_there'\n"
        "did you mean 'signgsd'?\n"
    ) in error.hint


def test_many_plugins_that_failed_are_counted(install_plugin):
    for name in ("one", "two", "three"):
        install_plugin(name, "import a_module_that_is_not_there")

    assert render(problem("optimizer", "zigzag")) == (
        "error: optimizer 'zigzag' may come from one of 3 plugins that are not loaded\n"
        "  see: arb plugins show one three two"
    )


#: The metadata that pip writes for ``pip install /clones/arb`` (PEP 610 and core metadata).
FROM_A_FOLDER = {
    "direct_url.json": '{"dir_info": {}, "url": "file:///clones/our%20arb"}',
    "METADATA": "Metadata-Version: 2.1\nName: arb-ternary\nVersion: 0.1.0\n"
    "Requires-Dist: arb-ternary-train @ file:///clones/our%20arb/plugins/arb-ternary-train/.\n"
    "Provides-Extra: gqc\n"
    "Provides-Extra: tokenizers\n",
}


@pytest.mark.parametrize(
    ("requirement", "command"),
    [
        ("arb-ternary-gqc", "pip install '/clones/our arb[gqc]'"),
        ("arb-ternary-gqc>=0.1", "pip install '/clones/our arb[gqc]'"),
        ("arb-ternary-text[tokenizers]", "pip install '/clones/our arb[tokenizers]'"),
        ("arb-ternary-train", "pip install '/clones/our arb'"),
        ("gqc", "pip install gqc"),
        ("arb-ternary-elsewhere", "pip install arb-ternary-elsewhere"),
    ],
)
def test_parts_are_installed_from_the_folder_of_the_metapackage(
    install_plugin, tmp_path, requirement, command
):
    assert install_command(requirement) == f"pip install {shlex.quote(requirement)}"
    for name, text in FROM_A_FOLDER.items():
        (tmp_path / "root" / "arb_ternary-0.1.0.dist-info" / name).write_text(text)

    assert install_command(requirement) == command


def test_a_missing_optimizer_names_the_folder_of_the_metapackage(install_plugin, tmp_path):
    for name, text in FROM_A_FOLDER.items():
        (tmp_path / "root" / "arb_ternary-0.1.0.dist-info" / name).write_text(text)

    assert problem("optimizer", "gqc").hint == "pip install '/clones/our arb[gqc]'"


def test_disabled_plugins_are_mentioned_for_a_missing_name(install_plugin, monkeypatch):
    install_plugin("extra", OPTIMIZER)
    monkeypatch.setenv("ARB_PLUGINS", "")

    assert problem("optimizer", "swift").hint.endswith(
        "not loaded: plugin 'extra' (arb-ternary-extra 1.0), which is disabled: ARB_PLUGINS does "
        "not list it"
    )


@pytest.mark.parametrize("spec", KINDS)
def test_every_kind_explains_an_unknown_name(install_plugin, spec):
    assert problem(spec.kind, "qqqqqqqq").what == f"no {spec.noun} is called 'qqqqqqqq'"


def test_the_core_alone_says_what_brings_the_usual_parts(install_plugin, tmp_path):
    shutil.rmtree(tmp_path / "root")

    error = problem("command", "train")

    assert error.what == "no command is called 'train'"
    assert error.hint.splitlines()[-1] == "pip install arb-ternary brings the program's usual parts"
    assert error.exit_code == 2


def test_a_family_is_known_by_its_name(install_plugin):
    assert problem("optimizer", "gqc").hint == "pip install arb-ternary-gqc"
    assert isinstance(problem("optimizer", "gqcx"), UsageProblem)


def test_what_is_installed_is_not_listed_as_missing(install_plugin):
    install_plugin("signgsd", OPTIMIZER, distribution="arb_ternary_signgsd")

    missing_names = manager().registry.not_installed("optimizer")
    assert "signgsd" not in missing_names
    assert missing_names["gqc"] == "arb-ternary-gqc"


def test_errors_of_the_registry_have_the_right_class(install_plugin):
    assert isinstance(problem("backend", "triton"), EnvironmentProblem)
    assert isinstance(problem("backend", "torhc"), UsageProblem)
