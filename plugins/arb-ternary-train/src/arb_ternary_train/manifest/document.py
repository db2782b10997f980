"""What a manifest holds: targets, and in each the runs that follow one another. And how one is
read.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from attrs import frozen

from arb_ternary.config.options import Rule, non_negative, option, optional, positive
from arb_ternary.config.structure import structure
from arb_ternary.config.yaml_document import Document
from arb_ternary.errors import UsageProblem, nearest
from arb_ternary.plugins.manager import manager
from arb_ternary_train.config import is_run_name
from arb_ternary_train.config_file import apply_overrides, read_document
from arb_ternary_train.manifest.variables import VARIANTS, substitute, with_variant

_is_not_empty = Rule("a list of at least one item", lambda value: len(value) > 0, {"minItems": 1})


def _distinct(what: str) -> Rule:
    def holds(value: Sequence[Any]) -> bool:
        names = [getattr(item, what) for item in value]
        return len(set(names)) == len(names)

    return Rule(f"a list in which every {what} stands once", holds, {})


@frozen(kw_only=True)
class System:
    """What a target trains."""

    ref: str = option(help="the system: system.NAME")
    config: Mapping[str, Any] = option(factory=dict, help="what the system makes a model of")


@frozen(kw_only=True)
class Run:
    """A run of a target: a directory, a config and a model."""

    id: str = option(help="name of the run and of its directory", validator=is_run_name)
    mode: Literal["train"] = option("train", "what is done with the model")
    steps: int | None = option(
        None, "optimizer steps; null = the phase's default", validator=optional(positive)
    )
    seed: int = option(0, "seed of all randomness", validator=non_negative)
    train: Mapping[str, Any] = option(factory=dict, help="how it trains: the trainer's keys")
    verify: Mapping[str, Any] | list[Mapping[str, Any]] | None = option(
        None,
        "checks that pass or fail the run: `type` names one, the rest are its options; a mapping, "
        "or a list",
    )


@frozen(kw_only=True)
class Target:
    """Runs that follow one another: each starts from the weights of the one before it."""

    name: str = option("experiment", "name of the target and of its folder", validator=is_run_name)
    type: Literal["experiment"] = option("experiment", "what the target is")
    trainer: str = option("trainer.standard", "what trains: trainer.NAME")
    system: System | None = option(None, "what is trained; null = the trainer's own choice")
    config: Mapping[str, Any] = option(
        factory=dict,
        help="settings of the runs' config, as `arb train` reads them: data, optimizer, backend, "
        "checkpoint, ...",
    )
    runs: tuple[Run, ...] = option(
        help="the runs, in order", validator=[_is_not_empty, _distinct("id")]
    )


@frozen(kw_only=True)
class Manifest:
    """Experiments in one file."""

    version: Literal[2] = option(help="version of the form of manifests")
    name: str = option("manifest", "name of the manifest and of its folder", validator=is_run_name)
    vars: Mapping[str, Any] = option(factory=dict, help="values that ${name} stands for")
    variants: Mapping[str, Mapping[str, Any]] = option(
        factory=dict, help="other values of some vars by the name that --target chooses"
    )
    targets: tuple[Target, ...] = option(
        help="what is to be run, in order", validator=[_is_not_empty, _distinct("name")]
    )


@frozen(eq=False)
class ManifestFile:
    """A manifest that was read.

    Attributes:
        manifest: with every variable replaced.
        document: plain values of the same, with the line of each.
        variant: the variant that was chosen; None for none.
        targets: positions of the targets that were chosen.
        unused: variables that nothing uses.
    """

    manifest: Manifest
    document: Document
    variant: str | None
    targets: tuple[int, ...]
    unused: tuple[str, ...]


def read_manifest(
    path: str | os.PathLike[str], overrides: Iterable[str] = (), chosen: Sequence[str] = ()
) -> ManifestFile:
    """Read a manifest.

    Args:
        path: a YAML file.
        overrides: ``path=value`` each, as given to ``-o``.
        chosen: at most one variant, and any targets; no target = all of them.

    Raises:
        ConfigError: the file or its content is wrong; every fault is listed with file and line.
        UsageProblem: ``chosen`` names what is not there.
    """
    document = apply_overrides(read_document(path), overrides)
    variants = _names(document, VARIANTS)
    taken = [name for name in dict.fromkeys(chosen) if name in variants]
    if len(taken) > 1:
        raise UsageProblem(
            f"--target: {' and '.join(taken)} are both variants of {path}", "Choose one of them."
        )
    if taken:
        document = with_variant(document, taken[0])
    document, unused = substitute(document)
    manifest = structure(Manifest, document, manager().registry)
    names = [target.name for target in manifest.targets]
    wanted = [name for name in chosen if name not in taken]
    for name in wanted:
        if name not in names:
            known = [*variants, *names]
            close = nearest(name, known)
            raise UsageProblem(
                f"--target {name}: {path} has no variant and no target of this name"
                + (f"; did you mean '{close}'?" if close else ""),
                f"variants: {', '.join(variants) or 'none'}\ntargets: {', '.join(names)}",
            )
    targets = tuple(index for index, name in enumerate(names) if not wanted or name in wanted)
    return ManifestFile(manifest, document, taken[0] if taken else None, targets, unused)


def _names(document: Document, key: str) -> list[str]:
    value = document.data.get(key) if isinstance(document.data, dict) else None
    return (
        [str(name) for name, item in value.items() if isinstance(item, dict)]
        if isinstance(value, dict)
        else []
    )
