"""Runs on sounds: purity, resume, and the generators ``sound`` and ``listen``."""

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from attrs import evolve

from arb_ternary.cli.main import main
from arb_ternary_audio.data import formants
from arb_ternary_audio.data.formants import FormantsConfig
from arb_ternary_testing.interruption import Crash, interruption
from arb_ternary_train.checkpoint import CheckpointStore, read_checkpoint
from arb_ternary_train.checkpoint_format import encode_state
from arb_ternary_train.directory import RunDirectory
from arb_ternary_train.loading import load_config
from arb_ternary_train.progress import Silent
from arb_ternary_train.restore import load_run
from arb_ternary_train.runner import RunRequest, train

CODES = """
name: codes
exact: {exact}
data:
  name: audio_codes
  sounds: {{name: formants, words: 20, held_out: 10, noise_db: 30}}
  codes: 16
model: {{name: decoder, width: 32, layers: 1, heads: 2, max_length: 41, group_size: row}}
optimizer: {{name: scaled_votes, lr: 0.1}}
phases: [{{name: standard, steps: 6, batch_size: 4, block_size: 41, eval_every: 3,
    eval_batches: 1}}]
checks: [pure]
checkpoint: {{every: 2, keep: 9}}
"""

WORDS = """
name: words
exact: {exact}
data: {{name: formants, words: 20, held_out: 10}}
masking: {{name: labels, augment: [{{name: erase_columns}}]}}
model: {{name: {model}, image_size: [32, 40], width: 32, layers: 1, group_size: row{options}}}
optimizer: {{name: scaled_votes, lr: 0.1}}
phases: [{{name: standard, steps: 6, batch_size: 4, eval_every: 3, eval_batches: 1}}]
checks: [pure]
checkpoint: {{every: 2, keep: 9}}
"""

KINDS = {
    "codes": CODES,
    "vit": WORDS.replace("{model}", "vit").replace(
        "{options}", ", patch_size: [32, 2], heads: 2, positions: learned"
    ),
    "convnet": WORDS.replace("{model}", "convnet").replace(
        "{options}", ", stages: 1, kernel_size: 1"
    ),
}


def _train(folder: Path, text: str, name: str, *trackers, resume=None) -> RunDirectory:
    file = folder / "config.yaml"
    file.write_text(text)
    config = evolve(load_config(file).config, trackers=trackers)
    train(config, RunRequest(directory=folder / name, resume=resume, reporter=Silent))
    return RunDirectory.existing(folder / name)


def _bits(directory: RunDirectory):
    last = read_checkpoint(CheckpointStore(directory.checkpoints).latest())
    assert last.state["step"] == 6
    return encode_state({"model": dict(last.model), "rng": last.state["rng"]})


def _equal(one, other):
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys()
    for key, tensor in one[1].items():
        assert torch.equal(tensor, other[1][key]), key


@pytest.mark.parametrize(
    ("kind", "exact"),
    [
        ("codes", "true"),
        ("vit", "true"),
        pytest.param("codes", "false", marks=pytest.mark.slow),
        pytest.param("vit", "false", marks=pytest.mark.slow),
        pytest.param("convnet", "false", marks=pytest.mark.slow),
        pytest.param("convnet", "true", marks=pytest.mark.slow),
    ],
)
def test_resume_after_kill_is_bitwise(tmp_path, kind, exact):
    text = KINDS[kind].format(exact=exact)
    whole = _train(tmp_path, text, "whole")
    audit = json.loads((whole.path / "result.json").read_text())["audit"]
    assert (audit["pure"], audit["float_parameters"], audit["float_buffers"]) == (True, 0, 0)
    with pytest.raises(Crash):
        _train(tmp_path, text, "killed", interruption(3, "crash"))
    _equal(_bits(_train(tmp_path, text, "killed", resume="auto")), _bits(whole))


@pytest.fixture(scope="module")
def codes(tmp_path_factory):
    return _train(tmp_path_factory.mktemp("codes"), CODES.format(exact="false"), "run").path


