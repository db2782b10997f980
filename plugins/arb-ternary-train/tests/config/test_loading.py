"""Loading the config of a run: errors, requirements, plugin files, environment, ``exact``."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import arb_run_test_components as components
import pytest
from jsonschema import Draft202012Validator

from arb_ternary.config.fields import to_plain
from arb_ternary.config.overrides import parse_path
from arb_ternary.config.schema import json_schema
from arb_ternary.config.yaml_document import dump_yaml, read_yaml
from arb_ternary.errors import ConfigError
from arb_ternary_train.config import CheckpointConfig, RunConfig
from arb_ternary_train.loading import load_config

MINIMAL = """\
data: shakespeare
model: {name: decoder, width: 32}
optimizer: adam
phases:
  - {name: standard, steps: 10}
"""


@pytest.fixture
def load(in_tmp: Path, plugins: Any) -> Any:
    def run(text: str, *overrides: str) -> Any:
        Path("demo.yaml").write_text(text, encoding="utf-8")
        return load_config("demo.yaml", overrides, plugins=plugins)

    return run


def test_a_minimal_config_has_defaults_for_the_rest(load: Any) -> None:
    config: RunConfig = load(MINIMAL).config
    assert (config.name, config.seed, config.device, config.backend, config.exact) == (
        "run",
        0,
        "cpu",
        "auto",
        False,
    )
    assert config.masking.name == "causal"
    assert config.checkpoint == CheckpointConfig(every=200, keep=3)
    assert config.model.options == components.Decoder(width=32)
    assert [phase.options.steps for phase in config.phases] == [10]
    assert (config.requires, config.plugins, config.trackers, config.checks) == ((), (), (), ())


def test_every_fault_has_its_line_and_they_come_in_order(failure: Any) -> None:
    text = """\
name: a/b
seed: "0"
device: gpu
data: shakespear
model: {name: decoder, widht: 3, group_size: row}
optimizer:
  name: adam
  lr: -1e-3
  lr: 2
phases:
  - name: standard
    stepz: 3
  - standard
extra: 1
"""
    assert failure(text, "phases.1.stepz=3", "optimizer.betas.0=x") == (
        2,
        """\
error: demo.yaml: 13 faults
demo.yaml:1: name: must be letters, digits, '.', '_' and '-', beginning with a letter or digit, not 'a/b'
demo.yaml:2: seed: must be a whole number, not '0' (text)
demo.yaml:3: device: must be cpu, cuda, cuda:N or mps, not 'gpu'
demo.yaml:4: data: no data is called 'shakespear'; did you mean 'shakespeare'?
demo.yaml:5: model.widht: unknown key; did you mean 'width'?
demo.yaml:8: optimizer.lr: must be greater than 0, not -0.001
demo.yaml:9: optimizer.lr: the key is here twice; the first is in line 8
demo.yaml:11: phases[0].steps: is required
demo.yaml:12: phases[0].stepz: unknown key; did you mean 'steps'?
demo.yaml:13: phases[1].steps: is required
demo.yaml:14: extra: unknown key; did you mean 'exact'?
-o phases.1.stepz=3: phases[1].stepz: unknown key; did you mean 'steps'?
-o optimizer.betas.0=x: optimizer.betas: must be a list, not a mapping
  available: shakespeare""",  # noqa: E501
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
def test_a_file_that_is_no_run_says_so(failure: Any, text: str, message: str) -> None:
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


# --- origins


def test_every_value_says_where_it_comes_from(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARB_TERNARY_BACKEND", "triton,torch")
    loaded = load(
        MINIMAL + "checks: [pure]\n", "phases.0.lr=0.5", "checkpoint.keep=1", "checks.0=pure"
    )
    assert loaded.config.backend == "triton,torch"
    assert {
        path: str(loaded.origins[parse_path(path)])
        for path in [
            "data",
            "model.name",
            "model.width",
            "model.group_size",
            "masking",
            "optimizer.name",
            "optimizer.lr",
            "phases[0].steps",
            "phases[0].lr",
            "checkpoint.every",
            "checkpoint.keep",
            "backend",
            "seed",
            "checks",
        ]
    } == {
        "data": "demo.yaml:1",
        "model.name": "demo.yaml:2",
        "model.width": "demo.yaml:2",
        "model.group_size": "default",
        "masking": "default",
        "optimizer.name": "demo.yaml:3",
        "optimizer.lr": "default",
        "phases[0].steps": "demo.yaml:5",
        "phases[0].lr": "-o phases.0.lr=0.5",
        "checkpoint.every": "default",
        "checkpoint.keep": "-o checkpoint.keep=1",
        "backend": "ARB_TERNARY_BACKEND",
        "seed": "default",
        "checks": "-o checks.0=pure",
    }


@pytest.mark.parametrize(
    ("variable", "override", "expected"),
    [
        (None, None, ("torch", "demo.yaml:6")),
        ("", None, ("torch", "demo.yaml:6")),
        ("auto", None, ("auto", "ARB_TERNARY_BACKEND")),
        ("cpu", None, ("cpu", "ARB_TERNARY_BACKEND")),
        ("cpu", "backend=triton", ("triton", "-o backend=triton")),
    ],
)
def test_backend_precedence_is_command_line_environment_file(
    load: Any,
    monkeypatch: pytest.MonkeyPatch,
    variable: str | None,
    override: str | None,
    expected: tuple[str, str],
) -> None:
    if variable is not None:
        monkeypatch.setenv("ARB_TERNARY_BACKEND", variable)
    loaded = load(MINIMAL + "backend: torch\n", *([override] if override else []))
    assert (loaded.config.backend, str(loaded.origins["backend",])) == expected


# --- requirements and plugins


def test_requirements_that_are_met_are_no_fault(load: Any) -> None:
    config = load(
        MINIMAL + "requires: [attrs>=20, \"no-such-thing; python_version < '3'\"]\n"
    ).config
    assert config.requires == ("attrs>=20", "no-such-thing; python_version < '3'")


def test_unmet_requirement_names_the_pip_command(failure: Any) -> None:
    installed = version("attrs")
    text = MINIMAL + "requires:\n  - attrs>=9999\n  - no-such-thing[x]>=1\n"
    assert failure(text) == (
        3,
        f"""\
