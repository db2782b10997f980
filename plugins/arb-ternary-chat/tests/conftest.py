"""A tiny run whose tokenizer knows a chat template."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from arb_ternary_text.data.byte_level import BYTE_CHARACTERS
from arb_ternary_text.data.file_tokenizers import FileTokenizer
from arb_ternary_text.data.special_tokens import SpecialTokens
from arb_ternary_text.data.tokenizers import LanguageTokenizer
from arb_ternary_train.config import RunConfig
from arb_ternary_train.loading import load_config
from arb_ternary_train.runner import RunRequest, train

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
START, END = 256, 257

CONFIG = """
name: tiny
data: {{name: text, path: {text}, tokenizer: {tokenizer}, validation_fraction: 0.2}}
model: {{name: decoder, width: 32, layers: 2, heads: 2, feed_forward: 64, max_length: {context},
  {model}}}
optimizer: {optimizer}
phases:
  - {{name: standard, steps: 2, batch_size: 2, block_size: 16, warmup_steps: 0, eval_every: 0}}
"""


def chat_tokenizer(template: str | None = TEMPLATE) -> LanguageTokenizer:
    library = Tokenizer(models.BPE({c: i for i, c in enumerate(BYTE_CHARACTERS)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(
        [AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)]
    )
    special = SpecialTokens(bos=START, eos=(END,), chat_template=template)
    return LanguageTokenizer(FileTokenizer(library.to_str()), special)


def trained(
    folder: Path,
    tokenizer: LanguageTokenizer,
    context: int = 200,
    model: str = "architecture: qwen3, activations: float",
    optimizer: str = "{name: scaled_votes, lr: 0.1}",
) -> Path:
    """Train for two steps and return the run directory."""
    (folder / "text.txt").write_text("the cat sat on the mat. " * 40)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer.to_json()))
    text = CONFIG.format(
        text=folder / "text.txt",
        tokenizer=folder / "tokenizer.json",
        context=context,
        model=model,
        optimizer=optimizer,
    )
    (folder / "config.yaml").write_text(text)
    config: RunConfig = load_config(folder / "config.yaml").config
    train(config, RunRequest(directory=folder / "run"))
    return folder / "run"


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("chat"), chat_tokenizer())


@pytest.fixture(scope="session")
def base_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without a chat template."""
    return trained(tmp_path_factory.mktemp("base"), chat_tokenizer(None))


@pytest.fixture(scope="session")
def float_ends_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a float embedding and float norms, as models that others publish have them."""
    return trained(
        tmp_path_factory.mktemp("float-ends"),
        chat_tokenizer(),
        model="architecture: bitnet, group_size: tensor, scale_rule: frozen, tie_embeddings: true, "
        "float_parts: [embedding, head, norms]",
        optimizer="{name: split, ternary: {name: scaled_votes, lr: 0.1}, float: adamw}",
    )
