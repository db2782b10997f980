"""``arb config``, on kinds of config files that fake plugins bring."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from arb_ternary.cli.groups import config
from arb_ternary.cli.main import main
from arb_ternary.errors import ConfigError, UsageProblem

#: A loader of the simplest kind: the values of the file, then KEY=VALUE from the command line.
LOADER = """
from attrs import evolve

from arb_ternary.config.errors import Origin
from arb_ternary.config.fields import leaves, to_plain
from arb_ternary.config.structure import structure
from arb_ternary.config.yaml_document import LoadedConfig, parse_yaml_value, read_yaml
from arb_ternary.errors import ConfigError
from arb_ternary.plugins.manager import manager


def load_as(cls, path, overrides):
    if not path.exists():
        raise ConfigError(f"{path}: no such file")
    document = read_yaml(path.read_text(), str(path))
    origins = dict(document.origins)
    for text in overrides:
        key, _, value = text.partition("=")
        document.data[key] = parse_yaml_value(value)
        origins[key,] = Origin("override", f"-o {text}")
    config = structure(cls, evolve(document, origins=origins), manager().registry)
    values = leaves(to_plain(config, given=False))
    return LoadedConfig(config, {where: origins.get(where, Origin("default", "default")) for where,
        _ in values})
"""

#: A plugin with the kind of config file NAME, whose top level is `Study`, and two optimizers.
PLUGIN = (
    LOADER
    + """
from attrs import evolve, frozen

from arb_ternary import hookimpl
from arb_ternary.config.choice import OptimizerChoice
from arb_ternary.config.options import non_negative, option, positive
from arb_ternary.specs import DocumentSpec, OptimizerSpec

ARB_API_VERSION = (1, 0)


@frozen(kw_only=True)
class Quick:
    lr: float = option(0.1, "rate", validator=positive)


@frozen(kw_only=True)
class Study:
    seed: int = option(0, "seed of all randomness", validator=non_negative)
    steps: int = option(help="how long")
    optimizer: OptimizerChoice = option(help="how it learns")


def load(path, overrides):
    loaded = load_as(Study, path, overrides)
    return evolve(loaded, summary=f"{loaded.config.steps} steps")


@hookimpl
def arb_register_optimizers():
    accepts = frozenset({"float"})
    slow = OptimizerSpec(name="slow", target="fake_NAME:load", accepts=accepts)
    return [slow, OptimizerSpec(name="quick", target="fake_NAME:load", config="fake_NAME:Quick",
        accepts=accepts)]


@hookimpl
def arb_register_documents():
    return [DocumentSpec(name="NAME", target="fake_NAME:load", config="fake_NAME:Study",
        command="arb do")]
"""
)

#: A plugin that brings one more kind of config file, and nothing else.
OTHER = (
    LOADER
    + """
from attrs import frozen

from arb_ternary import hookimpl
from arb_ternary.config.options import option
from arb_ternary.specs import DocumentSpec

ARB_API_VERSION = (1, 0)


@frozen
class Other:
    size: int = option(1, "a size")


def load(path, overrides):
    return load_as(Other, path, overrides)


@hookimpl
def arb_register_documents():
    return [DocumentSpec(name="other", target="fake_other:load", config="fake_other:Other",
        command="arb other")]
"""
)


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)


@pytest.fixture
def study(install_plugin: Any) -> None:
    install_plugin("study", PLUGIN.replace("NAME", "study"))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(config, arguments)


def output(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


# --- validate


@pytest.mark.usefixtures("study")
def test_validate_prints_every_fault_and_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    Path("arb.yaml").write_text("stepz: 1\nsteps: 3\noptimizer: slow\n")
    assert main(["config", "validate", "arb.yaml", "-o", "sed=1"]) == 2
    assert capsys.readouterr().err == (
        "error: arb.yaml: 2 faults\n"
        "arb.yaml:1: stepz: unknown key; did you mean 'steps'?\n"
        "-o sed=1: sed: unknown key; did you mean 'seed'?\n"
    )


@pytest.mark.usefixtures("study")
def test_validate_prints_faults_as_json_with_the_same_exit_code() -> None:
    Path("arb.yaml").write_text("steps: 10\noptimizer: slow\n")
    result = run("validate", "arb.yaml", "--json", "-o", "sed=1")
    assert result.exit_code == 2
    fault = {
        "where": "-o sed=1",
        "path": "sed",
        "message": "unknown key; did you mean 'seed'?",
        "hint": "",
    }
    assert json.loads(result.output) == {"path": "arb.yaml", "valid": False, "faults": [fault]}
    assert json.loads(output("validate", "arb.yaml", "--json")) == {
        "path": "arb.yaml",
        "valid": True,
        "faults": [],
    }


def test_validate_exits_with_3_when_only_something_is_not_installed(install_plugin: Any) -> None:
    lost = PLUGIN.replace("NAME", "study").replace(
        'config="fake_study:Quick"', 'config="no_such_module:Quick"'
    )
    install_plugin("study", lost)
    Path("arb.yaml").write_text("steps: 3\noptimizer: quick\n")
    result = run("validate", "arb.yaml", "--json")
    assert result.exit_code == 3
    (fault,) = json.loads(result.output)["faults"]
    assert (fault["where"], fault["path"]) == ("arb.yaml:2", "optimizer")
    assert "no_such_module" in fault["message"]


@pytest.mark.usefixtures("study")
def test_validate_of_an_absent_file_exits_with_2() -> None:
    result = run("validate", "absent.yaml")
    assert isinstance(result.exception, ConfigError)
    result = run("validate", "absent.yaml", "--json")
    assert result.exit_code == 2
    assert json.loads(result.output)["faults"][0]["message"] == "absent.yaml: no such file"


def test_a_kind_of_config_file_that_cannot_be_imported_is_an_environment_problem(
    install_plugin: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = PLUGIN.replace("NAME", "study").replace(
        '"fake_study:load", config="fake_study:Study"', '"gone:load", config="gone:X"'
    )
    install_plugin("study", lost)
    assert main(["config", "validate", "arb.yaml"]) == 3
    assert "document 'study': gone:" in capsys.readouterr().err


# --- kinds of config files


@pytest.mark.usefixtures("install_plugin")
def test_the_core_alone_says_what_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "validate", "arb.yaml"]) == 3
    assert (
        capsys.readouterr().err
        == "error: no kind of config file is installed\n  pip install arb-ternary\n"
    )


def test_of_several_kinds_the_one_called_run_is_meant(install_plugin: Any) -> None:
    install_plugin("other", OTHER)
    install_plugin("run", PLUGIN.replace("NAME", "run"))
    Path("arb.yaml").write_text("steps: 3\noptimizer: slow\n")
    Path("other.yaml").write_text("size: 2\n")
    assert output("validate", "arb.yaml") == "arb.yaml: valid: 3 steps\n"
    assert output("validate", "--document", "other", "other.yaml") == "other.yaml: valid\n"
    result = run("validate", "--document", "othr", "other.yaml")
    assert isinstance(result.exception, UsageProblem)
    assert "did you mean 'other'?" in result.exception.hint


def test_of_several_kinds_without_a_usual_one_one_has_to_be_named(install_plugin: Any) -> None:
    install_plugin("other", OTHER)
    install_plugin("study", PLUGIN.replace("NAME", "study"))
    result = run("validate", "arb.yaml")
    assert isinstance(result.exception, UsageProblem)
    assert result.exception.what == "--document: name the kind of config file: other, study"
