"""llama.cpp through its C functions, loaded with ctypes from an installed package.

The package is ``llama_cpp`` or ``xllamacpp`` (both PyPI). Only ``llama_decode`` and the choice of
the likeliest token are timed: no server, no sampler, no tokenizer.
"""

from __future__ import annotations

import ctypes
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from arb_ternary.errors import ArbError
from arb_ternary_bench.generation.gguf_file import BLOCK, BLOCK_BYTES
from arb_ternary_bench.generation.shapes import GenerationShape

INSTALL: Final = "pip install xllamacpp gguf"
#: Module, distribution, and the library in its folder that has llama.cpp's C functions.
_PLACES: Final = (
    ("llama_cpp", "llama-cpp-python", "lib/libllama.so"),
    ("xllamacpp", "xllamacpp", "xllamacpp.abi3.so"),
)
#: Tokens that llama.cpp computes at a time; its own default.
_AT_A_TIME: Final = 512


class _ModelParams(ctypes.Structure):
    """``struct llama_model_params`` with its defaults, larger than that of any version."""

    _fields_ = (("all", ctypes.c_byte * 512),)


class _ContextParams(ctypes.Structure):
    """``struct llama_context_params``: the first fields, which versions share, and more room.

    :meth:`LlamaCpp._check` finds versions that have other fields between them.
    """

    _fields_ = (
        ("n_ctx", ctypes.c_uint32),
        ("n_batch", ctypes.c_uint32),
        ("n_ubatch", ctypes.c_uint32),
        ("n_seq_max", ctypes.c_uint32),
        ("rest", ctypes.c_byte * 496),
    )


class _Batch(ctypes.Structure):
    """``struct llama_batch``."""

    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


_LOG: Final = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


def installed() -> tuple[Path, str] | None:
    """Return the library and the package it is from, or None."""
    for module, distribution, file in _PLACES:
        spec = find_spec(module)
        if spec is not None and spec.origin is not None:
            library = Path(spec.origin).parent / file
            if library.is_file():
                return library, f"{distribution} {version(distribution)}"
    return None


