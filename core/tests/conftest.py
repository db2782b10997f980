"""Fake plugins for the tests of core."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from arb_ternary.backends.select import reset_backends
from arb_ternary.environment import VARIABLES
from arb_ternary.plugins import discovery, metadata
from arb_ternary.plugins.manager import reset_manager

#: The components that the root distribution announces in these tests.
KNOWN = {
    "backend.cpu": "arb_ternary_cpu",
    "backend.triton": "arb_ternary_triton",
    "command.plugins.check": "arb_ternary_testing",
    "command.train": "arb_ternary_train",
    "command.upcycle": "arb_ternary_upcycle",
    "optimizer.adamw": "arb_ternary_train",
    "optimizer.gqc": "arb_ternary_gqc",
    "optimizer.signgsd": "arb_ternary_signgsd",
}


class InstallPlugin(Protocol):
    """Installs a fake plugin: a distribution and its hook module in a new folder on ``sys.path``.

    Returns the folder. ``name`` is the name of the plugin. By default the distribution is
    ``arb-ternary-NAME`` 1.0 and the module ``fake_NAME``. The text of the module is ``source``; for
    None no module is written.
    """

    def __call__(
        self,
        name: str,
        source: str | None = None,
        *,
        distribution: str = "",
        version: str = "1.0",
        module: str = "",
        requires: str = "",
    ) -> Path: ...


@pytest.fixture
def install_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InstallPlugin]:
    """Install fake plugins; of the real distributions and variables only the core is visible."""
    for variable in VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    everything = metadata.distributions
    folders: list[Path] = []
    modules = set(sys.modules)

    def visible(group: str) -> Iterator[metadata.InstalledDistribution]:
        for distribution in everything(group):
            is_core = distribution.name == discovery.CORE_DISTRIBUTION
            if is_core or Path(distribution.folder) in folders:
                yield distribution

    def install(
        name: str,
        source: str | None = None,
        *,
        distribution: str = "",
        version: str = "1.0",
        module: str = "",
        requires: str = "",
    ) -> Path:
        folder = tmp_path / f"site{len(folders)}"
        distribution = distribution or f"arb-ternary-{name}"
        module = module or f"fake_{name}"
        info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        info.joinpath("METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
            + (f"Requires-Dist: {requires}\n" if requires else "")
        )
        info.joinpath("entry_points.txt").write_text(f"[{discovery.GROUP}]\n{name} = {module}\n")
        if source is not None:
            folder.joinpath(f"{module}.py").write_text(source)
        folders.append(folder)
        monkeypatch.syspath_prepend(folder)
        reset_manager()
        return folder

    root = tmp_path / "root"
    info = root / "arb_ternary-0.1.0.dist-info"
    info.mkdir(parents=True)
    info.joinpath("METADATA").write_text(
        "Metadata-Version: 2.1\nName: arb-ternary\nVersion: 0.1.0\n"
    )
    known = "".join(f"{name} = {module}\n" for name, module in KNOWN.items())
    info.joinpath("entry_points.txt").write_text(f"[{discovery.KNOWN_GROUP}]\n{known}")
    folders.append(root)
    monkeypatch.syspath_prepend(root)
    monkeypatch.setattr(discovery, "distributions", visible)
    monkeypatch.setattr(metadata, "distributions", visible)
    reset_manager()
    reset_backends()
    yield install
    reset_manager()
    reset_backends()
    for added in set(sys.modules) - modules:
        origin = getattr(sys.modules[added], "__file__", None) or ""
        if origin.startswith(str(tmp_path)):
            del sys.modules[added]
