"""Every command and generator refuses numbers that no option of a config may have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import click
import pytest

from arb_ternary.cli.numbers import limit_numbers
from arb_ternary.plugins.manager import manager

EXTREMES: Final = {
    click.types.FloatParamType: ("nan", "inf", "-inf", "1e39", "1e-300", "9" * 400),
    click.types.IntParamType: (str(2**63), str(-(2**63) - 1), "9" * 400),
}


def numbers() -> Iterator[Any]:
    """Yield every parameter that takes a number, with each number that it must refuse."""
    for kind in ("command", "generator"):
        for found in manager().registry.all(kind):
            command = limit_numbers(found.load())
            for parameter in command.params:
                for number_type, extremes in EXTREMES.items():
                    if isinstance(parameter.type, number_type):
                        name = f"{found.name}-{parameter.name}"
                        for text in extremes:
                            yield pytest.param(command, parameter, text, id=f"{name}-{text[:9]}")


@pytest.mark.parametrize(("command", "parameter", "text"), list(numbers()))
def test_an_extreme_number_is_refused(
    command: click.Command, parameter: click.Parameter, text: str
) -> None:
    with click.Context(command) as context, pytest.raises(click.BadParameter):
        parameter.process_value(context, text)