class LlamaCpp:
    """A file of random weights in llama.cpp, as a session of the bench.

    Args:
        file: the GGUF file.
        shape: of the model in it.
        kind: type of its matrices.
        threads: number of threads, for prompts and tokens alike.
    """

    def __init__(self, file: Path, shape: GenerationShape, kind: str, threads: int) -> None:
        self._vocabulary = shape.vocabulary
        self._threads = threads
        self.weight_bytes = shape.weights_read() // BLOCK * BLOCK_BYTES[kind]
        self._library = _load()
        self._messages: list[str] = []
        self._log = _LOG(
            lambda _level, text, _data: self._messages.append(
                (text or b"").decode(errors="replace")
            )
        )
        self._library.llama_log_set(self._log, None)
        self._library.llama_backend_init()
        params = self._library.llama_model_default_params()
        self._model = self._library.llama_model_load_from_file(str(file).encode(), params)
        if not self._model:
            raise ArbError(
                f"llama.cpp cannot load {file.name}", "".join(self._messages[-6:]).strip()
            )
        self._context: int | None = None

    def start(self, batch: int, length: int) -> None:
        """Forget what was read, and make room for ``batch`` sequences of ``length`` tokens."""
        self.close_context()
        params = self._library.llama_context_default_params()
        # llama.cpp rounds the context of each sequence up to whole blocks of 256 itself.
        params.n_ctx = batch * -(-length // 256) * 256
        params.n_seq_max = batch
        params.n_batch = params.n_ctx
        params.n_ubatch = min(_AT_A_TIME, params.n_ctx)
        self._context = self._library.llama_init_from_model(self._model, params)
        if not self._context:
            raise ArbError("llama.cpp cannot make a context", "".join(self._messages[-6:]).strip())
        self._library.llama_set_n_threads(self._context, self._threads, self._threads)
        self._check(params)
        self._batch = batch
        self._seen = 0

    def read(self, tokens_BS: NDArray[np.int64]) -> NDArray[np.int64]:
        """Read tokens of every sequence and return the likeliest next token of each, ``[B]``."""
        batch, count = tokens_BS.shape
        filled, keep = _batch(tokens_BS, self._seen)
        failed = self._library.llama_decode(self._context, filled)
        if failed:
            raise ArbError(
                f"llama.cpp: llama_decode failed with {failed}",
                "".join(self._messages[-6:]).strip(),
            )
        del keep
        self._seen += count
        return np.array([self._likeliest((row + 1) * count - 1) for row in range(batch)], np.int64)

    def close_context(self) -> None:
        """Free the context."""
        if self._context:
            self._library.llama_free(self._context)
            self._context = None

    def logits(self, place: int) -> NDArray[np.float32]:
        """Return a view of the logits ``[V]`` at a place of the batch that was read last."""
        found = self._library.llama_get_logits_ith(self._context, place)
        return np.ctypeslib.as_array(found, (self._vocabulary,))

    def _likeliest(self, place: int) -> int:
        return int(self.logits(place).argmax())

    def _check(self, params: _ContextParams) -> None:
        """Check that this version of llama.cpp has its fields where they were filled in.

        Raises:
            ArbError: it has not.
        """
        library = self._library
        context = self._context
        found = (
            library.llama_n_batch(context),
            library.llama_n_ubatch(context),
            library.llama_n_seq_max(context),
        )
        wanted = (params.n_batch, params.n_ubatch, params.n_seq_max)
        if found != wanted:
            raise ArbError(
                f"this version of llama.cpp lays its parameters out in another way: {found} for "
                f"{wanted}"
            )


def _batch(tokens_BS: NDArray[np.int64], first: int) -> tuple[_Batch, Any]:
    """Return the tokens as llama.cpp takes them, and the arrays that have to live as long.

    Logits are wanted of the last token of each row.
    """
    batch, count = tokens_BS.shape
    total = batch * count
    tokens = np.ascontiguousarray(tokens_BS, np.int32).reshape(-1)
    positions = np.tile(np.arange(first, first + count, dtype=np.int32), batch)
    counts = np.ones(total, np.int32)
    sequences = np.repeat(np.arange(batch, dtype=np.int32), count)
    wanted = np.zeros(total, np.int8)
    wanted[count - 1 :: count] = 1
    addresses = sequences.ctypes.data + 4 * np.arange(total, dtype=np.uint64)
    integers = ctypes.POINTER(ctypes.c_int32)
    made = _Batch(
        total,
        tokens.ctypes.data_as(integers),
        None,
        positions.ctypes.data_as(integers),
        counts.ctypes.data_as(integers),
        addresses.ctypes.data_as(ctypes.POINTER(integers)),
        wanted.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
    )
    return made, (tokens, positions, counts, sequences, wanted, addresses)


def _load() -> Any:
    found = installed()
    if found is None:
        raise ArbError("llama.cpp is not installed", INSTALL)
    library = ctypes.CDLL(str(found[0]))
    pointer = ctypes.c_void_p
    integer = ctypes.c_int32
    for name, result, arguments in (
        ("llama_backend_init", None, ()),
        ("llama_log_set", None, (_LOG, pointer)),
        ("llama_model_default_params", _ModelParams, ()),
        ("llama_model_load_from_file", pointer, (ctypes.c_char_p, _ModelParams)),
        ("llama_context_default_params", _ContextParams, ()),
        ("llama_init_from_model", pointer, (pointer, _ContextParams)),
        ("llama_set_n_threads", None, (pointer, integer, integer)),
        ("llama_n_batch", ctypes.c_uint32, (pointer,)),
        ("llama_n_ubatch", ctypes.c_uint32, (pointer,)),
        ("llama_n_seq_max", ctypes.c_uint32, (pointer,)),
        ("llama_decode", integer, (pointer, _Batch)),
        ("llama_get_logits_ith", ctypes.POINTER(ctypes.c_float), (pointer, integer)),
        ("llama_free", None, (pointer,)),
    ):
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library
