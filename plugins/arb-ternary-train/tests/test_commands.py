from __future__ import annotations

import json
from pathlib import Path

import pytest

import arb_ternary
from arb_ternary.cli.main import main
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_train.loading import load_config

CONFIG = """
name: tiny
data: {name: text, path: text.txt}
model: {name: decoder, width: 16, layers: 1, heads: 2, max_length: 8, group_size: 32}
optimizer: sign_votes
checkpoint: {every: 2, keep: 2}
phases: [{name: standard, steps: 4, batch_size: 2, block_size: 8, log_every: 2, eval_every: 1000}]
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("to be or not to be, that is the question. " * 40)
    Path("tiny.yaml").write_text(CONFIG)


def test_train_prints_audit_loss_baselines_and_speed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", "tiny.yaml"]) == 0
    shown = capsys.readouterr()
    for words in (
        "ternary weights (packed)",
        "validation loss (nats per token)",
        "unigram entropy of all validation tokens",
        "bigram entropy of all validation tokens",
        "tokens per second",
        "runs/tiny",
    ):
        assert words in shown.out
    assert "standard 2/4  loss " in shown.err
    assert "left " in shown.err


def test_train_prints_json_that_is_the_result_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "tiny.yaml", "--json", "--run-dir", "here"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed.pop("directory") == "here"
    assert printed == json.loads(Path("here/result.json").read_text())


def test_a_failed_check_exits_with_1_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["train", "tiny.yaml", "-o", "checks=[{name: validation_loss, max: 0.1}]"])
    assert code == 1
    assert "failed checks: validation_loss" in capsys.readouterr().err


def test_used_directory_exits_2_and_bare_resume_is_auto(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", "tiny.yaml", "--run-dir", "here"]) == 0
    assert main(["train", "tiny.yaml", "--run-dir", "here"]) == 2
    assert "--resume" in capsys.readouterr().err
    assert main(["train", "tiny.yaml", "--run-dir", "here", "--resume"]) == 0
    assert "continuing from step-00000004" in capsys.readouterr().err
    assert main(["train", "tiny.yaml", "--resume", "here/checkpoints/step-00000002"]) == 0
    assert "continuing from step-00000002" in capsys.readouterr().err


def test_a_damaged_checkpoint_that_is_named_exits_with_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["train", "tiny.yaml", "--run-dir", "here"])
    Path("here/checkpoints/step-00000004/model.safetensors").write_bytes(b"")
    assert main(["train", "tiny.yaml", "--resume", "here/checkpoints/step-00000004"]) == 1
    assert "step-00000004/model.safetensors: the file is truncated" in capsys.readouterr().err


def test_backend_option_overrides_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARB_TERNARY_BACKEND", "nonsense")
    assert main(["train", "tiny.yaml", "--run-dir", "a", "--backend", "torch"]) == 0
    assert json.loads(Path("a/run.json").read_text())["backend"] == {
        "name": "torch",
        "source": "command line",
    }
    assert main(["train", "tiny.yaml", "--run-dir", "b", "-o", "backend=torch"]) == 0
    assert json.loads(Path("b/run.json").read_text())["backend"] == {
        "name": "torch",
        "source": "command line",
    }
    assert main(["train", "tiny.yaml", "--run-dir", "c"]) == 2
    assert "no backend is called 'nonsense'" in capsys.readouterr().err
    assert not Path("c").exists()
    monkeypatch.setenv("ARB_TERNARY_BACKEND", "torch")
    assert main(["train", "tiny.yaml", "--run-dir", "d"]) == 0
    assert json.loads(Path("d/run.json").read_text())["backend"] == {
        "name": "torch",
        "source": "ARB_TERNARY_BACKEND",
    }


def test_init_from_starts_from_the_weights_of_another_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["train", "tiny.yaml", "--run-dir", "first"])
    assert main(["train", "tiny.yaml", "--run-dir", "second", "--init-from", "first"]) == 0
    assert "weights from first/checkpoints/step-00000004" in capsys.readouterr().err


def test_eval_measures_what_training_measured(capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", "tiny.yaml", "--run-dir", "here"])
    capsys.readouterr()
    assert main(["eval", "here", "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)
    result = json.loads(Path("here/result.json").read_text())
    for key in ("validation_loss", "unigram_entropy", "bigram_entropy"):
        assert measured[key] == result[key]
    assert measured["audit"]["pure"] is True
    assert main(["eval", "here", "--batches", "1"]) == 0
    assert "validation loss" in capsys.readouterr().out
    assert main(["eval", "nowhere"]) == 2


def test_generate_continues_the_prompt_and_repeats_with_a_seed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["train", "tiny.yaml", "--run-dir", "here", "-o", "data.tokenizer=characters"])
    texts = []
    for seed in ("1", "1", "2"):
        capsys.readouterr()
        assert (
            main(
                ["generate", "here", "--prompt", "to be", "--max-new-tokens", "30", "--seed", seed]
            )
            == 0
        )
        texts.append(capsys.readouterr().out)
    assert texts[0].startswith("to be")
    assert len(texts[0]) == len("to be") + 30 + 1
    assert texts[0] == texts[1] != texts[2]
    assert main(["generate", "here", "--prompt", "", "--max-new-tokens", "3"]) == 2
    assert "prompt" in capsys.readouterr().err
    made: list[str] = []
    new_cache = Decoder.new_cache
    monkeypatch.setattr(
        Decoder, "new_cache", lambda *asked: made.append(asked[-1]) or new_cache(*asked)
    )
    for options in ([], ["--cache", "float"], ["--cache", "int8"]):
        assert main(["generate", "here", "--prompt", "to", "--max-new-tokens", "3", *options]) == 0
    assert made == ["bfloat16", "float", "int8"]
    assert main(["generate", "here", "--unroll", "--cache", "int8"]) == 2
    assert "with --unroll there is no cache" in capsys.readouterr().err


def test_generated_text_ends_at_end_tokens_and_stop_texts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["train", "tiny.yaml", "--run-dir", "here", "-o", "data.tokenizer=bytes"])

    def drawn(*options: str) -> str:
        capsys.readouterr()
        command = ["generate", "here", "--prompt", "to be", "--max-new-tokens", "30"]
        assert main([*command, "--seed", "1", *options]) == 0
        return capsys.readouterr().out.removeprefix("to be").removesuffix("\n")

    whole = drawn()
    letters = [letter for letter in whole if letter.isascii()]
    stop = letters[-1]
    before = whole[: whole.index(stop)]
    assert drawn("--stop", stop, "--stop", "no such text") == before
    special = {
        "bos": None,
        "eos": [ord(stop)],
        "pad": None,
        "unk": None,
        "adds_bos": False,
        "adds_eos": False,
        "chat_template": None,
    }
    tokenizer = {"kind": "language", "tokenizer": {"kind": "bytes"}, "special": special}
    Path("here/tokenizer.json").write_text(json.dumps(tokenizer))
    assert drawn() == before
    special.update(bos=66, adds_bos=True, eos=[])
    Path("here/tokenizer.json").write_text(json.dumps(tokenizer))
    assert drawn() != whole
    assert main(["generate", "here", "--stop", ""]) == 2
    assert "a stop string must not be empty" in capsys.readouterr().err


def test_plot_writes_a_figure_into_the_run_directory(capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", "tiny.yaml", "--run-dir", "here"])
    capsys.readouterr()
    assert main(["plot", "here"]) == 0
    assert capsys.readouterr().out == "here/loss.png\n"
    assert Path("here/loss.png").read_bytes().startswith(b"\x89PNG")
    assert main(["plot", "here", "here", "-o", "both.svg"]) == 0
    assert Path("both.svg").exists()
    assert main(["plot"]) == 2


def test_common_settings_have_options_of_their_own() -> None:
    options = ["--steps", "3", "--batch-size", "4", "--preserve-state", "--device", "cpu"]
    assert main(["train", "tiny.yaml", "--run-dir", "run", "-o", "phases.0.steps=9", *options]) == 0
    config = load_config("run/config.yaml").config
    phase = config.phases[0].options
    assert (phase.steps, phase.batch_size, phase.preserve_state, config.device) == (
        3,
        4,
        True,
        "cpu",
    )
    assert json.loads(Path("run/result.json").read_text())["steps"] == 3


def test_phase_options_need_a_single_phase(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        main(
            [
                "train",
                "tiny.yaml",
                "--run-dir",
                "run",
                "-o",
                "phases=[standard, standard]",
                "--steps",
                "3",
            ]
        )
        == 2
    )
    assert "--steps: tiny.yaml has not exactly one phase" in capsys.readouterr().err
    assert main(["train", "tiny.yaml", "--run-dir", "run", "--device", "moon"]) == 2
    assert "device: must be cpu, cuda, cuda:N or mps" in capsys.readouterr().err
    assert not Path("run").exists()


def test_tasks_need_a_package_that_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(arb_ternary, "__getattr__", absent)
    assert main(["eval", "runs/none", "--tasks", "piqa"]) != 0
    assert "arb-ternary-evals" in capsys.readouterr().err
