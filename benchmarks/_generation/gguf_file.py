"""GGUF files of random ternary weights for llama.cpp.

Needs the package ``gguf`` (PyPI). Every matrix has the ternary type, embedding and head too, so
that llama.cpp reads as many trits as the others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from _generation.shapes import GenerationShape
from arb_ternary_text.data.train_tokenizer import CHAT_TOKENS, CHATML

#: Weights that share a scale in both types; rows are whole blocks.
BLOCK: Final = 256
#: Bytes of such a block, by type.
BLOCK_BYTES: Final = {"TQ1_0": 54, "TQ2_0": 66}
#: Number of blocks that are drawn; the tensors of a file repeat them.
_DRAWN: Final = 1 << 12


def write_random_gguf(
    path: Path, shape: GenerationShape, kind: str, context: int, *, tokenizer: bool = False
) -> None:
    """Write the file.

    Args:
        path: the file, which must not exist.
        shape: all inputs of its matrices must be multiples of :data:`BLOCK`.
        kind: ``TQ1_0`` or ``TQ2_0``.
        context: the most positions of a sequence.
        tokenizer: write one too, of made-up words, which servers need.
    """
    import gguf

    writer = gguf.GGUFWriter(path, "bitnet" if shape.bitnet else "llama")
    writer.add_context_length(context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_dimension_count(shape.width // shape.heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(shape.vocabulary)
    if tokenizer:
        _add_tokenizer(writer, shape.vocabulary)
    else:
        writer.add_tokenizer_model("none")
    _add_tensors(writer, shape, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: Any, vocabulary: int) -> None:
    """Add a tokenizer of bytes with the template of ChatML; the other tokens are made up."""
    from gguf import TokenType
    from tokenizers.pre_tokenizers import ByteLevel

    bytes_and_pair = [*sorted(ByteLevel.alphabet()), "th"]
    words = vocabulary - len(bytes_and_pair) - len(CHAT_TOKENS)
    tokens = [*bytes_and_pair, *CHAT_TOKENS, *(f"[{number}]" for number in range(words))]
    kinds = [TokenType.NORMAL] * vocabulary
    for token in CHAT_TOKENS:
        kinds[tokens.index(token)] = TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(tokens.index(CHAT_TOKENS[1]))
    writer.add_eos_token_id(tokens.index(CHAT_TOKENS[2]))
    writer.add_chat_template(CHATML)


def _add_tensors(writer: Any, shape: GenerationShape, kind: str) -> None:
    import gguf

    blocks = _random_blocks(kind)
    # Matrices of one size are one array, so that the memory of a block suffices.
    arrays: dict[tuple[int, int], NDArray[np.uint8]] = {}

    def matrix(name: str, rows: int, columns: int) -> None:
        if (rows, columns) not in arrays:
            size = (rows, columns // BLOCK * BLOCK_BYTES[kind])
            arrays[rows, columns] = np.resize(blocks, size)
        number = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(f"{name}.weight", arrays[rows, columns], raw_dtype=number)

    def vector(name: str, features: int) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(features, np.float32))

    matrix("token_embd", shape.vocabulary, shape.width)
    for number in range(shape.layers):
        block = f"blk.{number}"
        vector(f"{block}.attn_norm", shape.width)
        vector(f"{block}.ffn_norm", shape.width)
        if shape.bitnet:
            vector(f"{block}.attn_sub_norm", shape.width)
            vector(f"{block}.ffn_sub_norm", shape.feed_forward)
        for name, rows, columns in shape.matrices():
            matrix(f"{block}.{name}", rows, columns)
    vector("output_norm", shape.width)
    if not shape.tied:
        matrix("output", shape.vocabulary, shape.width)


def _random_blocks(kind: str) -> NDArray[np.uint8]:
    """Return random trits with the scale 1/32, ``[blocks, bytes]``."""
    import gguf

    trits = np.random.default_rng(0).integers(-1, 2, (_DRAWN, BLOCK)).astype(np.float32)
    trits[:, 0] = 1  # a block's scale is that of its largest weight
    packed: NDArray[np.uint8] = gguf.quantize(trits / 32, gguf.GGMLQuantizationType[kind])
    return packed
