"""Files that llama.cpp itself has quantised are read as llama.cpp reads them."""

from __future__ import annotations

import lzma
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from arb_ternary_interchange.decoder.published import ScaledTrits
from arb_ternary_interchange.gguf.model import GgufModel
from arb_ternary_interchange.gguf.reader import GgufFile

FILES = Path(__file__).parent / "files"
TEXT = "To be, or not to be, that is the question"


@pytest.mark.parametrize(
    ("name", "embedding", "head"), [("tq1_0", "Q4_K", "Q6_K"), ("tq2_0", "Q6_K", None)]
)
def test_a_quantised_file_computes_the_same(
    tmp_path: Path,
    llama_cpp: Any,
    ours: Any,
    load: Any,
    name: str,
    embedding: str,
    head: str | None,
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(lzma.decompress((FILES / f"{name}.gguf.xz").read_bytes()))
    file = GgufFile(path)
    types = {info.name: info.type.name for info in file.tensors.values()}
    assert types["token_embd.weight"] == embedding
    assert types.get("output.weight") == head
    assert types["blk.0.attn_q.weight"] == types["blk.0.ffn_down.weight"] == name.upper()

    published = GgufModel(file)
    theirs = {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        for tensor in gguf.GGUFReader(path).tensors
    }
    down = published.read("blocks.0.feed_forward.down")
    assert isinstance(down, ScaledTrits)
    dense = down.trits.numpy() * down.scale.numpy()
    np.testing.assert_array_equal(dense, theirs["blk.0.ffn_down.weight"])
    for ours_name, their_name in (("embedding", "token_embd"), ("head", "output")):
        if ours_name == "embedding" or head is not None:
            found = published.read(ours_name)
            assert isinstance(found, torch.Tensor)
            np.testing.assert_array_equal(found.numpy(), theirs[f"{their_name}.weight"])

    model, found = load(path)
    assert found.notes == ()
    assert model.config.tied == (head is None)
    # llama.cpp rounds activations to 8 bits in blocks.
    wanted = llama_cpp(path).log_probabilities(TEXT)
    torch.testing.assert_close(ours(model, TEXT.encode(), "int8")[-1], wanted, atol=0.15, rtol=0)
