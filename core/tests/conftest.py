"""Fake plugins for the tests of core."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Protocol

import pytest

from arb_ternary.backends.select import reset_backends
from arb_ternary.environment import VARIABLES
from arb_ternary.plugins import discovery
from arb_ternary.plugins.manager import reset_manager


class InstallPlugin(Protocol):
    """Installs a fake plugin: a distribution and its hook module in a folder of its own on ``sys.path``.

    The folder is returned. ``name`` is the plugin's name; by default the distribution is ``arb-ternary-NAME`` 1.0 and
    the module ``fake_NAME``, whose text is ``source`` (None writes no module).
    """

    def __call__(
        self, name: str, source: str | None = None, *, distribution: str = "", version: str = "1.0", module: str = ""
    ) -> Path: ...


@pytest.fixture
def install_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InstallPlugin]:
    """Fake plugins beside the core; whatever else is installed, and every variable that is set, is out of sight."""
    for variable in VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    everything, folders, modules = metadata.distributions, [], set(sys.modules)

    def visible() -> Iterator[metadata.Distribution]:
        for distribution in everything():
            if distribution.name == discovery.CORE_DISTRIBUTION or any(
                Path(str(distribution.locate_file(""))) == folder for folder in folders
            ):
                yield distribution

    def install(
        name: str, source: str | None = None, *, distribution: str = "", version: str = "1.0", module: str = ""
    ) -> Path:
        folder = tmp_path / f"site{len(folders)}"
        distribution, module = distribution or f"arb-ternary-{name}", module or f"fake_{name}"
        info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        info.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        info.joinpath("entry_points.txt").write_text(f"[{discovery.GROUP}]\n{name} = {module}\n")
        if source is not None:
            folder.joinpath(f"{module}.py").write_text(source)
        folders.append(folder)
        monkeypatch.syspath_prepend(folder)
        reset_manager()
        return folder

    monkeypatch.setattr(discovery, "distributions", visible)
    reset_manager()
    reset_backends()
    yield install
    reset_manager()
    reset_backends()
    for added in set(sys.modules) - modules:
        origin = getattr(sys.modules[added], "__file__", None) or ""
        if origin.startswith(str(tmp_path)):
            del sys.modules[added]
