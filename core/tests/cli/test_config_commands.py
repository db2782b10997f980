"""``arb config``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from jsonschema import Draft202012Validator

from arb_ternary.cli.config_commands import config
from arb_ternary.cli.main import main
from arb_ternary.config.starter import TEMPLATES
from arb_ternary.config.yaml_document import read_yaml
from arb_ternary.errors import ConfigError


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ARB_TERNARY_BACKEND", raising=False)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(config, arguments)


def output(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def new(*arguments: str) -> Path:
    output("new", *arguments)
    return Path("arb.yaml")


def test_new_writes_a_starter_config_that_validates() -> None:
    assert output("new") == "arb.yaml: written; run it with: arb train arb.yaml\n"
    assert output("validate", "arb.yaml") == "arb.yaml: valid: decoder on shakespeare, scaled_votes, phases standard\n"


def test_new_takes_a_path_and_a_template() -> None:
    assert (
        output("new", "--template", "float", "mine.yml", "--json")
        == '{\n  "path": "mine.yml",\n  "template": "float"\n}\n'
    )
    assert read_yaml(Path("mine.yml").read_text(), "mine.yml").data["optimizer"]["name"] == "adamw"


def test_new_replaces_a_file_only_when_forced(capsys: pytest.CaptureFixture[str]) -> None:
    Path("arb.yaml").write_text("precious")
    assert main(["config", "new"]) == 2
    assert capsys.readouterr().err == "error: arb.yaml: the file exists\n  Use --force to replace it.\n"
    assert Path("arb.yaml").read_text() == "precious"
    new("--force")
    assert Path("arb.yaml").read_text().startswith(f"# {TEMPLATES['small'].summary}")


def test_new_writes_yaml_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "new", "arb.toml"]) == 2
    assert capsys.readouterr().err == "error: arb.toml: a starter config is YAML\n  arb config new arb.yaml\n"


def test_new_into_a_folder_that_is_not_there_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "new", "no/such/arb.yaml"]) == 2
    assert capsys.readouterr().err == "error: no/such/arb.yaml: cannot be written: No such file or directory\n"


def test_new_explains_an_unknown_template(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "new", "--template", "smal"]) == 2
    assert capsys.readouterr().err.startswith("error: no template is called 'smal'; did you mean 'small'?\n  small: ")
    assert not Path("arb.yaml").exists()


def test_new_lists_the_templates() -> None:
    lines = output("new", "--list").splitlines()
    assert [line.split()[0] for line in lines] == ["template", *TEMPLATES]
    listed = json.loads(output("new", "--list", "--json"))
    assert listed == [{"name": name, "summary": each.summary} for name, each in TEMPLATES.items()]
    assert not Path("arb.yaml").exists()


def test_validate_prints_every_fault_and_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    path = new()
    path.write_text(path.read_text().replace("  steps: 1000", "  stepz: 1000"))
    line = path.read_text().splitlines().index(next(x for x in path.read_text().splitlines() if "stepz" in x)) + 1
    assert main(["config", "validate", "arb.yaml", "-o", "sed=1"]) == 2
    assert capsys.readouterr().err == (
        "error: arb.yaml: 2 faults\n"
        f"arb.yaml:{line}: phases[0].stepz: unknown key; did you mean 'steps'?\n"
        "-o sed=1: sed: unknown key; did you mean 'seed'?\n"
    )


def test_validate_prints_faults_as_json_with_the_same_exit_code() -> None:
    new()
    result = run("validate", "arb.yaml", "--json", "-o", "sed=1")
    assert result.exit_code == 2
    assert json.loads(result.output) == {
        "path": "arb.yaml",
        "valid": False,
        "faults": [
            {
                "where": "-o sed=1",
                "path": "sed",
                "message": "unknown key; did you mean 'seed'?",
                "hint": "",
            }
        ],
    }
    assert json.loads(output("validate", "arb.yaml", "--json")) == {"path": "arb.yaml", "valid": True, "faults": []}


def test_validate_exits_with_3_when_only_something_is_not_installed() -> None:
    new()
    result = run("validate", "arb.yaml", "--json", "-o", "requires=[no-such-thing]")
    assert result.exit_code == 3
    (fault,) = json.loads(result.output)["faults"]
    assert fault["message"] == "no-such-thing is not installed"
    assert fault["hint"] == "pip install 'no-such-thing'"


def test_validate_of_an_absent_file_exits_with_2() -> None:
    result = run("validate", "absent.yaml")
    assert isinstance(result.exception, ConfigError)
    result = run("validate", "absent.yaml", "--json")
    assert result.exit_code == 2
    assert json.loads(result.output)["faults"][0]["message"] == "absent.yaml: no such file"


def test_show_prints_the_config_in_force_as_yaml_and_as_json() -> None:
    new()
    shown = read_yaml(output("show", "arb.yaml", "-o", "seed=7"), "shown").data
    assert shown["seed"] == 7
    assert shown["checkpoint"] == {"every": 200, "keep": 3}
    assert "given" not in shown["model"]
    assert json.loads(output("show", "arb.yaml", "-o", "seed=7", "--json")) == shown


def test_show_origin_says_where_each_value_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARB_TERNARY_BACKEND", "torch")
    text = Path(new()).read_text().splitlines()
    line = next(number for number, each in enumerate(text, 1) if each.startswith("  width: 128"))
    rows = {
        row["path"]: (row["value"], row["origin"])
        for row in json.loads(output("show", "arb.yaml", "--origin", "--json", "-o", "phases.0.steps=300"))
    }
    assert rows["model.width"] == (128, f"arb.yaml:{line}")
    assert rows["phases[0].steps"] == (300, "-o phases.0.steps=300")
    assert rows["seed"] == (0, "default")
    assert rows["backend"] == ("torch", "ARB_TERNARY_BACKEND")
    plain = output("show", "arb.yaml", "--origin").splitlines()
    assert plain[0].split() == ["setting", "value", "origin"]
    assert next(row for row in plain if row.startswith("model.width")).split() == [
        "model.width",
        "128",
        f"arb.yaml:{line}",
    ]


def test_schema_describes_every_installed_component() -> None:
    schema: Any = json.loads(output("schema"))
    Draft202012Validator.check_schema(schema)
    assert schema["$defs"]["optimizer.adamw"]["properties"]["name"] == {"const": "adamw"}
    compact = output("schema", "--json")
    assert compact.count("\n") == 1
    assert json.loads(compact) == schema
    new()
    data = read_yaml(Path("arb.yaml").read_text(), "arb.yaml").data
    assert Draft202012Validator(schema).is_valid(data)
    assert not Draft202012Validator(schema).is_valid({**data, "sed": 1})
