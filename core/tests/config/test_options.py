"""Options of config classes."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import frozen

from arb_ternary.config.options import (
    LARGEST_INT64,
    fraction,
    non_negative,
    one_of,
    option,
    optional,
    positive,
)


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


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        (2**31, "at most 2147483647"),
        (-(2**31), "at least -2147483647"),
        (float("inf"), "float32"),
        (float("-inf"), "float32"),
        (float("nan"), "float32"),
        (1e39, "float32"),
        (1e-300, "float32"),
        (5e-324, "float32"),
        ((1.0, float("inf")), "float32"),
        ([1, 2**63], "at most 2147483647"),
        ({"head": float("nan")}, "float32"),
    ],
)
def test_a_number_beyond_the_limits_is_refused(value: Any, rule: str) -> None:
    @frozen
    class Config:
        value: Any = option(help="a value")

    with pytest.raises(ValueError, match=f"^'value' must be .*{rule}"):
        Config(value)


@pytest.mark.parametrize(
    "value", [2**31 - 1, 1 - 2**31, 0.0, -0.0, 3.4028234663852886e38, 2.0**-126, True, "9" * 40]
)
def test_a_value_within_the_limits_is_kept(value: Any) -> None:
    @frozen
    class Config:
        value: Any = option(help="a value")

    assert Config(value).value == value


def test_an_option_may_have_another_largest_number() -> None:
    @frozen
    class Config:
        seed: int = option(0, "a seed", validator=non_negative, largest=LARGEST_INT64)

    assert Config(2**63 - 1).seed == 2**63 - 1
    with pytest.raises(ValueError, match=r"^'seed' must be at most 9223372036854775807, not "):
        Config(2**63)
    with pytest.raises(ValueError, match=r"^'seed' must be 0 or greater, not -1"):
        Config(-1)
