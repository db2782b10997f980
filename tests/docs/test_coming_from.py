"""What the page for users of other programs names is there."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest
from attrs import fields_dict

import arb_ternary
from arb_ternary.cli.main import arb
from arb_ternary.plugins.manager import manager
from arb_ternary_train.options import StandardConfig

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "coming-from.md"
OURS = [row.split("|")[2] for row in PAGE.read_text("utf-8").splitlines() if row.startswith("| ")]
CODE = [code for cell in OURS for code in re.findall(r"`([^`]+)`", cell)]


@pytest.mark.parametrize("command", sorted({code for code in CODE if code.startswith("arb ")}))
def test_a_command_of_the_page_exists(command: str) -> None:
    found: click.Command = arb
    for word in command.split()[1:]:
        if not isinstance(found, click.Group):
            break
        with click.Context(arb) as context:
            inner = found.get_command(context, word)
        assert inner is not None, f"{command}: {word}"
        found = inner
    options = {name for each in found.params for name in each.opts}
    for option in re.findall(r"--[a-z-]+", command):
        assert option in options, option


def test_options_and_names_of_the_page_exist() -> None:
    options = fields_dict(StandardConfig)
    for name in ("batch_size", "block_size", "gradient_accumulation_steps", "lr"):
        assert name in CODE
        assert name in options
    for name in re.findall(r"arb_ternary\.(\w+)", " ".join(CODE)):
        assert getattr(arb_ternary, name)
    registry = manager().registry
    assert registry.find("data", "chat")
    assert registry.find("masking", "answers")
