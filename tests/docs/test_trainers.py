"""The blocks of the page about trainers run, one after the other, on a small model."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "trainers.md"
#: What a reader has: a model, rows of tokens, and pairs of answers with their tokenizer.
GIVEN = """
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import arb_ternary

torch.set_num_threads(1)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
model = LlamaForCausalLM(LlamaConfig(vocab_size=40, **sizes, **heads))
arb_ternary.ternarize(model)
tokens = torch.randint(0, 40, (64, 16)).tolist()
rows = Dataset.from_list([{"input_ids": row, "labels": row} for row in tokens])
loader = torch.utils.data.DataLoader(rows.with_format("torch"), batch_size=4)
words = Tokenizer(models.WordLevel({str(n): n for n in range(40)}, unk_token="0"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="0")
pairs = Dataset.from_list([{"prompt": "1", "chosen": " 2 3", "rejected": " 4 5"}] * 16)
"""
CHECK = """
weights = [name for name in before if name.endswith("proj.ternary.weight")]
flipped = sum(not torch.equal(model.state_dict()[name], before[name]) for name in weights)
print("flips in", flipped, "weights")
"""


def test_the_page_runs_and_every_library_flips(tmp_path: Path, python: Callable[..., str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    assert len(blocks) == 4
    parts = [GIVEN]
    for block in blocks:
        # TRL computes in bfloat16 by default, and then refuses a machine without a GPU.
        code = block.replace("max_steps=2", "max_steps=2, bf16=False")
        parts += ["before = {n: t.clone() for n, t in model.state_dict().items()}", code, CHECK]
    output = python(tmp_path, "-c", "\n".join(parts))
    flipped = re.findall(r"^flips in (\d+) weights$", output, re.M)
    assert len(flipped) == 4
    assert "0" not in flipped
