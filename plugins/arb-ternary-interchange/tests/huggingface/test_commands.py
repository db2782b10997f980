"""The commands on folders of transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from huggingface_hub import constants

from arb_ternary.cli.main import main
from arb_ternary.ternary.models import ternary_modules
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_train.restore import load_run


def test_a_folder_becomes_a_run_and_goes_out_again(
    tmp_path: Path,
    make_decoder: Callable[..., Decoder],
    export: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_decoder(architecture="bitnet", group_size="tensor", scale_rule="frozen")
    first = export(model, tmp_path / "first", {"kind": "bytes"}, layout="packed")
    run = str(tmp_path / "run")
    second = tmp_path / "second"

    assert main(["inspect", str(first), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["format"], told["architecture"], told["tokenizer"]) == ("hf", "bitnet", "bytes")
    assert main(["import", str(first), run]) == 0
    assert main(["export", run, str(second), "--format", "hf", "--layout", "packed"]) == 0
    before, after = (
        safetensors.torch.load_file(folder / "model.safetensors") for folder in (first, second)
    )
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (second / name).read_bytes() == (first / name).read_bytes()

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    capsys.readouterr()
    assert main(["import", "hf://org/name", str(tmp_path / "none")]) == 1
    assert "hf://org/name: is not in the hub's cache" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


@pytest.mark.extended
def test_import_by_address_from_the_cache_without_a_network(
    tmp_path: Path,
    make_decoder: Callable[..., Decoder],
    export: Callable[..., Path],
    cached: Callable[[Path, Path], Path],
) -> None:
    model = make_decoder(architecture="qwen3", group_size="tensor", scale_rule="frozen")
    first = export(model, tmp_path / "first", {"kind": "bytes"}, layout="packed")
    run = tmp_path / "run"
    cached(first, tmp_path / "hub")
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path / "hub")}
    command = [sys.executable, "-m", "arb_ternary.cli.main", "import", "hf://org/name", str(run)]
    subprocess.run(command, check=True, env=environment)
    found = load_run(run).model
    for name, module in ternary_modules(model):
        assert torch.equal(found.get_submodule(name).trits(), module.trits())