error: demo.yaml: 2 faults
demo.yaml:7: requires[0]: attrs {installed} is installed, the config needs >=9999
demo.yaml:8: requires[1]: no-such-thing is not installed
  pip install 'attrs>=9999'
  pip install 'no-such-thing[x]>=1'""",
    )


def test_unmet_requirement_hides_unknown_components(failure: Any) -> None:
    text = MINIMAL.replace("adam", "lion") + "requires: [no-such-thing]\n"
    assert failure(text) == (
        3,
        "error: demo.yaml:6: requires[0]: no-such-thing is not installed\n"
        "  pip install no-such-thing",
    )


def test_config_faults_are_listed_with_unmet_requirements(failure: Any) -> None:
    assert failure(MINIMAL + "requires: [no-such-thing]\nsed: 1\n") == (
        2,
        """\
error: demo.yaml: 2 faults
demo.yaml:6: requires[0]: no-such-thing is not installed
demo.yaml:7: sed: unknown key; did you mean 'seed'?
  pip install no-such-thing""",
    )


def test_a_malformed_requirement_is_a_fault_of_the_config(failure: Any) -> None:
    code, text = failure(MINIMAL + "requires: [attrs>>1]\n")
    assert code == 2
    assert text.startswith(
        "error: demo.yaml:6: requires: 'attrs>>1' is not a requirement such as name>=1.0: "
    )


def test_a_component_that_is_not_installed_exits_with_3(failure: Any) -> None:
    assert failure(MINIMAL.replace("adam", "absent")) == (
        3,
        "error: demo.yaml:3: optimizer: optimizer 'absent' is not installed\n  pip install "
        "arb-ternary-absent",
    )


def test_plugin_files_are_relative_to_the_config(in_tmp: Path, plugins: Any) -> None:
    folder = in_tmp / "folder"
    folder.mkdir()
    (folder / "mine.py").touch()
    (in_tmp / "typed.py").touch()
    (folder / "demo.yaml").write_text(MINIMAL + "plugins: [mine.py]\n")
    loaded = load_config("folder/demo.yaml", plugins=plugins)
    assert plugins.files == [folder / "mine.py"]
    assert loaded.config.plugins == (str(folder / "mine.py"),)
    assert load_config(
        "folder/demo.yaml", ["plugins=[typed.py]"], plugins=plugins
    ).config.plugins == (str(in_tmp / "typed.py"),)


def test_a_plugin_file_that_fails_is_located(failure: Any) -> None:
    text = MINIMAL + "plugins: [absent.py]\n"
    assert failure(text) == (
        2,
        "error: demo.yaml:6: plugins[0]: plugin file absent.py: no such file",
    )
    assert failure(MINIMAL + "plugins: [broken.py]\n") == (
        3,
        "error: demo.yaml:6: plugins[0]: plugin file broken.py: failed",
    )


# --- exact


def test_exact_makes_the_model_integer_and_says_why(load: Any) -> None:
    loaded = load(MINIMAL + "exact: true\n")
    options = loaded.config.model.options
    assert (options.activations, options.gradients, options.width) == ("int8", "int8", 32)
    assert loaded.config.model.given == {"width"}
    assert str(loaded.origins["model", "activations"]) == "exact (demo.yaml:6)"
    assert str(loaded.origins["model", "width"]) == "demo.yaml:2"


def test_without_exact_the_model_keeps_its_defaults(load: Any) -> None:
    config = load(MINIMAL).config
    assert (config.model.options.activations, config.model.options.gradients) == ("float", "float")


def test_exact_with_the_same_option_given_is_no_contradiction(load: Any) -> None:
    loaded = load(MINIMAL.replace("32", "32, activations: int8") + "exact: true\n")
    assert str(loaded.origins["model", "activations"]) == "demo.yaml:2"


def test_exact_leaves_a_model_without_such_options_alone(load: Any) -> None:
    text = MINIMAL.replace("{name: decoder, width: 32}", "bare") + "exact: true\n"
    assert load(text).config.model.options is None


def test_a_contradiction_of_exact_names_both_lines(failure: Any) -> None:
    text = "exact: true\n" + MINIMAL.replace("32", "32, gradients: float") + "sed: 1\n"
    assert failure(text) == (
        2,
        """\
