"""GGUF files of random ternary weights for llama.cpp, written one tensor at a time.

Needs the package ``gguf`` (PyPI). Every matrix has the ternary type, embedding and head too, so
that llama.cpp reads as many trits as the others. The bench gives token ids, so that a tokenizer is
not needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from arb_ternary_bench.generation.shapes import GenerationShape

#: Weights that share a scale in TQ1_0 and TQ2_0; rows are whole blocks. Q2_0 has four scales.
BLOCK: Final = 256
#: Bytes of such a block, by type.
BLOCK_BYTES: Final = {"TQ1_0": 54, "TQ2_0": 66, "Q2_0": 72}
#: Numbers of types in a file.
_TYPES: Final = {"TQ1_0": 34, "TQ2_0": 35, "Q2_0": 42}
#: Weights that share a scale in Q2_0.
_Q2_0_BLOCK: Final = 64
#: Number of blocks that are drawn; the tensors of a file repeat them.
_DRAWN: Final = 1 << 12


def file_bytes(shape: GenerationShape, kind: str) -> int:
    """Return the bytes of the tensors in the file; the rest of it is small."""
    return shape.weights() // BLOCK * BLOCK_BYTES[kind]


def write_random_gguf(
    path: Path,
    shape: GenerationShape,
    kind: str,
    context: int,
    seed: int = 0,
    *,
    tokenizer: bool = False,
) -> None:
    """Write the file.

    Args:
        path: the file, which must not exist.
        shape: all inputs of its matrices must be multiples of :data:`BLOCK`.
        kind: ``TQ1_0``, ``TQ2_0`` or ``Q2_0``.
        context: the most positions of a sequence.
        seed: seed of the weights; a third of them is -1, 0 and 1 each.
        tokenizer: write one too, of made-up words, which servers need.
    """
    import gguf

    writer = gguf.GGUFWriter(path, "bitnet" if shape.bitnet else "llama")
    try:
        _describe(writer, shape, context)
        if tokenizer:
            _add_tokenizer(writer, shape.vocabulary)
        else:
            writer.add_tokenizer_model("none")
        names = _plan(writer, shape, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        blocks = _random_blocks(kind, seed)
        for rows, columns in names:
            if columns is None:
                writer.write_tensor_data(np.ones(rows, np.float32))
            else:
                writer.write_tensor_data(
                    np.resize(blocks, (rows * columns // BLOCK, blocks.shape[1]))
                )
    finally:
        writer.close()


def _describe(writer: Any, shape: GenerationShape, context: int) -> None:
    writer.add_context_length(context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_dimension_count(shape.width // shape.heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(shape.vocabulary)


def _add_tokenizer(writer: Any, vocabulary: int) -> None:
    """Write a tokenizer as SentencePiece has them: controls, bytes, then words."""
    from gguf import TokenType

    controls = ["<unk>", "<s>", "</s>"]
    tokens = [*controls, *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    words = vocabulary - len(tokens)
    tokens += [f"\u2581w{number}" for number in range(words)]
    kinds += [TokenType.NORMAL] * words
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(place) for place in range(vocabulary)])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def _plan(writer: Any, shape: GenerationShape, kind: str) -> list[tuple[int, int | None]]:
    """Announce every tensor; return rows and columns (None for a vector) in the written order."""
    planned: list[tuple[int, int | None]] = []

    def vector(name: str, features: int) -> None:
        writer.add_tensor_info(f"{name}.weight", (features,), np.dtype(np.float32), 4 * features)
        planned.append((features, None))

    def matrix(name: str, rows: int, columns: int) -> None:
        nbytes = rows * columns // BLOCK * BLOCK_BYTES[kind]
        # The package takes the number of a type that it does not know, with a dtype that is not
        # uint8, for which it would look up the sizes of blocks.
        dtype = np.dtype(np.int8)
        writer.add_tensor_info(
            f"{name}.weight", (rows, columns), dtype, nbytes, raw_dtype=_TYPES[kind]
        )
        planned.append((rows, columns))

    matrix("token_embd", shape.vocabulary, shape.width)
    for number in range(shape.layers):
        norms = {"attn_norm": shape.width, "ffn_norm": shape.width}
        if shape.bitnet:
            norms |= {"attn_sub_norm": shape.width, "ffn_sub_norm": shape.feed_forward}
        for name, features in norms.items():
            vector(f"blk.{number}.{name}", features)
        for name, rows, columns in shape.matrices():
            matrix(f"blk.{number}.{name}", rows, columns)
    vector("output_norm", shape.width)
    if not shape.tied:
        matrix("output", shape.vocabulary, shape.width)
    return planned


def _random_blocks(kind: str, seed: int) -> NDArray[np.uint8]:
    """Return random trits with the scale 1/32, ``[blocks, bytes]``."""
    import gguf

    trits = np.random.default_rng(seed).integers(-1, 2, (_DRAWN, BLOCK)).astype(np.float32)
    if kind == "Q2_0":  # which the package does not know
        return _q2_0_blocks(trits)
    trits[:, 0] = 1  # a block's scale is that of its largest weight
    packed: NDArray[np.uint8] = gguf.quantize(trits / 32, getattr(gguf.GGMLQuantizationType, kind))
    return packed


def _q2_0_blocks(trits: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return trits ``[blocks, BLOCK]`` as Q2_0: a float16 scale, then codes ``t + 1`` of 2 bits."""
    codes = (trits + 1).astype(np.uint8).reshape(-1, _Q2_0_BLOCK // 4, 4)
    packed = np.bitwise_or.reduce(codes << np.arange(0, 8, 2, dtype=np.uint8), axis=2)
    scales = np.full(packed.shape[0], 1 / 32, np.float16)[:, None].view(np.uint8)
    return np.concatenate([scales, packed], axis=1).reshape(-1, BLOCK_BYTES["Q2_0"])
