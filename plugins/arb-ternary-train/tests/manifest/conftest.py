"""A trainer, a system and a family of keys that somebody else brings, and manifests of text
files.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from arb_ternary.plugins.manager import manager, reset_manager

PLUGIN = '''
from typing import Literal

from attrs import frozen

from arb_ternary import hookimpl
from arb_ternary.config.errors import Fault, Faulty
from arb_ternary.config.options import option, positive
from arb_ternary_train.manifest.keys import TrainKeys
from arb_ternary_train.manifest.standard import run_settings as standard
from arb_ternary_train.specs import SystemSpec, TrainerSpec, TrainKeysSpec

ARB_API_VERSION = (1, 0)


@frozen(kw_only=True)
class Keys(TrainKeys):
    phase: Literal["standard", "nesting"] = option("standard", "what the run does")
    twigs: int = option(3, "twigs a nest", validator=positive)
    where: str | None = option(None, "where the nest is")


def run_settings(keys, run):
    settings = standard(keys, run)
    if keys.twigs == 13:
        raise Faulty(Fault(("train", "twigs"), "brings bad luck"))
    return {**settings, "threads": keys.twigs}


def mixed(config):
    """A decoder with ternary linears and a float rest."""
    if "depth" in config:
        raise Faulty(Fault(("depth",), "a bird has no depth"))
    small = {"width": 16, "layers": 1, "heads": 2, "max_length": 512, "group_size": 32}
    return {"name": "decoder", **small, "float_parts": ["embedding", "head", "norms"], **config}


@frozen(kw_only=True)
class Song:
    enabled: bool = option(False, "whether it sings")
    notes: int = option(5, "notes of the song", validator=positive)


def sing(keys, settings):
    return {**settings,
        "requires": [f"arb-ternary-core<{keys.notes}"]} if keys.enabled else settings


@hookimpl
def arb_register_trainers():
    return [TrainerSpec(name="bird", target="birds:run_settings", config="birds:Keys")]


@hookimpl
def arb_register_systems():
    return [SystemSpec(name="bird", target="birds:mixed")]


@hookimpl
def arb_register_train_keys():
    return [TrainKeysSpec(name="song", target="birds:sing", config="birds:Song")]
'''
HEAD = """version: 2
name: study
vars: {small: 2}
targets:
  - name: one
    system: {ref: system.bird}
    config: {data: {name: text, path: text.txt}}
"""


@pytest.fixture(autouse=True, scope="module")
def birds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The plugin; loading all of them anew for every test would take longer than the tests."""
    file = tmp_path_factory.mktemp("birds") / "birds.py"
    file.write_text(PLUGIN)
    reset_manager()
    manager().load_file(file)
    yield
    reset_manager()
    sys.modules.pop("birds", None)


@pytest.fixture(autouse=True)
def _here(birds: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a text."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("to be or not to be, that is the question. " * 60)


@pytest.fixture
def written() -> Callable[..., Path]:
    """Writes a manifest of one target that trains a tiny decoder; ``runs`` begins with the target's
    trainer or runs.
    """

    def write(runs: str, head: str = HEAD) -> Path:
        path = Path("study.yaml")
        path.write_text(head + "".join(f"    {line}\n" for line in runs.strip("\n").splitlines()))
        return path

    return write
