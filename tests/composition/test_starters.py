"""Starter configs name components of several distributions; each is valid."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from jsonschema import Draft202012Validator

from arb_ternary.cli.groups import config
from arb_ternary.cli.main import main
from arb_ternary.cli.options import document_called
from arb_ternary.config.fields import leaves, to_plain
from arb_ternary.config.schema import json_schema
from arb_ternary.config.starter import starter_config
from arb_ternary.config.yaml_document import read_yaml
from arb_ternary.plugins.manager import manager
from arb_ternary.specs import resolve
from arb_ternary_train.config import RunConfig
from arb_ternary_train.loading import structure_run

REGISTRY = manager().registry
STARTERS = REGISTRY.names("starter")


def written(name: str, *, full: bool = True) -> str:
    starter: Any = REGISTRY.get("starter", name).spec
    return starter_config(starter, document_called(starter.document), REGISTRY, full=full)


def run(text: str) -> RunConfig:
    return structure_run(read_yaml(text, "arb.yaml"), REGISTRY).config


def test_starters_are_small_mixed_exact_and_float() -> None:
    assert {"small", "mixed", "exact", "float"} <= set(STARTERS)


@pytest.mark.parametrize("name", STARTERS)
def test_a_starter_config_is_valid_and_keeps_its_settings(name: str) -> None:
    spec = REGISTRY.get("starter", name).spec
    found = dict(leaves(to_plain(run(written(name)), given=False)))
    for path, value in leaves(resolve(spec.target)):
        assert found[path] == value
    assert written(name).startswith(f"# {spec.summary}\n")


@pytest.mark.parametrize("name", STARTERS)
def test_a_short_starter_config_is_the_same_in_a_line_per_setting(name: str) -> None:
    short = written(name, full=False)
    assert to_plain(run(short)) == to_plain(run(written(name)))
    _, _, settings = short.partition("\n\n")
    assert all(re.match(r" *(- )?\w+:", line) for line in settings.splitlines())
    assert len(settings.splitlines()) <= 40


@pytest.mark.parametrize("name", ["small", "mixed", "exact", "float"])
def test_a_text_starter_trains_and_leaves_for_other_programs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["config", "new", "--template", name]) == 0
    short = ["phases.0.steps=2", "phases.0.batch_size=1", "phases.0.eval_every=0", "checks=[]"]
    overrides = [word for setting in short for word in ("-o", setting)]
    assert main(["train", "arb.yaml", *overrides, "--run-dir", "run"]) == 0
    assert main(["export", "run", "out", "--format", "hf"]) == 0
    assert main(["export", "run", "out.gguf", "--format", "gguf"]) == 0
    assert json.loads(Path("out/config.json").read_text())["model_type"] == "qwen3"
    assert Path("out.gguf").read_bytes()[:4] == b"GGUF"


@pytest.mark.parametrize("name", STARTERS)
def test_schema_accepts_starters_but_no_misspelt_key(name: str) -> None:
    data = read_yaml(written(name), "arb.yaml").data
    validator = Draft202012Validator(json_schema(RunConfig, REGISTRY))
    assert validator.is_valid(data)
    assert not validator.is_valid({**data, "sed": 1})
    assert not validator.is_valid({**data, "model": {**data["model"], "widht": 1}})


@pytest.mark.parametrize("name", STARTERS)
def test_uncommenting_every_option_changes_nothing(name: str) -> None:
    text = written(name)
    uncommented = re.sub(r"^( *)# (\w+: )", r"\1\2", text, flags=re.MULTILINE)
    assert uncommented != text
    before = run(text)
    if before.exact:
        # The model's own defaults contradict `exact` there, so they are written as comments.
        uncommented = re.sub(
            r"^ *(activations|gradients): .*$", "", uncommented, flags=re.MULTILINE
        )
    assert to_plain(run(uncommented), given=False) == to_plain(before, given=False)


def test_the_commands_write_the_small_one_and_say_what_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    new = CliRunner().invoke(config, ["new"])
    assert new.output == "arb.yaml: written; run it with: arb train arb.yaml\n"
    assert Path("arb.yaml").read_text().startswith("# A small pure-ternary decoder on Shakespeare")
    validate = CliRunner().invoke(config, ["validate", "arb.yaml"])
    assert (
        validate.output
        == "arb.yaml: valid: decoder on shakespeare, scaled_votes, phases standard\n"
    )
