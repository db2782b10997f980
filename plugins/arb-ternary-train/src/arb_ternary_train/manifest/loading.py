"""Manifests as a kind of config file, for ``arb config``."""

from __future__ import annotations

import os
from collections.abc import Sequence

from arb_ternary.config.yaml_document import LoadedConfig
from arb_ternary_train.config_file import value_origins
from arb_ternary_train.manifest.document import Manifest, read_manifest
from arb_ternary_train.manifest.plan import check_keys


def load_manifest(
    path: str | os.PathLike[str], overrides: Sequence[str] = ()
) -> LoadedConfig[Manifest]:
    """The manifest in a file, with the keys of every ``train:`` checked. Nothing is built, no
    system either.

    Raises:
        ConfigError, EnvironmentProblem: something is wrong with it; every fault is listed with its
            line.
    """
    file = read_manifest(path, overrides)
    check_keys(file)
    manifest = file.manifest
    runs = sum(len(target.runs) for target in manifest.targets)
    summary = f"targets {', '.join(target.name for target in manifest.targets)}; runs: {runs}"
    return LoadedConfig(
        manifest, value_origins(manifest, file.document), file.document.source, summary
    )
