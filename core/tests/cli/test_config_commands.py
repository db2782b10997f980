"""``arb config`` on kinds of config files of fake plugins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from jsonschema import Draft202012Validator

from arb_ternary.cli.groups import config
from arb_ternary.cli.main import main
from arb_ternary.config.yaml_document import read_yaml
from arb_ternary.errors import ConfigError, UsageProblem

#: A plugin with the kind of config file NAME, whose top level is `Study`, two optimizers and two
#: templates.
PLUGIN = """
from attrs import evolve, frozen

from arb_ternary import hookimpl
from arb_ternary.config.choice import OptimizerChoice
from arb_ternary.config.loading import load_as
from arb_ternary.config.options import non_negative, option, positive
from arb_ternary.specs import DocumentSpec, OptimizerSpec, StarterSpec

ARB_API_VERSION = (1, 0)

SHORT = {"optimizer": {"name": "slow"}, "steps": 10}
LONG = {"optimizer": {"name": "quick", "lr": 0.5}, "steps": 1000}


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
    notes = ["that takes long"] if loaded.config.steps >= 1000 else []
    return evolve(loaded, summary=f"{loaded.config.steps} steps", notes=notes)


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


@hookimpl
def arb_register_starters():
    return [
        StarterSpec(name="long", target="fake_NAME:LONG", document="NAME", summary="A long one."),
        StarterSpec(name="short", target="fake_NAME:SHORT", document="NAME",
            summary="A short one.", priority=20),
    ]
"""


#: A plugin that brings one more kind of config file, and nothing else.
OTHER = """
from attrs import frozen

from arb_ternary import hookimpl
from arb_ternary.config.loading import load_as
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


def new(*arguments: str) -> Path:
    output("new", *arguments)
    return Path("arb.yaml")


# --- new


@pytest.mark.usefixtures("study")
def test_new_writes_a_starter_config_that_validates() -> None:
    assert output("new") == "arb.yaml: written; run it with: arb do arb.yaml\n"
    assert output("validate", "--document", "study", "arb.yaml") == "arb.yaml: valid: 10 steps\n"


@pytest.mark.usefixtures("study")
def test_new_is_short_unless_every_option_is_asked_for() -> None:
    short = new().read_text()
    assert short == new("--short", "--force").read_text()
    assert "# seed:" not in short
    assert "`arb config new --full`" in short
    full = new("--full", "--force").read_text()
    assert "# seed: 0  " in full
    assert read_yaml(full, "full").data == read_yaml(short, "short").data


@pytest.mark.usefixtures("study")
def test_new_takes_a_path_and_a_template() -> None:
    written = output("new", "--template", "long", "mine.yml", "--json")
    assert written == '{\n  "path": "mine.yml",\n  "template": "long"\n}\n'
    assert read_yaml(Path("mine.yml").read_text(), "mine.yml").data["optimizer"]["name"] == "quick"


@pytest.mark.usefixtures("study")
def test_new_replaces_a_file_only_when_forced(capsys: pytest.CaptureFixture[str]) -> None:
    Path("arb.yaml").write_text("precious")
    assert main(["config", "new"]) == 2
    assert (
        capsys.readouterr().err
        == "error: arb.yaml: the file exists\n  Use --force to replace it.\n"
    )
    assert Path("arb.yaml").read_text() == "precious"
    new("--force")
    assert Path("arb.yaml").read_text().startswith("# A short one.")


@pytest.mark.usefixtures("study")
def test_new_writes_yaml_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "new", "arb.toml"]) == 2
    assert (
        capsys.readouterr().err
        == "error: arb.toml: a starter config is YAML\n  arb config new arb.yaml\n"
    )


@pytest.mark.usefixtures("study")
def test_new_into_a_folder_that_is_not_there_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "new", "no/such/arb.yaml"]) == 2
    assert (
        capsys.readouterr().err
        == "error: no/such/arb.yaml: cannot be written: No such file or directory\n"
    )


@pytest.mark.usefixtures("study")
def test_a_schema_is_written_for_editors() -> None:
    assert main(["config", "new", "mine.yaml", "--schema"]) == 0
    first, rest = Path("mine.yaml").read_text(encoding="utf-8").split("\n", 1)
    assert first == "# yaml-language-server: $schema=mine.schema.json"
    schema = Path("mine.schema.json").read_text(encoding="utf-8")
    assert json.loads(schema) == json.loads(output("schema", "--document", "study"))
    assert main(["config", "new", "plain.yaml"]) == 0
    assert Path("plain.yaml").read_text(encoding="utf-8") == rest

    Path("mine.yaml").unlink()
    assert main(["config", "new", "mine.yaml", "--schema"]) == 2
    assert not Path("mine.yaml").exists()
    assert main(["config", "new", "mine.yaml", "--schema", "--force"]) == 0


@pytest.mark.usefixtures("study")
def test_new_explains_an_unknown_template(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "new", "--template", "shrt"]) == 2
    assert capsys.readouterr().err == (
        "error: no template is called 'shrt'\n  did you mean 'short'?\n  available: long, short\n"
    )
    assert not Path("arb.yaml").exists()


@pytest.mark.usefixtures("study")
def test_new_lists_the_templates_the_default_first() -> None:
    assert [line.split()[0] for line in output("new", "--list").splitlines()] == [
        "template",
        "short",
        "long",
    ]
    assert json.loads(output("new", "--list", "--json")) == [
        {"name": "short", "summary": "A short one."},
        {"name": "long", "summary": "A long one."},
    ]
    assert not Path("arb.yaml").exists()


# --- show


