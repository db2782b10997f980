"""Manifests: their config classes, and reading one from a file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal

from attrs import frozen

from arb_ternary.config.loading import read_document
from arb_ternary.config.options import (
    LARGEST_INT64,
    Rule,
    non_negative,
    option,
    optional,
    positive,
)
from arb_ternary.config.overrides import apply_overrides
from arb_ternary.config.structure import structure
from arb_ternary.config.yaml_document import Document
from arb_ternary.errors import UsageProblem, nearest
from arb_ternary.plugins.manager import manager
from arb_ternary_manifests.variables import VARIANTS, substitute, with_variant
from arb_ternary_train.config import is_run_name

#: What to do if there is no such manifest.
_ADVICE: Final = (
    "A manifest lists several runs; its keys: arb config schema --document manifest\n"
    "For the config of one run: arb config new, then arb train"
)
_is_not_empty = Rule("a list of at least one item", lambda value: len(value) > 0, {"minItems": 1})


def _unique(name: str) -> Rule:
    def holds(value: Sequence[Any]) -> bool:
        names = [getattr(item, name) for item in value]
        return len(set(names)) == len(names)

    return Rule(f"a list in which every {name} is used once", holds, {})


@frozen(kw_only=True)
class System:
    """The model that a target trains."""

    ref: str = option(help="the system: system.language_model, or system.NAME of a model")
    config: Mapping[str, Any] = option(factory=dict, help="what the system makes a model from")


@frozen(kw_only=True)
class Run:
    """A run of a target: a directory, a config and a model."""

    id: str = option(help="name of the run and of its directory", validator=is_run_name)
    mode: Literal["train"] = option("train", "what is done with the model")
    steps: int | None = option(
        None, "optimizer steps; null = the phase's default", validator=optional(positive)
    )
    seed: int = option(0, "seed of all randomness", validator=non_negative, largest=LARGEST_INT64)
    train: Mapping[str, Any] = option(
        factory=dict,
        help="how it trains: phase, options of the phase, device, and weight_decay, beta1 and "
        "beta2 of AdamW",
    )
    verify: Mapping[str, Any] | list[Mapping[str, Any]] | None = option(
        None,
        "checks that pass or fail the run: `type` names one, the rest are its options; a mapping "
        "or a list",
    )


@frozen(kw_only=True)
class Target:
    """Runs that follow one another: each starts from the weights of the run before."""

    name: str = option("experiment", "name of the target and of its folder", validator=is_run_name)
    type: Literal["experiment"] = option("experiment", "what the target is")
    trainer: str = option(
        "trainer.standard", "how its runs train: trainer.standard or trainer.upcycle"
    )
    system: System | None = option(None, "what is trained; null = the trainer's default")
    config: Mapping[str, Any] = option(
        factory=dict,
        help="settings of the runs' config, as `arb train` reads them: data, optimizer, backend, "
        "checkpoint, ...",
    )
    runs: tuple[Run, ...] = option(
        help="the runs, in order", validator=[_is_not_empty, _unique("id")]
    )


@frozen(kw_only=True)
class Manifest:
    """Several experiments in one file."""

    version: Literal[2] = option(help="version of the format of manifests")
    name: str = option("manifest", "name of the manifest and of its folder", validator=is_run_name)
    vars: Mapping[str, Any] = option(factory=dict, help="values that ${name} is replaced by")
    variants: Mapping[str, Mapping[str, Any]] = option(
        factory=dict, help="other values of some vars, by the name that --target chooses"
    )
    targets: tuple[Target, ...] = option(
        help="what is run, in order", validator=[_is_not_empty, _unique("name")]
    )


@frozen(eq=False)
class ManifestFile:
    """A manifest that was read from a file.

    Attributes:
        manifest: the manifest, with every variable replaced.
        document: the same as plain values, with their lines.
        variant: the chosen variant; None if none was chosen.
        targets: positions of the chosen targets.
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
        chosen: names of at most one variant and of any targets; no target means all of them.

    Raises:
        ConfigError: the file or its content is wrong; every fault is listed with its line.
        UsageProblem: ``chosen`` has a name that does not exist, or two variants.
    """
    document = apply_overrides(read_document(path, advice=_ADVICE), overrides)
    if isinstance(document.data, dict) and "phases" in document.data:
        raise UsageProblem(
            f"{os.fspath(path)}: it is the config of one run, not a manifest",
            f"Run it with: arb train {os.fspath(path)}",
        )
    variants = _variant_names(document)
    taken = [name for name in dict.fromkeys(chosen) if name in variants]
    if len(taken) > 1:
        raise UsageProblem(
            f"--target: {' and '.join(taken)} are both variants of {path}", "Choose one of them."
        )
    variant = taken[0] if taken else None
    if variant is not None:
        document = with_variant(document, variant)
    document, unused = substitute(document)
    manifest = structure(Manifest, document, manager().registry)

    names = [target.name for target in manifest.targets]
    wanted = [name for name in chosen if name != variant]
    for name in wanted:
        if name in names:
            continue
        close = nearest(name, [*variants, *names])
        advice = f"; did you mean '{close}'?" if close else ""
        raise UsageProblem(
            f"--target {name}: {path} has no variant and no target of this name{advice}",
            f"variants: {', '.join(variants) or 'none'}\ntargets: {', '.join(names)}",
        )
    targets = tuple(index for index, name in enumerate(names) if not wanted or name in wanted)
    return ManifestFile(manifest, document, variant, targets, unused)


def _variant_names(document: Document) -> list[str]:
    variants = document.data.get(VARIANTS) if isinstance(document.data, dict) else None
    if not isinstance(variants, dict):
        return []
    return [str(name) for name, values in variants.items() if isinstance(values, dict)]
