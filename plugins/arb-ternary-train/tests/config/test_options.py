"""The options of a run and of all installed components."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from arb_ternary.config.fields import config_fields, shape_of
from arb_ternary.config.options import HELP
from arb_ternary.config.structure import describe_type, options_class
from arb_ternary.plugins.manager import manager
from arb_ternary_train.config import RunConfig


def _reachable(t: Any, seen: set[Any]) -> None:
    """Add every config class that the type ``t`` mentions, at any depth, to ``seen``."""
    if shape_of(t) == "class" and t not in seen:
        seen.add(t)
        for field in config_fields(t):
            _reachable(field.type, seen)
    for argument in get_args(t):
        _reachable(argument, seen)


def _config_classes() -> Iterator[type[Any]]:
    seen: set[Any] = set()
    _reachable(RunConfig, seen)
    registry = manager().registry
    for kind in registry.kinds:
        for name in registry.names(kind):
            _reachable(options_class(registry.get(kind, name).spec), seen)
    yield from sorted(seen, key=lambda cls: f"{cls.__module__}.{cls.__qualname__}")


def test_every_option_has_help_on_one_line() -> None:
    without = []
    for cls in _config_classes():
        for field in config_fields(cls):
            text = field.metadata.get(HELP, "")
            if not text or "\n" in text:
                without.append(f"{cls.__module__}.{cls.__qualname__}.{field.alias}")
    assert without == []


def test_config_classes_of_training_are_checked() -> None:
    names = {cls.__qualname__ for cls in _config_classes()}
    assert {
        "RunConfig",
        "CheckpointConfig",
        "StandardConfig",
        "SplitConfig",
        "AdamWConfig",
    } <= names


def test_every_option_has_a_type_that_can_be_put_into_words() -> None:
    for cls in _config_classes():
        for field in config_fields(cls):
            assert describe_type(field.type)
