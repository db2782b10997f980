"""Starter configs are valid, say everything, and mean what their template says."""

from __future__ import annotations

import re
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from arb_ternary.config.plain import leaves, to_plain
from arb_ternary.config.schema import json_schema
from arb_ternary.config.starter import TEMPLATES, starter_config
from arb_ternary.config.yaml_document import read_yaml
from arb_ternary.errors import UsageProblem
from arb_ternary.plugins.manager import manager
from arb_ternary_train.loading import structure_run


@pytest.fixture(scope="module")
def builtin() -> Any:
    """The registry of what is installed."""
    return manager().registry


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_starter_config_is_valid_and_keeps_the_templates_settings(template: str, builtin: Any) -> None:
    text = starter_config(template, builtin)
    document = read_yaml(text, "arb.yaml")
    config = structure_run(document, builtin).config
    found = dict(leaves(to_plain(config, given=False)))
    for path, value in leaves(TEMPLATES[template].settings):
        assert found[path] == value
    assert text.startswith(f"# {TEMPLATES[template].summary}\n")


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_schema_accepts_a_starter_config_and_refuses_a_misspelt_one(template: str, builtin: Any) -> None:
    data = read_yaml(starter_config(template, builtin), "arb.yaml").data
    validator = Draft202012Validator(json_schema(builtin))
    assert validator.is_valid(data)
    assert not validator.is_valid({**data, "sed": 1})
    assert not validator.is_valid({**data, "model": {**data["model"], "widht": 1}})


@pytest.mark.parametrize("template", TEMPLATES)
def test_uncommenting_every_option_changes_nothing(template: str, builtin: Any) -> None:
    text = starter_config(template, builtin)
    uncommented = re.sub(r"^( *)# (\w+: )", r"\1\2", text, flags=re.MULTILINE)
    assert uncommented != text
    before = structure_run(read_yaml(text, "arb.yaml"), builtin).config
    if before.exact:
        # There the model's own defaults contradict `exact`, and are written as comments.
        uncommented = re.sub(r"^ *(activations|gradients): .*$", "", uncommented, flags=re.MULTILINE)
    after = structure_run(read_yaml(uncommented, "arb.yaml"), builtin).config
    assert to_plain(after, given=False) == to_plain(before, given=False)


def test_a_comment_stands_beside_every_option(registry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {
        "data": "shakespeare",
        "model": {"name": "decoder", "width": 32},
        "optimizer": {"name": "wrapper", "inner": {"name": "adam", "lr": 0.5}},
        "phases": [{"name": "standard", "steps": 7}, {"name": "standard", "steps": 8}],
        "checks": ["pure"],
        "checkpoint": {"every": 5},
    }
    template = type(TEMPLATES["small"])("A test.", settings)
    monkeypatch.setattr("arb_ternary.config.starter.TEMPLATES", {"test": template})
    text = starter_config("test", registry)
    assert (
        text.partition("model:")[2]
        == """\
                                # the network
  name: decoder                       # the decoder
  width: 32                           # features
  # heads: 4                          # heads
  # group_size: 32                    # group size
  # activations: float                # activations
  # gradients: float                  # gradients
# masking: causal                     # how samples become inputs, targets and a loss mask
optimizer:                            # how the model learns
  name: wrapper                       # the wrapper
  inner:                              # what is wrapped
    name: adam                        # the adam
    lr: 0.5                           # learning rate
    # betas: [0.9, 0.95]              # decay of the moments
    # mode: plain                     # which Adam
  # others: []                        # more of them
  # limits: {}                        # limit by step
phases:                               # the stretches of the run, in order
  - name: standard                    # the standard
    steps: 7                          # optimizer steps
    # lr: null                        # learning rate; null = the optimizer's
    # share: 0.5                      # a share
    # every: 0                        # a cadence
  - name: standard                    # the standard
    steps: 8                          # optimizer steps
    # lr: null                        # learning rate; null = the optimizer's
    # share: 0.5                      # a share
    # every: 0                        # a cadence
# trackers: []                        # observers of the run
checks:                               # checks that pass or fail the finished run
  - name: pure                        # the pure
checkpoint:                           # when checkpoints are written
  every: 5                            # optimizer steps between checkpoints; 0 = only at the end of a phase and on a
                                      # signal
  # keep: 3                           # how many of the newest checkpoints are kept
"""
    )
    assert structure_run(read_yaml(text, "arb.yaml"), registry).config.checkpoint.every == 5


def test_an_unknown_template_names_the_nearest(registry: Any) -> None:
    with pytest.raises(UsageProblem, match="no template is called 'smal'; did you mean 'small'"):
        starter_config("smal", registry)
