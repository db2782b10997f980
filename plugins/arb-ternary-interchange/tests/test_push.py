"""``arb push``: the folder and its card, and an upload to a stand-in of the hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from arb_ternary.cli.main import main
from arb_ternary_interchange.huggingface.exporter import HfExporter
from arb_ternary_interchange.options import HfExportConfig
from arb_ternary_text.models.decoder import Decoder

STAND_IN = Path(__file__).with_name("hub_stand_in.py")


@pytest.fixture
def source(tmp_path: Path, make_decoder: Callable[..., Decoder]) -> Path:
    """A folder of transformers with a tokenizer."""
    model = make_decoder(architecture="bitnet", group_size="tensor", scale_rule="frozen")
    metadata = {"name": "a", "step": 0, "model": {}, "versions": {}, "tokenizer": {"kind": "bytes"}}
    HfExporter(HfExportConfig()).export(model, tmp_path / "source", metadata)
    return tmp_path / "source"


@pytest.fixture
def stand_in(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The address of the stand-in, and the folder that it keeps uploads in."""
    kept = tmp_path / "kept"
    kept.mkdir()
    command = [sys.executable, str(STAND_IN), str(kept)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield f"http://127.0.0.1:{server.stdout.readline().strip()}", kept
        server.terminate()


def push(address: str, home: Path, *arguments: str, token: str | None) -> Any:
    names = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment |= {"HF_ENDPOINT": address, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    if token is not None:
        environment["HF_TOKEN"] = token
    command = [sys.executable, "-m", "arb_ternary", "push", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_dry_run_writes_folder_gguf_and_card(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    command = ["push", str(source), "org/small", "--dry-run", str(folder)]
    assert main([*command, "--base-model", "org/big", "--license", "apache-2.0"]) == 0
    assert "no licence" not in capsys.readouterr().err
    assert {"README.md", "config.json", "model.safetensors", "small.gguf", "tokenizer.json"} <= {
        file.name for file in folder.iterdir()
    }
    card = ModelCard.load(folder / "README.md")
    assert (card.data.base_model, card.data.license) == ("org/big", "apache-2.0")
    assert card.data.library_name == "transformers"
    for words in (
        "arb generate hf://org/small",
        "llama-cli -hf org/small",
        'AutoModelForCausalLM.from_pretrained("org/small", dtype="auto")',
        "bits per weight in `small.gguf`",
    ):
        assert words in card.text
    size = (folder / "small.gguf").stat().st_size
    weights = int(card.text.partition("## Size\n\n")[2].partition(" ")[0].replace(",", ""))
    assert f"{8 * size / weights:.2f} bits per weight" in card.text
    # The folder is there already.
    assert main(command) == 2
    assert main(["push", str(source), "small", "--dry-run", str(tmp_path / "other")]) == 2
    assert "names no organisation" in capsys.readouterr().err
    assert main(["push", str(source), "org/a b", "--dry-run", str(tmp_path / "other")]) == 2
    assert not (tmp_path / "other").exists()


def test_upload_is_the_folder(source: Path, tmp_path: Path, stand_in: tuple[str, Path]) -> None:
    address, kept = stand_in
    folder = tmp_path / "out"
    assert main(["push", str(source), "org/small", "--dry-run", str(folder)]) == 0
    done = push(address, tmp_path / "home", str(source), "org/small", "--private", token="good")
    assert done.returncode == 0, done.stderr
    asked = json.loads((kept / "repository.json").read_text())
    assert (asked["organization"], asked["name"]) == ("org", "small")
    assert asked.get("private") or asked.get("visibility") == "private"
    (kept / "repository.json").unlink()
    names = {file.name for file in folder.iterdir()}
    assert {file.name for file in kept.iterdir()} == names
    assert all((kept / name).read_bytes() == (folder / name).read_bytes() for name in names)


@pytest.mark.parametrize(
    ("token", "message"),
    [
        (None, "there is no token for the hub"),
        ("wrong", "the hub does not know this token"),
        ("reader", "this token may not write to org/small"),
    ],
)
def test_refusals_are_a_line(
    source: Path, tmp_path: Path, stand_in: tuple[str, Path], token: str | None, message: str
) -> None:
    address, kept = stand_in
    done = push(address, tmp_path / "home", str(source), "org/small", token=token)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert list(kept.iterdir()) == []


def test_a_hub_that_cannot_be_reached_loses_nothing(source: Path, tmp_path: Path) -> None:
    before = {file: file.read_bytes() for file in source.iterdir()}
    # Nothing listens on port 1.
    home = tmp_path / "home"
    done = push("http://127.0.0.1:1", home, str(source), "org/small", token="good")
    assert done.returncode == 3
    assert "push: the hub cannot be reached: " in done.stderr
    assert "--dry-run FOLDER writes the files without it" in done.stderr
    assert "Traceback" not in done.stderr
    assert {file: file.read_bytes() for file in source.iterdir()} == before
