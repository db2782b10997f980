"""Whole files: the text of errors and the origins of values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import arb_config_test_components as components
import pytest

from arb_ternary.config.loading import load_as, read_document
from arb_ternary.config.overrides import parse_path
from arb_ternary.errors import ConfigError, EnvironmentProblem

MINIMAL = """\
data: letters
model: {name: stack, width: 32}
optimizer: adam
phases:
  - {name: standard, steps: 10}
"""


@pytest.fixture
def load(in_tmp: Path, registry: Any) -> Any:
    def run(text: str, *overrides: str) -> Any:
        Path("demo.yaml").write_text(text, encoding="utf-8")
        return load_as(components.Study, "demo.yaml", overrides, registry=registry)

    return run


def test_a_minimal_config_has_defaults_for_the_rest(load: Any) -> None:
    config: components.Study = load(MINIMAL).config
    assert (config.name, config.seed, config.masking.name) == ("study", 0, "shift")
    assert config.saving == components.Saving(every=200, keep=3)
    assert config.model.options == components.Stack(width=32)
    assert [phase.options.steps for phase in config.phases] == [10]
    assert config.rules == ()


def test_every_fault_has_its_line_and_they_come_in_order(failure: Any) -> None:
    text = """\
name: much too long
seed: "0"
data: leters
model: {name: stack, widht: 3, group_size: row}
optimizer:
  name: adam
  lr: -1e-3
  lr: 2
phases:
  - name: standard
    stepz: 3
  - standard
savign: 1
"""
    assert failure(text, "phases.1.stepz=3", "optimizer.betas.0=x") == (
        2,
        """\
error: demo.yaml: 12 faults
demo.yaml:1: name: must be short, not 'much too long'
demo.yaml:2: seed: must be a whole number, not '0' (text)
demo.yaml:3: data: no data is called 'leters'; did you mean 'letters'?
demo.yaml:4: model.widht: unknown key; did you mean 'width'?
demo.yaml:7: optimizer.lr: must be greater than 0, not -0.001
demo.yaml:8: optimizer.lr: the key is here twice; the first is in line 7
demo.yaml:10: phases[0].steps: is required
demo.yaml:11: phases[0].stepz: unknown key; did you mean 'steps'?
demo.yaml:12: phases[1].steps: is required
demo.yaml:13: savign: unknown key; did you mean 'saving'?
-o phases.1.stepz=3: phases[1].stepz: unknown key; did you mean 'steps'?
-o optimizer.betas.0=x: optimizer.betas: must be a list, not a mapping
  available: letters""",
    )


def test_a_single_fault_is_one_line(failure: Any) -> None:
    assert failure(
        MINIMAL.replace("steps", "stepz").replace("standard, ", "standard, steps: 1, ")
    ) == (
        2,
        "error: demo.yaml:5: phases[0].stepz: unknown key; did you mean 'steps'?",
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "error: demo.yaml: must be a mapping, not null"),
        ("- a\n", "error: demo.yaml:1: must be a mapping, not a list"),
        (
            MINIMAL.split("phases")[0] + "phases: []\n",
            "error: demo.yaml:4: phases: must be a list of at least one item, not ()",
        ),
    ],
)
def test_a_file_of_another_shape_says_so(failure: Any, text: str, message: str) -> None:
    assert failure(text) == (2, message)


def test_what_is_missing_is_located_at_what_lacks_it(failure: Any) -> None:
    assert failure("# nothing\nname: x\n") == (
        2,
        """\
error: demo.yaml: 4 faults
demo.yaml:2: data: is required
demo.yaml:2: model: is required
demo.yaml:2: optimizer: is required
demo.yaml:2: phases: is required""",
    )


def test_a_component_that_is_not_installed_exits_with_3(failure: Any) -> None:
    assert failure(MINIMAL.replace("adam", "absent")) == (
        3,
        "error: demo.yaml:3: optimizer: optimizer 'absent' is not installed\n  pip install "
        "arb-ternary-absent",
    )


@pytest.mark.parametrize(
    ("name", "content", "what", "hint"),
    [
        ("absent.yaml", None, "absent.yaml: no such file", "arb config new absent.yaml"),
        ("demo.json", b"{}", "demo.json: a config is a file ending in .yaml, .yml", ""),
        ("demo.yaml", b"name: \xff", "demo.yaml: cannot be read: not UTF-8 at byte 6", ""),
    ],
)
def test_a_file_that_cannot_be_read_is_a_config_error(
    in_tmp: Path, name: str, content: bytes | None, what: str, hint: str
) -> None:
    if content is not None:
        Path(name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_document(name)
    assert (caught.value.what, caught.value.hint, caught.value.exit_code) == (what, hint, 2)


def test_a_file_that_is_not_there_may_have_a_similar_name(in_tmp: Path) -> None:
    Path("first.yaml").write_text("name: first\n")
    with pytest.raises(ConfigError) as caught:
        read_document("frist.yaml", advice="Write one.")
    assert caught.value.hint == "did you mean first.yaml?\nWrite one."


def test_a_folder_is_not_a_config(in_tmp: Path) -> None:
    Path("folder.yaml").mkdir()
    with pytest.raises(ConfigError, match=r"folder.yaml: cannot be read: Is a directory"):
        read_document("folder.yaml")


# --- origins


def test_every_value_says_where_it_comes_from(load: Any) -> None:
    loaded = load(MINIMAL + "rules: [pure]\n", "phases.0.lr=0.5", "saving.keep=1", "rules.0=pure")
    assert {
        path: str(loaded.origins[parse_path(path)])
        for path in [
            "data",
            "model.name",
            "model.width",
            "model.heads",
            "masking",
            "optimizer.name",
            "optimizer.lr",
            "phases[0].steps",
            "phases[0].lr",
            "saving.every",
            "saving.keep",
            "seed",
            "rules",
        ]
    } == {
        "data": "demo.yaml:1",
        "model.name": "demo.yaml:2",
        "model.width": "demo.yaml:2",
        "model.heads": "default",
        "masking": "default",
        "optimizer.name": "demo.yaml:3",
        "optimizer.lr": "default",
        "phases[0].steps": "demo.yaml:5",
        "phases[0].lr": "-o phases.0.lr=0.5",
        "saving.every": "default",
        "saving.keep": "-o saving.keep=1",
        "seed": "default",
        "rules": "-o rules.0=pure",
    }


# --- other classes


def test_any_config_class_can_be_the_top_level_of_a_file(in_tmp: Path, registry: Any) -> None:
    Path("wrapper.yml").write_text("inner: sgd\n")
    loaded = load_as(components.Wrapper, "wrapper.yml", ["limits.3=0.5"], registry=registry)
    assert loaded.config.inner.name == "sgd"
    assert loaded.config.limits == {3: 0.5}
    assert str(loaded.origins["inner",]) == "wrapper.yml:1"


def test_an_absent_component_in_any_config_class_exits_with_3(in_tmp: Path, registry: Any) -> None:
    Path("wrapper.yaml").write_text("inner: absent\n")
    with pytest.raises(EnvironmentProblem):
        load_as(components.Wrapper, "wrapper.yaml", registry=registry)
