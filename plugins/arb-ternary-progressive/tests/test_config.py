"""The config of progressive training: the guide's YAML, assignments, faults with file and line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import attrs
import pytest

from arb_ternary.config.yaml_document import dump_yaml
from arb_ternary.errors import ConfigError
from arb_ternary_progressive import ProgressiveConfig, StackWiseConfig

GUIDE = """\
training:
  progressive:
    enabled: true
    trunk_strategy: "frozen"        # "frozen" or "qlora"
    new_stack_precision: "full"    # "full", "half", "bfloat16", "qlora"
    cache_activations: true

    # Simplified QLoRA configuration
    qlora_enabled: true             # Enable QLoRA adapters on all stacks
    qlora_rank: 16                  # QLoRA rank for all stacks
    qlora_alpha: 32                 # QLoRA alpha parameter
    qlora_strategy: "simplified"    # "simplified" - add LoRA to all stacks

    max_stacks: 12
    building_mode: "append"          # "append" or "prepend"

    # Time interpretation
    time_interpretation: "depth"     # "input" or "depth"
    time_embedding_dim: 512        # For time-as-input
    time_encoding_type: "sinusoidal" # "sinusoidal" or "learned"
    stack_time_mapping: "linear"    # "linear", "exponential", "custom"
    time_per_stack: 100            # For time-as-depth
"""

DUAL = """\
training:
  progressive:
    # Stack LoRA parameters (added to each stack)
    qlora_enabled: true
    qlora_rank: 16
    qlora_alpha: 32

    # Progressive QLoRA parameters (added to trunk when new stacks are added)
    progressive_qlora: true
    progressive_qlora_rank: 8
    progressive_qlora_alpha: 16
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.yaml"


@pytest.mark.parametrize("text", [GUIDE, DUAL])
def test_the_yaml_of_the_guide_loads(file: Path, text: str) -> None:
    file.write_text(text)
    config = StackWiseConfig.from_yaml(file)
    config.validate()
    found = attrs.asdict(config.training.progressive)
    lines = [line.split("#")[0].strip() for line in text.splitlines() if ": " in line.split("#")[0]]
    for line in lines:
        key, value = (part.strip().strip('"') for part in line.split(":"))
        expected = {"true": True, "false": False}.get(
            value, int(value) if value.isdigit() else value
        )
        assert found[key] == expected, key
    assert config.model.vocab_size == 256


def test_the_model_section_becomes_a_decoder_config(file: Path) -> None:
    file.write_text(
        "model: {vocab_size: 40, d_model: 32, d_ff: 48, n_heads: 4, max_length: 16}\n"
        "training: {progressive: {zero_residual: false}}\n"
    )
    config = StackWiseConfig.from_yaml(file).decoder_config()
    assert (config.width, config.hidden, config.heads, config.max_length) == (32, 48, 4, 16)
    assert not config.zero_residual


def test_ends_and_causal_have_derived_defaults() -> None:
    config = StackWiseConfig()
    assert config.decoder_config().float_parts == ("embedding", "head")
    assert config.decoder_config("ternary").float_parts == ()
    assert not config.decoder_config().causal
    config.training.progressive.training_objective = "clm"
    assert config.decoder_config().causal
    config.model.causal = False
    assert not config.decoder_config().causal


def test_unknown_keys_are_errors_with_line_and_nearest_name(file: Path) -> None:
    file.write_text(
        GUIDE.replace("qlora_rank:", "qlora_rnak:").replace("max_stacks:", "max_stack:")
    )
    with pytest.raises(ConfigError) as caught:
        StackWiseConfig.from_yaml(file)
    text = str(caught.value)
    assert (
        "config.yaml:10: training.progressive.qlora_rnak: unknown key; did you mean 'qlora_rank'?"
        in text
    )
    assert (
        "config.yaml:14: training.progressive.max_stack: unknown key; did you mean 'max_stacks'?"
        in text
    )
    file.write_text("trainig: {}\n")
    with pytest.raises(ConfigError, match="did you mean 'training'"):
        StackWiseConfig.from_yaml(file)


def test_a_wrong_value_is_an_error_with_the_rule(file: Path) -> None:
    file.write_text(
        GUIDE.replace('"frozen" ', '"frosen" ').replace("qlora_rank: 16", "qlora_rank: 0")
    )
    with pytest.raises(ConfigError) as caught:
        StackWiseConfig.from_yaml(file)
    assert "config.yaml:4" in str(caught.value)
    assert "did you mean 'frozen'?" in str(caught.value)
    assert (
        "config.yaml:10: training.progressive.qlora_rank: must be a whole number of at least 1"
        in str(caught.value)
    )


def test_an_override_takes_precedence_over_the_file(file: Path) -> None:
    file.write_text(GUIDE)
    config = StackWiseConfig.from_yaml(file, ["training.progressive.qlora_rank=4"])
    assert config.training.progressive.qlora_rank == 4


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trunk_strategy", "qlra"),
        ("new_stack_precision", "int4"),
        ("qlora_rank", 2.5),
        ("qlora_alpha", 0),
        ("max_stacks", True),
        ("cache_activations", "yes"),
        ("custom_time_mapping", "no colon"),
        ("qlora_configs", {0: {"rnak": 8, "alpha": 1}}),
        ("qlora_configs", {"first": {"rank": 8, "alpha": 1}}),
        ("qlora_configs", {0: {"rank": 8}}),
        ("time_step_fractions", [0.5, 1.5]),
    ],
)
def test_an_invalid_assignment_keeps_the_old_value(key: str, value: object) -> None:
    config = ProgressiveConfig()
    before = getattr(config, key)
    with pytest.raises((TypeError, ValueError), match=key):
        setattr(config, key, value)
    assert getattr(config, key) == before


