"""Memory of a model of two billion weights: import, three steps of fine-tuning, export, each a
process of its own.

The model has the shapes of BitNet b1.58 2B4T and random weights: packed linears with float scales,
an embedding in bfloat16; its gates are SILU, not ReLU^2, for GGUF files of that architecture have
no other. transformers writes its config and packs its trits; it is made one layer at a time. Needs
transformers, and 12 GB of disk::

    python plugins/arb-ternary-hf/studies/two_billion.py /tmp/two-billion

Each step prints its peak resident memory and its time; the script fails if one is above the limit.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

LIMIT_GIB = 8.0
SIZES = {
    "vocab_size": 128256,
    "hidden_size": 2560,
    "intermediate_size": 6912,
    "num_hidden_layers": 30,
    "num_attention_heads": 20,
    "num_key_value_heads": 5,
    "max_position_embeddings": 4096,
}
TOKENS = 256


def make(folder: Path, layers: int) -> None:
    """The folder, a file of weights for each layer."""
    import torch
    from safetensors.torch import save_file
    from transformers import BitNetConfig
    from transformers.integrations.bitnet import pack_weights

    from arb_ternary_hf.tokenizer_files import byte_definition

    torch.manual_seed(0)
    config = BitNetConfig(
        **{**SIZES, "num_hidden_layers": layers},
        hidden_act="silu",
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        dtype="bfloat16",
        architectures=["BitNetForCausalLM"],
        quantization_config={
            "quant_method": "bitnet",
            "linear_class": "bitlinear",
            "quantization_mode": "offline",
        },
    )
    config.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(byte_definition()))
    width = config.hidden_size
    hidden = config.intermediate_size
    keys = width // config.num_attention_heads * config.num_key_value_heads
    shapes = {
        **{
            f"self_attn.{name}_proj": (size, width)
            for name, size in (("q", width), ("k", keys), ("v", keys))
        },
        "self_attn.o_proj": (width, width),
        "mlp.gate_proj": (hidden, width),
        "mlp.up_proj": (hidden, width),
        "mlp.down_proj": (width, hidden),
    }
    norms = {
        "input_layernorm": width,
        "post_attention_layernorm": width,
        "self_attn.attn_sub_norm": width,
        "mlp.ffn_sub_norm": hidden,
    }
    placed: dict[str, str] = {}

    def save(name: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, folder / name, metadata={"format": "pt"})
        placed.update(dict.fromkeys(tensors, name))

    embedding = torch.randn(config.vocab_size, width, dtype=torch.bfloat16).mul_(width**-0.5)
    norm = torch.ones(width, dtype=torch.bfloat16)
    save(
        "model-ends.safetensors",
        {"model.embed_tokens.weight": embedding, "model.norm.weight": norm},
    )
    for layer in range(layers):
        tensors = {}
        for name, (rows, columns) in shapes.items():
            path = f"model.layers.{layer}.{name}.weight"
            tensors[path] = pack_weights(torch.randint(-1, 2, (rows, columns), dtype=torch.int8))
            # Divided by: outputs of unit variance, with two thirds of the trits not zero.
            tensors[f"{path}_scale"] = (
                torch.empty(1).uniform_(0.9, 1.1).mul_((2 * columns / 3) ** 0.5).bfloat16()
            )
        for name, size in norms.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = (
                torch.empty(size).uniform_(0.8, 1.2).bfloat16()
            )
        save(f"model-layer-{layer:02}.safetensors", tensors)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": placed})
    )


def measured(name: str, *command: str) -> float:
    """Run ``arb`` or this script; prints time and peak resident memory, in GiB, and returns the
    latter.
    """
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1"}
    start = time.perf_counter()
    process = subprocess.Popen(command, env=environment)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    peak = usage.ru_maxrss / 2**20
    print(
        f"{name}: {peak:.2f} GiB, {time.perf_counter() - start:.0f} s, exit {process.returncode}",
        flush=True,
    )
    if process.returncode:
        raise SystemExit(f"{name} failed: {' '.join(command)}")
    return peak


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--layers", type=int, default=SIZES["num_hidden_layers"])
    arguments.add_argument(
        "--only-make", action="store_true", help="write the model of transformers, and nothing else"
    )
    chosen = arguments.parse_args()
    root: Path = chosen.folder
    if chosen.only_make:
        make(root, chosen.layers)
        return
    root.mkdir(parents=True)
    source, first, tuned = (str(root / name) for name in ("source", "imported", "tuned"))
    (root / "source").mkdir()
    here = str(Path(__file__))
    layers = str(chosen.layers)
    arb = (str(Path(sys.executable).with_name("arb")),)
    measured(
        "made by transformers", sys.executable, here, source, "--only-make", "--layers", layers
    )
    hf = str(root / "hf")
    gguf = str(root / "model.gguf")
    train = (
        "train",
        f"{first}/config.yaml",
        "--init-from",
        first,
        "--run-dir",
        tuned,
        "--steps",
        "3",
    )
    changes = ("batch_size=1", f"block_size={TOKENS}", "warmup_steps=0", "eval_every=0")
    overrides = [word for change in changes for word in ("-o", f"phases.0.{change}")]
    packed = ("--format", "hf", "--layout", "packed", "-o", "dtype=bfloat16")
    peaks = {
        "import": measured("import", *arb, "import", source, first, "-o", "float_sources=ternary"),
        "three steps": measured("three steps", *arb, *train, *overrides),
        "export hf": measured("export hf", *arb, "export", tuned, hf, *packed),
        "export gguf": measured("export gguf", *arb, "export", tuned, gguf, "--format", "gguf"),
    }
    if above := [name for name, peak in peaks.items() if peak > LIMIT_GIB]:
        raise SystemExit(f"above {LIMIT_GIB} GiB: {', '.join(above)}")


if __name__ == "__main__":
    main()