@pytest.mark.usefixtures("study")
def test_show_prints_the_config_in_force_as_yaml_and_as_json() -> None:
    Path("arb.yaml").write_text("steps: 1000\noptimizer: {name: quick, lr: 0.5}\n")
    shown = read_yaml(
        output("show", "--document", "study", "arb.yaml", "-o", "seed=7"), "shown"
    ).data
    assert shown == {"seed": 7, "steps": 1000, "optimizer": {"name": "quick", "lr": 0.5}}
    assert (
        json.loads(output("show", "--document", "study", "arb.yaml", "-o", "seed=7", "--json"))
        == shown
    )


@pytest.mark.usefixtures("study")
def test_show_origin_says_where_each_value_comes_from() -> None:
    Path("arb.yaml").write_text("steps: 3\noptimizer:\n  name: quick\n  lr: 0.25\n")
    rows = {
        row["path"]: (row["value"], row["origin"])
        for row in json.loads(
            output(
                "show", "--document", "study", "arb.yaml", "--origin", "--json", "-o", "steps=300"
            )
        )
    }
    assert rows == {
        "seed": (0, "default"),
        "steps": (300, "-o steps=300"),
        "optimizer.name": ("quick", "arb.yaml:3"),
        "optimizer.lr": (0.25, "arb.yaml:4"),
    }
    plain = output("show", "--document", "study", "arb.yaml", "--origin").splitlines()
    assert plain[0].split() == ["setting", "value", "origin"]
    assert next(row for row in plain if row.startswith("optimizer.lr")).split() == [
        "optimizer.lr",
        "0.25",
        "arb.yaml:4",
    ]


# --- schema


@pytest.mark.usefixtures("study")
def test_schema_describes_every_installed_component() -> None:
    schema: Any = json.loads(output("schema", "--document", "study"))
    Draft202012Validator.check_schema(schema)
    assert schema["$defs"]["optimizer.quick"]["properties"]["name"] == {"const": "quick"}
    compact = output("schema", "--document", "study", "--json")
    assert compact.count("\n") == 1
    assert json.loads(compact) == schema
    data = read_yaml(new().read_text(), "arb.yaml").data
    assert Draft202012Validator(schema).is_valid(data)
    assert not Draft202012Validator(schema).is_valid({**data, "sed": 1})


@pytest.mark.parametrize("arguments", [["new"], ["new", "--list"]])
@pytest.mark.usefixtures("install_plugin")
def test_without_a_template_new_says_what_to_install(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", *arguments]) == 3
    assert capsys.readouterr().err == "error: no template is installed\n  pip install arb-ternary\n"


@pytest.mark.parametrize("arguments", [["new"], ["new", "--list"]])
def test_without_a_template_new_names_a_fault_before_a_package(
    arguments: list[str], install_plugin: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    install_plugin("broken", "import a_module_that_is_not_there")
    assert main(["config", *arguments]) == 3
    last = "error: no template is installed\n  see: arb plugins list\n"
    assert capsys.readouterr().err.endswith(last)


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
        "notes": [],
    }


@pytest.mark.usefixtures("study")
def test_validate_shows_notes() -> None:
    Path("arb.yaml").write_text("steps: 1000\noptimizer: slow\n")
    assert output("validate", "arb.yaml") == (
        "arb.yaml: valid: 1000 steps\nnote: that takes long\n"
    )
    assert json.loads(output("validate", "arb.yaml", "--json"))["notes"] == ["that takes long"]


def test_validate_exits_with_3_if_something_is_not_installed(install_plugin: Any) -> None:
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


@pytest.mark.parametrize(
    ("backend", "exit_code", "said"),
    [
        ("triton", 3, "arb.yaml:2: backend: backend 'triton' is not installed"),
        ("troch", 2, "arb.yaml:2: backend: no backend is called 'troch'"),
        ("triton,troch", 2, "arb.yaml:2: backend: no backend is called 'troch'"),
        ("triton,torch", 0, ""),
        ("Torch", 0, ""),
        ("auto", 0, ""),
    ],
)
def test_validate_finds_a_backend_that_is_not_installed(
    backend: str,
    exit_code: int,
    said: str,
    install_plugin: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    install_plugin("other", OTHER.replace("size: int = option(1,", 'backend: str = option("auto",'))
    Path("arb.yaml").write_text(f"# kernels\nbackend: {backend}\n")
    assert main(["config", "validate", "--document", "other", "arb.yaml"]) == exit_code
    assert said in capsys.readouterr().err


@pytest.mark.usefixtures("study")
def test_validate_of_an_absent_file_exits_with_2() -> None:
    result = run("validate", "absent.yaml")
    assert isinstance(result.exception, ConfigError)
    result = run("validate", "absent.yaml", "--json")
    assert result.exit_code == 2
    assert json.loads(result.output)["faults"][0]["message"] == "absent.yaml: no such file"


def test_a_document_that_fails_to_import_is_explained(
    install_plugin: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = PLUGIN.replace("NAME", "study").replace(
        '"fake_study:load", config="fake_study:Study"', '"gone:load", config="gone:X"'
    )
    install_plugin("study", lost)
    for arguments in (
        ["validate", "arb.yaml"],
        ["schema"],
        ["show", "arb.yaml"],
        ["new"],
    ):
        assert main(["config", *arguments]) == 3
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


def test_one_of_several_unusual_kinds_has_to_be_named(install_plugin: Any) -> None:
    install_plugin("other", OTHER)
    install_plugin("study", PLUGIN.replace("NAME", "study"))
    result = run("validate", "arb.yaml")
    assert isinstance(result.exception, UsageProblem)
    assert result.exception.what == "--document: name the kind of config file: other, study"
