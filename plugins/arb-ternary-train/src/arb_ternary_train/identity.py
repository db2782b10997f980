"""What makes two runs the same: everything in the config that decides the result, the data, and the
vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from arb_ternary.config.errors import show_path
from arb_ternary.config.fields import leaves, to_plain
from arb_ternary.protocols.data import DataSource
from arb_ternary_train.config import RunConfig

#: Keys of a config that a run may change when it is resumed: where it runs, and who looks on.
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


def run_identity(config: RunConfig, data: DataSource) -> dict[str, Any]:
    """The identity of a run, as plain JSON. Data counts by its content, not by where it lies."""
    plain: dict[str, Any] = to_plain(config, given=False)
    return {
        "config": {key: value for key, value in plain.items() if key not in RUNTIME_KEYS},
        "data": data.fingerprint(),
        "vocabulary_size": data.vocabulary_size,
    }


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One line for each value that differs between two identities.

    An option that there was not, and that is null now, is no difference: nobody has asked for what
    it does.
    """
    old = dict(leaves(dict(before)))
    new = dict(leaves(dict(now)))
    absent = object()
    lines = []
    for path in sorted(old.keys() | new.keys(), key=str):
        then = old.get(path, absent)
        here = new.get(path, absent)
        if then != here and not (then is absent and here is None):
            shown = show_path(path[1:] if path[:1] == ("config",) else path)
            lines.append(f"{shown}: {_show(then, absent)} there, {_show(here, absent)} here")
    return lines


def _show(value: Any, absent: object) -> str:
    text = "nothing" if value is absent else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
