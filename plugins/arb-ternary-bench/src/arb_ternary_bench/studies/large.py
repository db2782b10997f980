"""``arb finetune`` on a packed model of billions of weights: tokens per second and memory.

The model is a Hugging Face folder in BitNet's packed form with random weights and a tokenizer of
bytes; the conversations are random words. So the figures are those of a real model, and its loss
means nothing. Needs the package ``arb-ternary-chat`` and the extra ``studies``.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from attrs import frozen
from torch import Tensor

from arb_ternary.config.options import option, positive
from arb_ternary.errors import UsageProblem
from arb_ternary_bench.child import run_arb
from arb_ternary_bench.generation.shapes import SHAPES, GenerationShape
from arb_ternary_bench.machine import bench_facts, describe, load_average
from arb_ternary_bench.study import Session, Study
from arb_ternary_bench.table import Column, Record, ResultTable, number
from arb_ternary_text.data.train_tokenizer import CHAT_TOKENS, CHATML

#: Names in transformers of the matrices of a block, by their names in llama.cpp.
_NAMES: Final = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
#: Trits of one byte.
_PER_BYTE: Final = 4
_WORDS: Final = ("weight", "vote", "sign", "zero", "group", "scale", "flip", "step", "rate", "row")


@frozen(kw_only=True)
class LargeOptions:
    """Options of the study."""

    shape: str = option("2b", "a shape of `arb bench generate` that has BitNet's norms")
    steps: int = option(3, "optimizer steps", validator=positive)
    conversations: int = option(40, "number of conversations", validator=positive)
    words: int = option(42, "words of a question and of an answer", validator=positive)
    threads: int = option(2, "threads", validator=positive)


def write_model(folder: Path, shape: GenerationShape) -> None:
    """Write a packed folder of random trits, with a tokenizer of bytes and ChatML's template."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    save_file(_tensors(shape), folder / "model.safetensors", {"format": "pt"})
    _write(folder / "config.json", _config(shape))
    _write_tokenizer(folder)


def _tensors(shape: GenerationShape) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    width = shape.width

    def norm(features: int) -> Tensor:
        return torch.ones(features, dtype=torch.bfloat16)

    embedding = torch.empty(shape.vocabulary, width, dtype=torch.bfloat16)
    found = {
        "model.embed_tokens.weight": embedding.normal_(std=0.02, generator=generator),
        "model.norm.weight": norm(width),
    }
    for layer in range(shape.layers):
        block = f"model.layers.{layer}."
        for name, outputs, inputs in shape.matrices():
            packed = torch.zeros(outputs // _PER_BYTE, inputs, dtype=torch.uint8)
            for place in range(_PER_BYTE):
                codes = torch.randint(0, 3, packed.shape, generator=generator, dtype=torch.uint8)
                packed |= codes << 2 * place
            weight = f"{block}{_NAMES[name]}.weight"
            found[weight] = packed
            # Outputs are divided by it: two thirds of the trits are not zero.
            found[f"{weight}_scale"] = torch.tensor([(inputs * 2 / 3) ** 0.5]).bfloat16()
        found[f"{block}input_layernorm.weight"] = norm(width)
        found[f"{block}post_attention_layernorm.weight"] = norm(width)
        found[f"{block}self_attn.attn_sub_norm.weight"] = norm(width)
        found[f"{block}mlp.ffn_sub_norm.weight"] = norm(shape.feed_forward)
    return found


def _config(shape: GenerationShape) -> dict[str, Any]:
    return {
        "architectures": ["BitNetForCausalLM"],
        "model_type": "bitnet",
        "hidden_size": shape.width,
        "intermediate_size": shape.feed_forward,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "vocab_size": shape.vocabulary,
        "hidden_act": "relu2",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": "bitnet", "linear_class": "bitlinear"},
    }


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    library: Any = Tokenizer(models.BPE(vocabulary, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(each, special=True) for each in CHAT_TOKENS])
    library.save(str(folder / "tokenizer.json"))
    _, begin, end = CHAT_TOKENS
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": begin,
        "eos_token": end,
        "chat_template": CHATML,
    }
    _write(folder / "tokenizer_config.json", settings)


def write_conversations(file: Path, conversations: int, words: int) -> None:
    """Write conversations of one question and one answer of random words."""
    draw = random.Random(0)
    lines = []
    for _ in range(conversations):
        texts = [" ".join(draw.choices(_WORDS, k=words)) for _ in range(2)]
        messages = [
            {"role": "user", "content": texts[0]},
            {"role": "assistant", "content": texts[1]},
        ]
        lines.append(json.dumps({"messages": messages}) + "\n")
    file.write_text("".join(lines), encoding="utf-8")


def _write(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def run(options: LargeOptions, session: Session) -> dict[str, Any]:
    """Write the model and the conversations, fine-tune, and measure the command from outside."""
    shape = SHAPES.get(options.shape)
    if shape is None or not shape.bitnet or not shape.tied:
        known = [name for name, each in SHAPES.items() if each.bitnet and each.tied]
        raise UsageProblem(
            f"shape: {options.shape!r} has not the norms of BitNet and a tied head",
            f"choose from {', '.join(known)}",
        )
    folder = session.folder
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "model"
    if not source.exists():
        session.say(f"{source}: writing {shape.weights():,} weights")
        write_model(source, shape)
    chats = folder / "chats.jsonl"
    write_conversations(chats, options.conversations, options.words)
    out = folder / "tuned"
    command = ["finetune", str(source), str(chats), "--out", str(out)]
    command += ["--steps", str(options.steps)]
    started = time.monotonic()
    facts = {**bench_facts([]), "threads": options.threads}
    peak = run_arb(command, options.threads, folder / "finetune.log").peak_bytes
    seconds = time.monotonic() - started
    report = json.loads((out / "run" / "result.json").read_text(encoding="utf-8"))
    return {
        "command": f"arb finetune MODEL chats.jsonl --out tuned --steps {options.steps}",
        "machine": {**facts, "load_average_at_end": load_average()},
        "what": shape.what,
        "weights": shape.weights(),
        "steps": options.steps,
        "tokens": report["tokens"],
        "tokens_per_second": report["tokens_per_second"],
        "peak_bytes": peak,
        "seconds": seconds,
        "source_bytes": sum(file.stat().st_size for file in source.iterdir()),
        "exported_bytes": sum(
            file.stat().st_size for file in (out / "hf").rglob("*") if file.is_file()
        ),
    }


def notes(result: Record) -> list[str]:
    """Return what was run, and where."""
    return [
        f"{result['what']}, random weights; {result['steps']} steps, {result['tokens']:,} tokens. "
        f"Import, evaluation before and after, training and export are one command, "
        f"`{result['command']}`, and took {result['seconds']:.0f} s. {describe(result['machine'])}"
    ]


TABLE = ResultTable(
    columns=(
        Column("weights", lambda row: f"{row['weights']:,}"),
        Column("folder, GB", lambda row: number(row["source_bytes"], 2, 1e-9)),
        Column("peak memory, GiB", lambda row: number(row["peak_bytes"], 2, 2.0**-30)),
        Column("tokens/s", lambda row: number(row["tokens_per_second"], 1)),
        Column("exported, GB", lambda row: number(row["exported_bytes"], 2, 1e-9)),
    ),
    records=lambda result: [result],
    notes=notes,
)
STUDY = Study(options=LargeOptions, run=run, table=TABLE)
