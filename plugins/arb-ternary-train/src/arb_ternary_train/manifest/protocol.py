"""What a trainer of manifests is given, and what it returns."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import field, frozen


@frozen(kw_only=True)
class EarlierRun:
    """A run of the same target that comes before: its ``id``, the keys of its ``train:``, and its
    directory.
    """

    id: str
    keys: Any
    directory: Path


@frozen(kw_only=True)
class TargetRun:
    """A run of a manifest's target, as a trainer (``TrainerSpec``) is given it.

    The trainer returns the settings of a config of ``arb train``: at least ``model``, ``optimizer``
    and ``phases``, and what else the keys of ``train:`` decide. The manifest adds ``name``,
    ``seed``, ``checks`` and the target's own ``config``, which goes before. The run starts from the
    weights of the last of ``earlier``.

    Attributes:
        steps: ``steps`` of the run; None where it has none.
        given: keys of ``train:`` that the user wrote.
        model: the ``model:`` section that the target's system makes; None where the target names no
            system.
        config: the target's ``config``: settings that the user wrote as ``arb train`` reads them.
        earlier: the runs before this one, in their order.
        files: a folder for what the target's runs share, such as a tokenizer; a temporary one in a
            dry run.
        dry: whether this is a dry run: nothing is trained, so that only sizes matter.
        shared: the same mapping for all runs of a target, empty at the first: what a trainer need
            not find out twice.
        notes: sentences for the person who runs it; the trainer adds its own.
    """

    steps: int | None
    given: frozenset[str]
    model: Mapping[str, Any] | None
    config: Mapping[str, Any]
    earlier: tuple[EarlierRun, ...]
    files: Path
    dry: bool
    shared: dict[str, Any]
    notes: list[str] = field(factory=list)
