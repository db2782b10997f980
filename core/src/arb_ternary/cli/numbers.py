"""Limits of the numbers on a command line, which are those of numbers in a config."""

from __future__ import annotations

from typing import Any

import click
from attrs import frozen

from arb_ternary.config.options import LARGEST_COUNT, LARGEST_INT64, Limits

_SEED = "seed"


def limit_numbers(command: click.Command) -> click.Command:
    """Let ``command`` refuse numbers that an option of a config would refuse; return it.

    Whoever writes a command thus cannot forget what follows from infinite or huge numbers.
    """
    for parameter in command.params:
        is_number = isinstance(
            parameter.type, click.types.IntParamType | click.types.FloatParamType
        )
        # A command is imported once and may be looked up several times.
        if is_number and not isinstance(parameter.callback, _Limited):
            limits = Limits(LARGEST_INT64 if parameter.name == _SEED else LARGEST_COUNT)
            parameter.callback = _Limited(limits, parameter.callback)
    return command


@frozen
class _Limited:
    """A callback that checks numbers before it calls the parameter's own."""

    limits: Limits
    callback: Any

    def __call__(self, ctx: click.Context, parameter: click.Parameter, value: Any) -> Any:
        broken = self.limits.broken_by(value)
        if broken is not None:
            raise click.BadParameter(f"{broken}.", ctx=ctx, param=parameter)
        return value if self.callback is None else self.callback(ctx, parameter, value)
