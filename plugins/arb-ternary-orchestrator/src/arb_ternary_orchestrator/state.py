"""State that a checkpoint keeps, declared by the names of attributes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any, ClassVar


def state_of(owner: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return attributes of ``owner`` as plain values, which share nothing with it.

    The attributes hold plain values, deques, sets, or objects with a ``state_dict``. In the state
    their names have no leading underscore.
    """
    return {name.removeprefix("_"): _plain(getattr(owner, name)) for name in names}


def restore_state(owner: Any, names: Iterable[str], state: Mapping[str, Any]) -> None:
    """Set attributes of ``owner`` to what :func:`state_of` returned."""
    for name in names:
        value = state[name.removeprefix("_")]
        current = getattr(owner, name)
        if hasattr(current, "load_state_dict"):
            current.load_state_dict(value)
        elif isinstance(current, deque):
            setattr(owner, name, deque(value, maxlen=current.maxlen))
        elif isinstance(current, set):
            setattr(owner, name, set(value))
        else:
            setattr(owner, name, deepcopy(value))


class Stateful:
    """An object whose state is what a fixed list of its attributes holds."""

    #: The names of the attributes, see :func:`state_of`.
    state_names: ClassVar[tuple[str, ...]]

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values."""
        return state_of(self, self.state_names)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned."""
        restore_state(self, self.state_names, state)


def _plain(value: Any) -> Any:
    """Copy ``value`` with lists in place of deques, sets and tuples."""
    if hasattr(value, "state_dict"):
        return value.state_dict()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, set):
        return sorted(value)
    if isinstance(value, deque | list | tuple):
        return [_plain(item) for item in value]
    return value