error: demo.yaml: 2 faults
demo.yaml:3: model.gradients: 'float' contradicts exact: true, which makes it 'int8' (demo.yaml:1)
demo.yaml:7: sed: unknown key; did you mean 'seed'?""",
    )


def test_contradictions_are_found_in_a_resolved_config(
    failure: Any,
) -> None:
    model = "{name: decoder, width: 32, activations: float, gradients: float, given: [gradients]}"
    text = MINIMAL.replace("{name: decoder, width: 32}", model) + "exact: true\n"
    assert failure(text) == (
        2,
        "error: demo.yaml:2: model.gradients: 'float' contradicts exact: true, which makes it "
        "'int8' (demo.yaml:6)",
    )


def test_a_model_that_cannot_be_exact_says_why(failure: Any) -> None:
    assert failure(MINIMAL.replace("32", "48") + "exact: true\n") == (
        2,
        "error: demo.yaml:2: model: cannot be exact: 'width' must be a multiple of 32 for int8 "
        "(demo.yaml:6)",
    )


# --- written out again, and described


@pytest.mark.parametrize(
    "more", ["", "exact: true\n", "requires: [attrs>=20]\ndevice: cuda:1\ncheckpoint: {every: 0}\n"]
)
def test_resolved_config_loads_equal_and_fits_the_schema(
    load: Any, plugins: Any, more: str
) -> None:
    config = load(MINIMAL + more).config
    plain = to_plain(config)
    assert load(dump_yaml(plain)).config == config
    assert Draft202012Validator(json_schema(RunConfig, plugins.registry)).is_valid(plain)


@pytest.mark.parametrize(
    "more",
    [
        "device: gpu\n",
        "name: a/b\n",
        "seed: -1\n",
        "checkpoint: {keep: 0}\n",
        "phases: []\n",
        "sed: 1\n",
    ],
)
def test_the_schema_refuses_what_does_not_load(failure: Any, plugins: Any, more: str) -> None:
    text = (
        MINIMAL.partition("phases:")[0]
        + "phases: [{name: standard, steps: 10}]\n" * ("phases" not in more)
        + more
    )
    assert failure(text)[0] == 2
    schema = json_schema(RunConfig, plugins.registry)
    assert not Draft202012Validator(schema).is_valid(read_yaml(text, "demo.yaml").data)


def test_a_loaded_config_says_in_a_few_words_what_it_trains(load: Any) -> None:
    assert load(MINIMAL).summary == "decoder on shakespeare, adam, phases standard"


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("phases.0.learning_rate=0.1", "lr"),
        ("phases.0.bs=4", "batch_size"),
        ("phases.0.seq_len=64", "block_size"),
        ("model.seq_len=64", "max_length"),
        ("model.d_model=64", "width"),
        ("optimizer={name: adamw, wd: 0.1}", "weight_decay"),
        ("optimizer={name: adamw, betas: [0.9, 0.95]}", "beta1"),
        ("optimizer={name: adamw, learning_rate: 0.1}", "lr"),
    ],
)
def test_words_of_other_programs_lead_to_the_keys_of_ours(
    tmp_path: Path, override: str, meant: str
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        "data: shakespeare\nmodel: decoder\noptimizer: scaled_votes\nphases: [{name: standard, "
        "steps: 4}]\n"
    )
    with pytest.raises(ConfigError, match=f"unknown key; did you mean '{meant}'"):
        load_config(config, [override])
