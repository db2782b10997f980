"""Options of config classes."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import frozen

from arb_ternary.config.options import fraction, non_negative, one_of, option, optional, positive


def test_an_option_without_help_cannot_be_declared() -> None:
    with pytest.raises(TypeError, match="help"):
        option(1, "")


@pytest.mark.parametrize(
    ("rule", "good", "bad", "message"),
    [
        (positive, [1, 0.1], [0, -1], "'value' must be greater than 0, not "),
        (non_negative, [0, 3.5], [-0.1], "'value' must be 0 or greater, not "),
        (fraction, [0, 0.5, 1], [-0.1, 1.1], "'value' must be between 0 and 1, not "),
        (one_of("a", 2), ["a", 2], ["b", 3], "'value' must be one of 'a', 2, not "),
        (optional(positive), [None, 1], [0], "'value' must be greater than 0, not "),
    ],
)
def test_rules_hold_where_they_say(
    rule: Any, good: list[Any], bad: list[Any], message: str
) -> None:
    @frozen
    class Config:
        value: Any = option(help="a value", validator=rule)

    for value in good:
        assert Config(value).value == value
    for value in bad:
        with pytest.raises(ValueError, match=message) as caught:
            Config(value)
        assert caught.value.args[0] == f"{message}{value!r}"
