"""Options of config classes, and the options of everything that core registers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import attrs
import pytest
from attrs import frozen

from arb_ternary.config.choice import Choice
from arb_ternary.config.describe import describe_type, is_choice
from arb_ternary.config.fields import config_fields
from arb_ternary.config.options import fraction, non_negative, one_of, option, optional, positive
from arb_ternary.config.structure import options_class
from arb_ternary.plugins.manager import manager
from arb_ternary_train.config import RunConfig


def _reachable(t: Any, seen: set[Any]) -> None:
    """Add every config class that the type ``t`` mentions, at any depth, to ``seen``."""
    if isinstance(t, type) and attrs.has(t) and not is_choice(t) and t not in seen:
        seen.add(t)
        for field in config_fields(t):
            _reachable(field.type, seen)
    for argument in get_args(t):
        _reachable(argument, seen)


def _config_classes() -> Iterator[type[Any]]:
    seen: set[Any] = set()
    _reachable(RunConfig, seen)
    registry = manager().registry
    for choice in Choice.__subclasses__():
        for name in registry.names(choice.kind):
            _reachable(options_class(registry.get(choice.kind, name).spec), seen)
    yield from sorted(seen, key=lambda cls: f"{cls.__module__}.{cls.__qualname__}")


def test_every_option_of_every_installed_component_has_help_on_one_line() -> None:
    without = [
        f"{cls.__module__}.{cls.__qualname__}.{field.key}"
        for cls in _config_classes()
        for field in config_fields(cls)
        if not field.help or "\n" in field.help
    ]
    assert without == []


def test_the_config_classes_of_core_are_among_those_that_were_looked_at() -> None:
    names = {cls.__qualname__ for cls in _config_classes()}
    assert {"RunConfig", "CheckpointConfig", "DecoderConfig", "SignVotesConfig", "SplitConfig"} <= names


def test_every_option_has_a_type_that_can_be_put_into_words() -> None:
    for cls in _config_classes():
        for field in config_fields(cls):
            assert describe_type(field.type)


def test_every_kind_of_component_that_a_config_can_hold_has_a_choice() -> None:
    kinds = {choice.kind for choice in Choice.__subclasses__()}
    assert kinds == {"optimizer", "masking", "phase", "model", "data", "tracker", "exporter", "check"}


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
def test_rules_hold_where_they_say(rule: Any, good: list[Any], bad: list[Any], message: str) -> None:
    @frozen
    class Config:
        value: Any = option(help="a value", validator=rule)

    for value in good:
        assert Config(value).value == value
    for value in bad:
        with pytest.raises(ValueError, match=message) as caught:
            Config(value)
        assert caught.value.args[0] == f"{message}{value!r}"
