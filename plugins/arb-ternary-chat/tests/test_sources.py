"""Commands take a model in every form, and compute what they compute with the run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from torch import Tensor, nn

from arb_ternary.cli.main import main
from arb_ternary.ternary.models import ternary_modules
from arb_ternary_interchange.decoder.weights import TernaryWeight, exported_weights
from arb_ternary_train.model_source import open_model
from arb_ternary_train.model_state import checkpoint_path
from arb_ternary_train.restore import load_run, measure

FORMS = ("run", "checkpoint", "model.gguf", "hf", "model.safetensors", "hf://org/name")
FOREIGN = FORMS[2:]
TARGETS = {"gguf": "back.gguf", "hf": "back", "safetensors": "back.safetensors"}
PROMPT, LENGTH = "cat ", 12


@pytest.fixture(scope="module")
def sources(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Yield the model of ``run`` in every form. The hub is a cache without a network."""
    folder = tmp_path_factory.mktemp("forms")
    found = {"run": str(run), "checkpoint": str(checkpoint_path(run)), FORMS[-1]: FORMS[-1]}
    for form, name in zip(FOREIGN[:3], ("gguf", "hf", "safetensors"), strict=True):
        found[form] = str(folder / form)
        options = ["-o", "layout=dense"] if name == "hf" else []
        assert main(["export", str(run), found[form], "--format", name, *options]) == 0
    hub = folder / "models--org--name"
    shutil.copytree(folder / "hf", hub / "snapshots" / "0123")
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text("0123")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_CACHE", str(folder))
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        yield found


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def greedy(run: Path) -> str:
    """Return the most likely continuation, by a forward pass over the whole text for each token."""
    model = load_run(run).model
    ids = list(PROMPT.encode())
    with torch.no_grad():
        while len(ids) < len(PROMPT) + LENGTH:
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    assert max(ids) < 256  # Neither control token is drawn.
    return bytes(ids).decode(errors="replace")


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights of a decoder as floats."""
    found = {}
    for name, value in exported_weights(model):
        found[name] = value.dense() if isinstance(value, TernaryWeight) else value
    return found


@pytest.mark.parametrize("form", FORMS)
def test_generate_draws_the_same_text(
    sources: dict[str, str], form: str, greedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--prompt", PROMPT, "--temperature", "0", "--max-new-tokens", str(LENGTH)]
    assert main(["generate", sources[form], *options]) == 0
    assert capsys.readouterr().out == f"{greedy}\n"
    assert not [*Path().iterdir()]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("form", FORMS)
def test_an_export_of_any_form_has_the_same_weights_and_template(
    sources: dict[str, str], form: str, target: str, run: Path
) -> None:
    options = ["-o", "layout=dense"] if target == "hf" else []
    command = ["export", sources[form], TARGETS[target], "--format", target, *options]
    assert main(command) == 0
    assert [path.name for path in Path().iterdir()] == [TARGETS[target]]
    back = open_model(TARGETS[target])
    found = weights(back.module)
    expected = weights(load_run(run).model)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    given = json.loads((run / "tokenizer.json").read_text())["special"]["chat_template"]
    assert back.source.attachments["tokenizer"]["special"]["chat_template"] == given


@pytest.mark.parametrize("form", FORMS)
def test_inspect_describes_it(
    sources: dict[str, str], form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", sources[form], "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["vocabulary_size"] == 258
    assert found["tensors"]


@pytest.mark.parametrize("form", FORMS)
def test_eval_measures_runs_and_names_the_way_for_other_models(
    sources: dict[str, str], form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["eval", sources[form], "--json"])
    shown = capsys.readouterr()
    if form in FOREIGN:
        assert status == 2
        assert "is not a run, so there are no held-out samples" in shown.err
        assert f"arb import {sources[form]} DIR" in shown.err
        return
    expected = measure(load_run(Path(sources["run"])))[0].loss
    assert json.loads(shown.out)["validation_loss"] == expected


@pytest.mark.parametrize("form", FOREIGN)
def test_a_foreign_model_is_opened_without_accumulators(sources: dict[str, str], form: str) -> None:
    modules = dict(ternary_modules(open_model(sources[form]).module))
    assert modules
    assert sum(module.votes.nbytes for module in modules.values()) == 0


def test_help_shows_the_options_of_the_generator(
    sources: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", sources["model.gguf"], "--help"]) == 0
    assert "--max-new-tokens" in capsys.readouterr().out


def test_the_model_is_found_among_values_that_are_files(
    sources: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("notes.txt").write_text("text")
    command = ["generate", "--prompt", "notes.txt", "--max-new-tokens", "1"]
    assert main([*command, sources["hf"]]) == 0
    assert capsys.readouterr().out.startswith("notes.txt")


def test_a_model_in_a_folder_of_a_run_is_not_the_run(
    run: Path, sources: dict[str, str], tmp_path: Path
) -> None:
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    file = copied / "exports" / "model.gguf"
    file.parent.mkdir()
    shutil.copy(sources["model.gguf"], file)
    assert open_model(file).run is None
    assert open_model(checkpoint_path(copied)).run is not None


def test_notes_of_import_and_export_are_shown(
    sources: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(sources["hf"], "hf")
    config = json.loads(Path("hf/config.json").read_text())
    Path("hf/config.json").write_text(json.dumps({**config, "unheard_of": 1}))
    for command in (["export", "hf", "new.gguf", "--format", "gguf"], ["generate", "hf"]):
        assert main(command) == 0
        shown = capsys.readouterr()
        assert "note: " in shown.err
        assert "unheard_of" in shown.err
        assert "note: " not in shown.out


@pytest.mark.parametrize(
    "command",
    [["generate", "SOURCE"], ["export", "SOURCE", "out.gguf", "--format", "gguf"]],
    ids=["generate", "export"],
)
def test_bad_sources_are_named(
    command: list[str],
    sources: dict[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("notes.txt").write_text("text")
    Path("cut.gguf").write_bytes(Path(sources["model.gguf"]).read_bytes()[:2000])
    before = sorted(Path().iterdir())
    for source, code, message in (
        ("none.gguf", 2, "none.gguf: there is no such file or folder"),
        ("notes.txt", 1, "notes.txt: no installed importer knows this format"),
        ("cut.gguf", 1, "cut.gguf: "),
        ("owl://org/name", 2, "no importer takes addresses that begin with owl://"),
    ):
        asked = [source if each == "SOURCE" else each for each in command]
        assert main(asked) == code
        error, *_ = capsys.readouterr().err.splitlines()
        assert error.startswith("error: ")
        assert message in error
    assert sorted(Path().iterdir()) == before


def test_a_model_without_a_tokenizer_is_exported_and_takes_no_text(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["-o", "layout=dense", "-o", "tokenizer=false"]
    assert main(["export", str(run), "bare", "--format", "hf", *options]) == 0
    assert main(["export", "bare", "bare.safetensors"]) == 0
    assert main(["generate", "bare", "--prompt", "the cat"]) == 1
    assert "'the' is not a token id: this data has no tokenizer" in capsys.readouterr().err
