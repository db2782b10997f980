"""llama.cpp through its C functions: only ``llama_decode`` and the likeliest token are timed."""

from __future__ import annotations

import ctypes
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from _generation.shapes import GenerationShape
from arb_ternary.errors import ArbError
from harness.llama_cpp import load

#: Tokens that llama.cpp computes at a time; its own default.
_AT_A_TIME: Final = 512
#: Positions that llama.cpp rounds the context of each sequence up to.
_CONTEXT_BLOCK: Final = 256


class _ModelParams(ctypes.Structure):
    """``struct llama_model_params`` with its defaults, larger than that of any version."""

    _fields_ = (("all", ctypes.c_byte * 512),)


class _ContextParams(ctypes.Structure):
    """``struct llama_context_params``: the first fields, which versions share, and more room."""

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
        ("token", ctypes.c_void_p),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.c_void_p),
        ("n_seq_id", ctypes.c_void_p),
        ("seq_id", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
    )


class LlamaCpp:
    """A file of random weights in llama.cpp, as a session.

    Args:
        file: the GGUF file.
        shape: of the model in it.
        threads: number of threads, for prompts and tokens alike.
    """

    def __init__(self, file: str, shape: GenerationShape, threads: int) -> None:
        self._vocabulary = shape.vocabulary
        self._threads = threads
        pointer = ctypes.c_void_p
        integer = ctypes.c_int32
        self._library = load(
            [
                ("llama_backend_init", None, ()),
                ("llama_model_default_params", _ModelParams, ()),
                ("llama_model_load_from_file", pointer, (ctypes.c_char_p, _ModelParams)),
                ("llama_context_default_params", _ContextParams, ()),
                ("llama_init_from_model", pointer, (pointer, _ContextParams)),
                ("llama_set_n_threads", None, (pointer, integer, integer)),
                ("llama_n_seq_max", ctypes.c_uint32, (pointer,)),
                ("llama_decode", integer, (pointer, _Batch)),
                ("llama_get_logits_ith", ctypes.POINTER(ctypes.c_float), (pointer, integer)),
                ("llama_free", None, (pointer,)),
            ]
        )
        self._library.llama_backend_init()
        params = self._library.llama_model_default_params()
        self._model = self._library.llama_model_load_from_file(file.encode(), params)
        if not self._model:
            raise ArbError(f"llama.cpp: cannot load {file}")
        self._context: int | None = None

    def start(self, batch: int, length: int) -> None:
        """Forget what was read, and make room for ``batch`` sequences of ``length`` tokens."""
        library = self._library
        if self._context:
            library.llama_free(self._context)
        params = library.llama_context_default_params()
        params.n_ctx = batch * -(-length // _CONTEXT_BLOCK) * _CONTEXT_BLOCK
        params.n_seq_max = batch
        params.n_batch = params.n_ctx
        params.n_ubatch = min(_AT_A_TIME, params.n_ctx)
        self._context = library.llama_init_from_model(self._model, params)
        # A version with other fields would have read another number of sequences.
        if not self._context or library.llama_n_seq_max(self._context) != batch:
            raise ArbError("llama.cpp: it cannot make a context")
        library.llama_set_n_threads(self._context, self._threads, self._threads)
        self._seen = 0

    def read(self, tokens_BS: NDArray[np.int64]) -> NDArray[np.int64]:
        """Read tokens of every sequence and return the likeliest next token of each, ``[B]``."""
        batch, count = tokens_BS.shape
        total = batch * count
        tokens = np.ascontiguousarray(tokens_BS, np.int32).reshape(-1)
        positions = np.tile(np.arange(self._seen, self._seen + count, dtype=np.int32), batch)
        counts = np.ones(total, np.int32)
        sequences = np.repeat(np.arange(batch, dtype=np.int32), count)
        addresses = sequences.ctypes.data + 4 * np.arange(total, dtype=np.uint64)
        wanted = np.zeros(total, np.int8)
        wanted[count - 1 :: count] = 1
        arrays = (tokens, None, positions, counts, addresses, wanted)
        filled = _Batch(total, *(None if each is None else each.ctypes.data for each in arrays))
        failed = self._library.llama_decode(self._context, filled)
        if failed:
            raise ArbError(f"llama.cpp: llama_decode failed with {failed}")
        self._seen += count
        last = [self.logits((row + 1) * count - 1).argmax() for row in range(batch)]
        return np.array(last, np.int64)

    def logits(self, place: int) -> NDArray[np.float32]:
        """Return a view of the logits ``[V]`` at a place of the batch that was read last."""
        found: Any = self._library.llama_get_logits_ith(self._context, place)
        return np.ctypeslib.as_array(found, (self._vocabulary,))
