"""Single-pass sampling of hidden tokens, in Python and on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from arb_ternary.cli.main import main
from arb_ternary.errors import UsageProblem
from arb_ternary_progressive.builder import ProgressiveRackBuilder
from arb_ternary_progressive.rack import Rack
from arb_ternary_progressive.stackwise import (
    ModelConfig,
    ProgressiveConfig,
    StackWiseConfig,
    TrainingConfig,
)
from arb_ternary_progressive.unroll import unrolled

VOCABULARY = 12
CONTEXT = 8
MASK = VOCABULARY - 1


def rack(stacks: int = 2, model: dict[str, Any] | None = None, **progressive: Any) -> Rack:
    config = StackWiseConfig(
        model=ModelConfig(
            **{
                "vocab_size": VOCABULARY,
                "d_model": 16,
                "d_ff": 16,
                "n_heads": 2,
                "max_length": CONTEXT,
            }
            | (model or {})
        ),
        training=TrainingConfig(
            progressive=ProgressiveConfig(
                **{"blocks_per_stack": 1, "zero_residual": False} | progressive
            )
        ),
    )
    builder = ProgressiveRackBuilder(config)
    for _ in range(stacks):
        builder.add_stack()
    return builder.build_rack().eval()


def passes(model: Rack) -> list[list[int]]:
    """Return a list that gets the token ids of each pass from now on."""
    seen: list[list[int]] = []
    model.embedding.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0].tolist()))
    return seen


@torch.no_grad()
def likeliest(model: Rack, tokens: list[int], hidden: int, **options: Any) -> list[int]:
    logits: Tensor = model(torch.tensor([tokens]), **options)[0, -hidden:, :MASK]
    return logits.argmax(dim=-1).tolist()


def test_all_new_tokens_come_from_one_pass() -> None:
    model = rack()
    wanted = likeliest(model, [3, 1, MASK, MASK, MASK, MASK], 4)
    seen = passes(model)
    blocks = [0]
    for block in model.blocks:
        assert isinstance(block, nn.Module)
        block.register_forward_hook(lambda *_: blocks.__setitem__(0, blocks[0] + 1))
    assert list(unrolled(model, [3, 1], max_new_tokens=4, temperature=0)) == wanted
    assert seen == [[3, 1, MASK, MASK, MASK, MASK]]
    assert blocks == [2]


def test_long_texts_continue_from_half_the_context() -> None:
    model = rack()
    seen = passes(model)
    drawn = list(unrolled(model, [1, 2, 3], max_new_tokens=9, temperature=0))
    text = [1, 2, 3, *drawn]
    assert len(drawn) == 9
    assert seen == [[1, 2, 3, *[MASK] * 5], [*text[4:8], *[MASK] * 4]]
    seen.clear()
    list(unrolled(model, list(range(10)), max_new_tokens=2, temperature=0))
    assert seen == [[6, 7, 8, 9, MASK, MASK]]


def test_draws_are_seeded_and_without_the_mask_token() -> None:
    model = rack()
    with torch.no_grad():
        model.head.weight[MASK] = 0.0  # type: ignore[union-attr,index,operator]
        model.head.weight *= 1e-3  # type: ignore[union-attr,operator]
    texts = [list(unrolled(model, [], max_new_tokens=400, seed=seed)) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert set(texts[0]) == set(range(MASK))
    # Nearly uniform: the top two of eleven cannot give more than two ids a position.
    assert len(set(unrolled(model, [], max_new_tokens=1, top_k=1, seed=3))) == 1


def test_a_stop_token_ends_the_text() -> None:
    model = rack()
    whole = list(unrolled(model, [1], max_new_tokens=6, temperature=0))
    assert (
        list(unrolled(model, [1], max_new_tokens=6, temperature=0, stop=[whole[3]]))
        == whole[: whole.index(whole[3])]
    )


def test_time_as_input_is_the_last_step() -> None:
    model = rack(time_interpretation="input", time_embedding_dim=16, time_encoding_type="learned")
    with torch.no_grad():
        model.time_embedding.table.weight[-1] *= 10  # type: ignore[union-attr]
    wanted = likeliest(model, [1, *[MASK] * 4], 4, time=1.0)
    assert list(unrolled(model, [1], max_new_tokens=4, temperature=0)) == wanted
    assert wanted != likeliest(model, [1, *[MASK] * 4], 4)


def test_invalid_arguments_are_refused_at_once() -> None:
    with pytest.raises(UsageProblem, match="causal"):
        unrolled(rack(model={"causal": True}), [1], max_new_tokens=1)
    for options, message in (
        ({"max_new_tokens": -1}, "at least 0"),
        ({"max_new_tokens": 1, "temperature": -1.0}, "temperature"),
        ({"max_new_tokens": 1, "top_k": 0}, "top_k"),
    ):
        with pytest.raises(UsageProblem, match=message):
            unrolled(rack(), [1], **options)  # type: ignore[arg-type]
    for token in (MASK, VOCABULARY, -1):
        with pytest.raises(UsageProblem, match="prompt"):
            unrolled(rack(), [token], max_new_tokens=1)


CONFIG = """
name: filled
data: {{name: with_mask_token, source: {{name: text, path: {text}, tokenizer: characters}}}}
model: {{name: decoder, width: 32, layers: 1, heads: 2, max_length: 16, group_size: 32,
    causal: {causal}}}
masking: time_step
optimizer: scaled_votes
phases:
  - {{name: progressive, target_stacks: 2, building_mode: prepend, steps_per_stack: 2,
      batch_size: 2, block_size: 8}}
"""


def test_generate_unrolls_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 20)
    config = tmp_path / "run.yaml"
    run = str(tmp_path / "run")
    config.write_text(CONFIG.format(text=tmp_path / "text.txt", causal="false"))
    assert main(["train", str(config), "--run-dir", run]) == 0
    texts = []
    for _ in range(2):
        capsys.readouterr()
        command = [
            "generate",
            run,
            "--unroll",
            "--prompt",
            "the ",
            "--max-new-tokens",
            "30",
            "--seed",
            "1",
        ]
        assert main(command) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert texts[0].startswith("the ")
    assert len(texts[0]) == len("the ") + 30 + 1
    assert main(["generate", run, "--prompt", "the "]) == 2
    assert "not causal" in capsys.readouterr().err


def test_a_model_without_unroll_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 20)
    config = tmp_path / "run.yaml"
    run = str(tmp_path / "run")
    text = CONFIG.format(text=tmp_path / "text.txt", causal="true").replace(
        "masking: time_step\n", ""
    )
    config.write_text(
        text[: text.index("phases:")]
        + "phases: [{name: standard, steps: 1, batch_size: 2, block_size: 8}]"
    )
    assert main(["train", str(config), "--run-dir", run]) == 0
    capsys.readouterr()
    assert main(["generate", run, "--unroll"]) == 2
    assert "it has no unroll()" in capsys.readouterr().err
