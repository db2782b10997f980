"""The exporter ``gguf``: a trained decoder as a file for llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from attrs import evolve
from numpy.typing import NDArray
from torch import Tensor, nn

from arb_ternary.errors import ConfigError
from arb_ternary_interchange.decoder.architecture import architecture_of
from arb_ternary_interchange.decoder.weights import TernaryWeight, exported_weights
from arb_ternary_interchange.gguf.chunks import chunks, row_chunks
from arb_ternary_interchange.gguf.config import GgufConfig
from arb_ternary_interchange.gguf.exact import block_exponents, choose_type
from arb_ternary_interchange.gguf.float_blocks import FLOAT_TYPES, encode_floats
from arb_ternary_interchange.gguf.linear_scales import gains_of_scales, is_in_gain
from arb_ternary_interchange.gguf.model_keys import check_options, file_type, model_keys
from arb_ternary_interchange.gguf.names import ROPE_FACTORS, scale_name, tensor_name
from arb_ternary_interchange.gguf.rotary_rows import INTERLEAVED, to_interleaved
from arb_ternary_interchange.gguf.tensor_types import F32, TensorType
from arb_ternary_interchange.gguf.trit_blocks import encode_trits
from arb_ternary_interchange.gguf.vocabulary import vocabulary_keys
from arb_ternary_interchange.gguf.writer import PlannedTensor, write_gguf
from arb_ternary_text.models.decoder import Decoder


class GgufExporter:
    """Writes a decoder whose architecture llama.cpp knows.

    Args:
        config: the options.
    """

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
        planned = [*_rope_factors(model), *_Weights(model, architecture).plan(self._config)]
        counts: dict[TensorType, int] = {}
        for tensor in planned:
            if len(tensor.shape) > 1:
                counts[tensor.type] = counts.get(tensor.type, 0) + int(np.prod(tensor.shape))
        write_gguf(destination, {**keys, "general.file_type": file_type(counts)}, planned)


def build(config: GgufConfig) -> GgufExporter:
    """Factory of the exporter ``gguf``."""
    return GgufExporter(config)


class _Weights:
    """The tensors of a file, made when they are written: of all weights there is never a second
    copy in memory.
    """

    def __init__(self, model: Decoder, architecture: str) -> None:
        self._model = model
        self._architecture = architecture
        self._stream: Iterator[tuple[str, TernaryWeight | Tensor]] = iter(())
        self._gains: dict[str, float] = {}

    def plan(self, config: GgufConfig) -> list[PlannedTensor]:
        """Names, shapes and types; the bytes come from a second pass, in the same order."""
        tensors: list[PlannedTensor] = []
        scales: dict[str, float] = {}
        for path, weight in exported_weights(self._model):
            name = tensor_name(path)
            kind = choose_type(name, weight, config.type, config.float_type)
            shape = tuple(weight.shape) if isinstance(weight, Tensor) else tuple(weight.trits.shape)
            tensors.append(PlannedTensor(name, shape, kind, partial(self._bytes, path, kind)))
            if isinstance(weight, TernaryWeight) and weight.scale != 1:
                scales[path] = weight.scale
        self._gains = gains_of_scales(scales, self._architecture)
        self._stream = exported_weights(self._model)
        left = {
            path: scale
            for path, scale in scales.items()
            if not is_in_gain(path, self._architecture)
        }
        return [
            *tensors,
            *(_floats(scale_name(tensor_name(path)), [scale]) for path, scale in left.items()),
        ]

    def _bytes(self, path: str, kind: TensorType) -> Iterator[NDArray[np.uint8]]:
        found, weight = next(self._stream)
        if found != path:
            raise RuntimeError(
                f"the weights of the model come in another order: {found} instead of {path}"
            )
        weight = self._in_file_order(path, weight)
        if isinstance(weight, Tensor):
            values = weight * self._gains[path] if path in self._gains else weight
            yield from (
                encode_floats(part, kind)
                for part in chunks(values.view(-1, values.shape[-1]).numpy())
            )
            return
        exponents = None if kind in FLOAT_TYPES else block_exponents(weight, kind.block)
        for chunk in row_chunks(*weight.trits.shape):
            if exponents is None:
                yield encode_floats(evolve(weight.rows(chunk), scale=1.0).dense().numpy(), kind)
            else:
                factors = None if weight.row_scale is None else weight.row_scale[chunk].numpy()
                yield encode_trits(weight.trits[chunk].numpy(), exponents[chunk], kind, factors)

    def _in_file_order(self, path: str, weight: TernaryWeight | Tensor) -> TernaryWeight | Tensor:
        last = path.rsplit(".", 1)[-1]
        if self._architecture not in INTERLEAVED or last not in ("query", "key"):
            return weight
        heads = self._model.config.heads if last == "query" else self._model.config.key_heads
        rows = to_interleaved(heads * self._model.config.key_features, heads)
        return weight[rows] if isinstance(weight, Tensor) else weight.rows(rows)


def _rope_factors(model: Decoder) -> list[PlannedTensor]:
    factors = model.config.rotary_factors
    return [] if factors is None else [_floats(ROPE_FACTORS, list(factors))]


def _floats(name: str, numbers: list[float]) -> PlannedTensor:
    values = np.asarray(numbers, np.float32)[None]
    return PlannedTensor(name, (len(numbers),), F32, lambda: [encode_floats(values, F32)])
