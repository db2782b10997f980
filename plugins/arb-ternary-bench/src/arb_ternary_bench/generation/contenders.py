"""Contenders: backends, with three formats of keys and values, llama.cpp in three formats,
and bfloat16.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from attrs import frozen

from arb_ternary_bench.generation.cases import Session
from arb_ternary_bench.generation.gguf_file import BLOCK, file_bytes
from arb_ternary_bench.generation.llama_cpp import INSTALL, LlamaCpp, installed
from arb_ternary_bench.generation.shapes import GenerationShape, GroupSize

if TYPE_CHECKING:
    from arb_ternary_text.models.cache import CacheNumbers

#: llama.cpp's types by the names of their contenders.
LLAMA_CPP: Final = {"tq2_0": "TQ2_0", "q2_0": "Q2_0", "tq1_0": "TQ1_0"}
BFLOAT16: Final = "bfloat16"
#: Ends the name of a backend whose keys and values are kept as the model computes them, or as int8.
#: Without an end they are kept in bfloat16.
CACHES: Final[dict[str, CacheNumbers]] = {"/float-cache": "float", "/int8-cache": "int8"}
#: Bytes of Python, libraries, and what a pass computes without keys and values.
_ROOM: Final = 3 << 29


def split_cache(name: str) -> tuple[str, str]:
    """Return the name of a backend and the one of :data:`CACHES` that follows it, or nothing."""
    for ending in CACHES:
        if name.endswith(ending):
            return name.removesuffix(ending), ending
    return name, ""


@frozen(kw_only=True)
class Contender:
    """A contender.

    Attributes:
        name: of a backend, which one of :data:`CACHES` may follow, of :data:`LLAMA_CPP`, or
            :data:`BFLOAT16`.
        group_size: weights that share an exponent, on a backend.
        threads: number of threads that it computes with.
    """

    name: str
    group_size: GroupSize
    threads: int

    @property
    def backend(self) -> str | None:
        """The backend, or None."""
        if self.name in (*LLAMA_CPP, BFLOAT16):
            return None
        return split_cache(self.name)[0]

    @property
    def numbers(self) -> CacheNumbers:
        """The format in which a backend keeps keys and values."""
        return CACHES.get(split_cache(self.name)[1], "bfloat16")

    @property
    def title(self) -> str:
        """Its name in the table."""
        if self.name in LLAMA_CPP:
            return f"llama.cpp {LLAMA_CPP[self.name]}"
        if self.name == BFLOAT16:
            return "torch bfloat16"
        if self.numbers == "bfloat16":
            return self.name
        return f"{self.backend}, cache of {self.numbers}"


def missing(name: str) -> str | None:
    """Return why a contender cannot take part on this machine, or None."""
    if name not in LLAMA_CPP:
        return None
    for module in ("gguf",) if installed() else ("xllamacpp", "gguf"):
        if find_spec(module) is None:
            return f"{module} is not installed: {INSTALL}"
    return None


def obstacle(contender: Contender, shape: GenerationShape) -> str | None:
    """Return why a contender cannot hold the shape, or None."""
    if contender.name not in LLAMA_CPP:
        return None
    inputs = {columns for _, _, columns in shape.matrices()}
    odd = sorted(columns for columns in inputs if columns % BLOCK)
    if not odd:
        return None
    return f"its rows are blocks of {BLOCK} weights, and {odd[0]} is not a multiple"


def needed_bytes(contender: Contender, shape: GenerationShape, length: int, batch: int) -> int:
    """Estimate the memory of a process, for ``batch`` sequences of ``length`` tokens."""
    cached = 2 * shape.layers * batch * length * shape.key_width
    if contender.name in LLAMA_CPP:
        return _ROOM + file_bytes(shape, LLAMA_CPP[contender.name]) + 2 * cached
    # While a cache grows there are two of it.
    if contender.name == BFLOAT16:
        return _ROOM + 2 * shape.weights() + 2 * 2 * cached // shape.layers + 2 * cached
    group = shape.width if contender.group_size == "row" else contender.group_size
    largest = 4 * shape.width * max(shape.vocabulary, shape.feed_forward)
    if contender.numbers == "int8":
        # One layer is decoded to floats, where modules run; each head of at least 32 features has a
        # scale.
        cached = round((1 + 1 / 8 + 2 * 4 / shape.layers) * cached)
    else:
        cached *= 2 if contender.numbers == "bfloat16" else 4
    return _ROOM + round(shape.weights() * (1 / 4 + 2 / group)) + largest + cached


def open_session(
    contender: Contender, shape: GenerationShape, length: int, file: Path | None
) -> Session:
    """Load a contender, or make its weights.

    Args:
        contender: who.
        shape: of the model.
        length: the most tokens of a sequence.
        file: for llama.cpp, a file of
            :func:`~arb_ternary_bench.generation.gguf_file.write_random_gguf`.
    """
    if contender.name in LLAMA_CPP:
        assert file is not None
        return LlamaCpp(file, shape, LLAMA_CPP[contender.name], contender.threads)
    import torch

    from arb_ternary_bench.generation.decoders import (
        DecoderSession,
        bfloat16_decoder,
        ternary_decoder,
    )

    torch.set_num_threads(contender.threads)
    if contender.backend is None:
        return DecoderSession(bfloat16_decoder(shape, length))
    return DecoderSession(
        ternary_decoder(shape, length, contender.group_size, contender.backend), contender.numbers
    )
