"""A starter config writes its settings out, and every other option as a comment."""

from __future__ import annotations

import re
from typing import Any

import arb_config_test_components as components
import pytest

from arb_ternary.config.fields import to_plain
from arb_ternary.config.starter import starter_config
from arb_ternary.config.structure import structure
from arb_ternary.config.yaml_document import read_yaml
from arb_ternary.specs import DocumentSpec, StarterSpec

MODULE = components.MODULE


@pytest.fixture
def text(registry: Any) -> str:
    document = DocumentSpec(
        name="study", target=f"{MODULE}:Study", config=f"{MODULE}:Study", command="arb study"
    )
    starter = StarterSpec(
        name="test", target=f"{MODULE}:SETTINGS", summary="A test.", document="study"
    )
    return starter_config(starter, document, registry, full=True)


def study(text: str, registry: Any) -> components.Study:
    return structure(components.Study, read_yaml(text, "arb.yaml"), registry)


def test_every_option_has_a_comment(text: str, registry: Any) -> None:
    assert (
        text
        == """\
# A test.
#
# Lines that begin with `# key:` are options at their defaults; uncomment one to change it.
# Check this file with `arb config validate`, run it with `arb study`.

# name: study                         # what it is called
# seed: 0                             # seed of all randomness
data:                                 # where it comes from
  name: letters                       # the letters
model:                                # the network
  name: stack                         # the stack
  width: 32                           # features
  # heads: 4                          # heads
  # group_size: 32                    # group size
  # activations: float                # activations
  # gradients: float                  # gradients
# masking: shift                      # what is hidden
optimizer:                            # how the model learns
  name: wrapper                       # the wrapper
  inner:                              # what is wrapped
    name: adam                        # the adam
    lr: 0.5                           # learning rate
    # betas: [0.9, 0.95]              # decay of the moments
    # mode: plain                     # which Adam
  # others: []                        # more of them
  # limits: {}                        # limit by step
phases:                               # what is done, in order
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
rules:                                # what must hold
  - name: pure                        # the pure
saving:                               # when files are written
  every: 5                            # steps between two files; 0 = only at the end, when everything that was asked
                                      # for has run
  # keep: 3                           # how many stay
"""  # noqa: E501
    )
    assert study(text, registry).saving.every == 5


def test_uncommenting_every_option_changes_nothing(text: str, registry: Any) -> None:
    uncommented = re.sub(r"^( *)# (\w+: )", r"\1\2", text, flags=re.MULTILINE)
    assert uncommented != text
    assert to_plain(study(uncommented, registry), given=False) == to_plain(
        study(text, registry), given=False
    )