def test_same_seed_draws_the_same_sound(codes, tmp_path, capsys):
    def drawn(name, *options):
        assert main(["generate", str(codes), "--output", str(tmp_path / name), *options]) == 0
        return soundfile.read(tmp_path / name)

    (first, rate), (again, _), (other, _) = (
        drawn(f"{i}.wav", "--seed", seed, "--seconds", "0.3") for i, seed in enumerate("112")
    )
    assert rate == 8000
    assert 0 < len(first) <= 0.3 * 8000
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert f"codes, {len(other) / 8000:.2f} s at 8000 Hz" in capsys.readouterr().out


def test_prompt_file_is_continued(codes, tmp_path):
    prompt = tmp_path / "prompt.wav"
    soundfile.write(prompt, 0.5 * np.sin(2 * np.pi * 500 * np.arange(3200) / 16000), 16000)
    options = ["--prompt-file", str(prompt), "--seconds", "0.1", "--seed", "0", "--count", "2"]
    assert main(["generate", str(codes), "--output", str(tmp_path / "a.flac"), *options]) == 0
    wave, _ = soundfile.read(tmp_path / "a.flac")
    # The prompt of 0.2 s is 10 frames. At most 5 more are drawn, twice.
    assert 20 * 160 <= len(wave) <= 30 * 160


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--output", "a.mp3"], "--output a.mp3: the output must be a .wav or .flac file"),
        (["--output", "nowhere/a.wav"], "nowhere/a.wav: cannot be written"),
        (["--output", "a.wav", "--prompt-file", "no.wav"], "no.wav: the sound cannot be read"),
        ([], "Missing option '--output'"),
    ],
)
def test_sound_names_the_fault(codes, tmp_path, monkeypatch, capsys, options, words):
    monkeypatch.chdir(tmp_path)
    # A seed that draws a sound: a model so small ends some before their first frame.
    assert main(["generate", str(codes), "--seed", "1", *options]) != 0
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_sound_refuses_a_run_on_text(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be " * 60)
    data = f"data: {{name: text, path: {text}}}\n"
    config = CODES.format(exact="false")
    run = _train(
        tmp_path, config[: config.index("data:")] + data + config[config.index("model:") :], "run"
    ).path
    assert main(["generate", str(run), "--with", "sound", "--output", str(tmp_path / "a.wav")]) == 2
    assert "its data 'text' has no sound codec" in capsys.readouterr().err


def test_run_on_words_keeps_its_features(tmp_path, capsys):
    run = _train(tmp_path, KINDS["vit"].format(exact="false"), "run").path
    assert json.loads((run / "classes.json").read_text())[:2] == ["masi", "sima"]
    assert json.loads((run / "sounds.json").read_text())["features"]["mels"] == 32
    result = json.loads((run / "result.json").read_text())
    assert result["tokens"] == 24
    assert 0.0 <= result["validation_metrics"]["accuracy"] <= 1.0
    assert main(["eval", str(run)]) == 0
    assert "accuracy" in capsys.readouterr().out


def test_listen_prints_the_classes_of_files(tmp_path, capsys):
    run = _train(tmp_path, KINDS["vit"].format(exact="false"), "run").path
    source = formants.build(FormantsConfig(words=20, held_out=10))
    files = [tmp_path / f"{name}.wav" for name in "ab"]
    for file, samples in zip(files, source.validation_sounds.samples, strict=False):
        soundfile.write(file, samples, 8000)
    capsys.readouterr()
    assert main(["generate", str(run), *map(str, files)]) == 0
    output = capsys.readouterr().out
    with torch.no_grad():
        chances = load_run(run).model(source.validation.read(np.arange(2)).data).softmax(dim=1)
    for file, chance in zip(files, chances, strict=True):
        (line,) = (line for line in output.splitlines() if str(file) in line)
        assert line.split()[-2:] == [
            source.classes[int(chance.argmax())],
            f"{float(chance.max()):.3f}",
        ]
    long = tmp_path / "long.wav"
    soundfile.write(long, np.zeros(8000), 8000)
    assert main(["generate", str(run), str(long)]) == 1
    assert "long.wav: 1.00 s, and a sample has 0.8 s" in capsys.readouterr().err
    assert main(["generate", str(run), str(long), "--longer", "cut"]) == 0
    assert main(["generate", str(run)]) == 2
    assert "--with classify" in capsys.readouterr().err