def test_an_unknown_name_cannot_be_assigned() -> None:
    with pytest.raises(AttributeError, match="trunk_stratgy"):
        ProgressiveConfig().trunk_stratgy = "frozen"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"trunk_strategy": "qlora"},
            "trunk_strategy: qlora trains the adapters of the trunk, and there are none",
        ),
        (
            {"new_stack_precision": "nvfp4"},
            "new_stack_precision: nvfp4 cannot learn without adapters",
        ),
        (
            {"qlora_enabled": True, "qlora_strategy": "variable"},
            "qlora_configs: qlora_strategy variable needs",
        ),
        (
            {"qlora_configs": {0: {"rank": 1, "alpha": 1}}},
            "qlora_configs: has no effect because 'qlora_strategy' is simplified",
        ),
        (
            {"stack_time_mapping": "custom"},
            "custom_time_mapping: stack_time_mapping custom needs a function",
        ),
        (
            {"custom_time_mapping": "module:f"},
            "custom_time_mapping: has no effect because 'stack_time_mapping' is linear",
        ),
    ],
)
def test_contradictions_name_the_option(options: dict[str, object], message: str) -> None:
    config = StackWiseConfig()
    for key, value in options.items():
        setattr(config.training.progressive, key, value)
    with pytest.raises(ConfigError, match=message):
        config.validate()


@pytest.mark.parametrize(
    ("options", "named", "reason"),
    [
        ({"time_per_stack": 2}, "time_per_stack", "it belongs to 'stack_time_mapping'"),
        ({"time_embedding_dim": 8}, "time_embedding_dim", "time is the place of a stack"),
        ({"time_encoding_type": "learned"}, "time_encoding_type", "time is the place of a stack"),
        ({"time_sampling": "sample"}, "time_sampling", "time is the place of a stack"),
        ({"qlora_rank_pattern": "linear"}, "qlora_rank_pattern", "'qlora_strategy' is simplified"),
        (
            {"qlora_alpha_pattern": "linear"},
            "qlora_alpha_pattern",
            "'qlora_strategy' is simplified",
        ),
        ({"progressive_qlora_rank": 2}, "progressive_qlora_rank", "'progressive_qlora' is false"),
        (
            {"progressive_qlora_alpha": 2.0},
            "progressive_qlora_alpha",
            "'progressive_qlora' is false",
        ),
        (
            {"cache_activations": False, "cache_folder": "x"},
            "cache_folder",
            "'cache_activations' is false",
        ),
        (
            {"enabled": False, "cache_dtype": "int8"},
            "cache_dtype",
            "all stacks are trained together",
        ),
        (
            {"trunk_strategy": "qlora", "qlora_enabled": True, "cache_bytes": 8},
            "cache_bytes",
            "the trunk changes with every step",
        ),
    ],
)
def test_an_unused_option_is_a_fault_with_line_and_reason(
    file: Path, options: dict[str, object], named: str, reason: str
) -> None:
    file.write_text(dump_yaml({"training": {"progressive": options}}))
    config = StackWiseConfig.from_yaml(file)
    with pytest.raises(ConfigError) as caught:
        config.validate()
    assert [fault.path for fault in caught.value.faults] == [("training", "progressive", named)]
    line = (
        file.read_text()
        .splitlines()
        .index(next(each for each in file.read_text().splitlines() if named in each))
    )
    assert (
        f"config.yaml:{line + 1}: training.progressive.{named}: has no effect because {reason}"
        in str(caught.value)
    )


def test_epochs_beside_steps_are_a_fault() -> None:
    config = StackWiseConfig()
    config.training.epochs_per_stack = 2
    config.validate()
    config.training.steps_per_stack = 3
    with pytest.raises(
        ConfigError, match=r"training\.epochs_per_stack: has no effect because 'steps_per_stack'"
    ):
        config.validate()


@pytest.mark.parametrize(
    "options",
    [
        # A builder may be asked for a stack that uses it.
        {"qlora_rank": 2, "qlora_base": "ternary", "adapter_dtype": "ternary"},
        {"building_mode": "prepend", "cache_dtype": "int8"},
        {"trunk_strategy": "qlora", "qlora_enabled": True},
        {"trunk_strategy": "qlora", "progressive_qlora": True},
        {"trunk_strategy": "qlora", "new_stack_precision": "qlora"},
        {"new_stack_precision": "nvfp4", "qlora_enabled": True},
        {"stack_time_mapping": "custom", "custom_time_mapping": min},
    ],
)
def test_options_that_go_together_are_accepted(options: dict[str, object]) -> None:
    config = StackWiseConfig()
    for key, value in options.items():
        setattr(config.training.progressive, key, value)
    config.validate()


def test_validate_finds_impossible_models_and_lines(
    file: Path,
) -> None:
    file.write_text("model: {d_model: 30, n_heads: 4}\n")
    config = StackWiseConfig.from_yaml(file)
    with pytest.raises(ConfigError, match="4 does not divide 30"):
        config.validate()
    file.write_text("training:\n  progressive:\n    new_stack_precision: nvfp4\n")
    with pytest.raises(
        ConfigError, match=r"config\.yaml:3: training\.progressive\.new_stack_precision: nvfp4"
    ):
        StackWiseConfig.from_yaml(file).validate()


def test_package_and_config_do_not_import_torch() -> None:
    code = (
        "import sys, arb_ternary_progressive, arb_ternary_progressive.plugin, "
        "arb_ternary_progressive.config;"
        "assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_public_name_can_be_imported() -> None:
    import arb_ternary_progressive

    for name in arb_ternary_progressive.__all__:
        assert getattr(arb_ternary_progressive, name) is not None
    with pytest.raises(AttributeError):
        _ = arb_ternary_progressive.nothing
