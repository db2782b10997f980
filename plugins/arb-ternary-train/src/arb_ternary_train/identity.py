"""The identity of a run: the config as far as it decides the result, data and vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from arb_ternary.config.errors import Path, show_path
from arb_ternary.config.fields import leaves, to_plain
from arb_ternary.protocols.data import DataSource
from arb_ternary_train.config import RunConfig

#: Keys of a config that may change when a run is resumed: where it runs, and who observes it.
RUNTIME_KEYS: Final = frozenset(
    {
        "name",
        "device",
        "backend",
        "deterministic",
        "threads",
        "ranks",
        "checkpoint",
        "trackers",
        "checks",
        "requires",
        "plugins",
        "data",
    }
)
#: Longest value that :func:`differences` shows in full.
_LONGEST: Final = 60
_ABSENT: Final = object()


def run_identity(config: RunConfig, data: DataSource) -> dict[str, Any]:
    """Return the identity of a run, as plain JSON. Data counts by content, not by location."""
    plain: dict[str, Any] = to_plain(config, given=False)
    return {
        "config": {key: value for key, value in plain.items() if key not in RUNTIME_KEYS},
        "data": data.fingerprint(),
        "vocabulary_size": data.vocabulary_size,
    }


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return one line for each value that differs between two identities."""
    return [
        f"{show_path(path[1:] if path[:1] == ('config',) else path)}: {_show(then)} there, "
        f"{_show(here)} here"
        for path, (then, here) in changes(before, now).items()
    ]


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[Path, tuple[Any, Any]]:
    """Return the values that differ between two identities, old and new, by their path.

    An option that did not exist and is null now is not a difference: no config has set it.
    """
    old = dict(leaves(dict(before)))
    new = dict(leaves(dict(now)))
    found = {}
    for path in sorted(old.keys() | new.keys(), key=str):
        then = old.get(path, _ABSENT)
        here = new.get(path, _ABSENT)
        is_new_null = then is _ABSENT and here is None
        if then != here and not is_new_null:
            found[path] = (then, here)
    return found


def _show(value: Any) -> str:
    text = "nothing" if value is _ABSENT else repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
