"""The exporter ``gguf``: a trained decoder as a file for llama.cpp."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from arb_ternary.errors import ConfigError
from arb_ternary_interchange.decoder.architecture import architecture_of
from arb_ternary_interchange.decoder.weights import weight_paths
from arb_ternary_interchange.gguf.blocks import chunks, encode_floats, encode_trits, row_chunks
from arb_ternary_interchange.gguf.model_keys import check_options, file_type, model_keys
from arb_ternary_interchange.gguf.special_tokens import END_KEYS
from arb_ternary_interchange.gguf.tensor_types import F32, FLOAT_TYPES, TensorType
from arb_ternary_interchange.gguf.tensors import ROPE_FACTORS, FileTensors, scale_name
from arb_ternary_interchange.gguf.type_choice import block_exponents, choose_type
from arb_ternary_interchange.gguf.vocabulary import vocabulary_keys
from arb_ternary_interchange.gguf.writer import PlannedTensor, write_gguf
from arb_ternary_interchange.options import GgufConfig
from arb_ternary_text.data.tokenizers import from_json, special_tokens, token_text
from arb_ternary_text.models.decoder import Decoder


class GgufExporter:
    """Writes a decoder whose architecture llama.cpp knows."""

    writes_accumulators = False

    def __init__(self, config: GgufConfig) -> None:
        self._config = config

    def export(self, model: nn.Module, destination: Path, metadata: Mapping[str, Any]) -> None:
        """Write ``model`` to the file ``destination``, one tensor at a time.

        Raises:
            ConfigError: llama.cpp computes no such model, or a chosen type cannot hold a tensor.
            DataError: a GGUF file cannot hold the tokenizer.
            ArbError: the file cannot be written.
        """
        if not isinstance(model, Decoder):
            raise ConfigError(
                f"model: a GGUF file holds a decoder, not a {type(model).__name__}",
                "Export it with `--format safetensors`.",
            )
        architecture = architecture_of(model.config)
        check_options(model.config, architecture)
        keys = model_keys(model.config, architecture, model.vocabulary_size, str(metadata["name"]))
        keys |= vocabulary_keys(metadata.get("tokenizer"), model.vocabulary_size)
        planned = self._plan(model, architecture)
        weights: Counter[TensorType] = Counter()
        for tensor in planned:
            if len(tensor.shape) > 1:
                weights[tensor.type] += math.prod(tensor.shape)
        write_gguf(destination, {**keys, "general.file_type": file_type(weights)}, planned)

    def unmapped(self, metadata: Mapping[str, Any]) -> tuple[str, ...]:
        """Name the tokens that end a text for which a file has no key."""
        state = metadata.get("tokenizer")
        if state is None or state.get("kind") != "language":
            return ()
        tokenizer = from_json(state)
        ends = special_tokens(tokenizer).eos[len(END_KEYS) :]
        if not ends:
            return ()
        lost = ", ".join(str(token_text(tokenizer, end)) for end in ends)
        return (f"a GGUF file names {len(END_KEYS)} tokens that end a text; left out: {lost}",)

    def _plan(self, model: Decoder, architecture: str) -> list[PlannedTensor]:
        """Return names, shapes and types. The bytes of a tensor are made when it is written."""
        tensors = FileTensors(model, architecture)
        planned = []
        if model.config.rotary_factors is not None:
            planned.append(_vector(ROPE_FACTORS, list(model.config.rotary_factors)))
        scales = []
        for path in weight_paths(model):
            tensor = tensors.at(path)
            values = tensor.values
            kind = choose_type(tensor.name, values, self._config)
            shape = tuple(values.shape if isinstance(values, Tensor) else values.trits.shape)
            encode = partial(_encoded, tensors, path, kind)
            planned.append(PlannedTensor(tensor.name, shape, kind, encode))
            if tensor.scale != 1.0:
                scales.append(_vector(scale_name(tensor.name), [tensor.scale]))
        return planned + scales


def _encoded(tensors: FileTensors, path: str, kind: TensorType) -> Iterator[NDArray[np.uint8]]:
    """Yield the bytes of a tensor, some rows at a time."""
    values = tensors.at(path).values
    if isinstance(values, Tensor):
        for part in chunks(values.view(-1, values.shape[-1]).numpy()):
            yield encode_floats(part, kind)
        return
    exponents = None if kind in FLOAT_TYPES else block_exponents(values, kind.block)
    for some in row_chunks(*values.trits.shape):
        if exponents is None:
            yield encode_floats(values.rows(some).dense().numpy(), kind)
            continue
        factors = None if values.row_scale is None else values.row_scale[some].numpy()
        yield encode_trits(values.trits[some].numpy(), exponents[some], kind, factors)


def _vector(name: str, numbers: list[float]) -> PlannedTensor:
    values = np.asarray(numbers, np.float32)[None]
    return PlannedTensor(name, (len(numbers),), F32, lambda: [encode_floats(values, F32)])
