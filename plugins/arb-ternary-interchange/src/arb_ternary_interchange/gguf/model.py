"""A GGUF file as a published model: its options, and its tensors by the decoder's paths."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Any, Final

import torch
from attrs import evolve
from torch import Tensor

from arb_ternary.errors import DataError
from arb_ternary_interchange.decoder.published import ScaledTrits
from arb_ternary_interchange.decoder.tensors import DecoderShape, is_bias
from arb_ternary_interchange.gguf.decoding import GroupSize, is_ternary, read_tensor
from arb_ternary_interchange.gguf.known_keys import unused_keys
from arb_ternary_interchange.gguf.metadata import ArrayInFile
from arb_ternary_interchange.gguf.model_keys import GROUP_SIZE
from arb_ternary_interchange.gguf.reader import GgufFile, TensorInfo
from arb_ternary_interchange.gguf.tensors import (
    INTERLEAVED,
    NAMES,
    ROPE_FACTORS,
    from_interleaved,
    scale_name,
)
from arb_ternary_interchange.gguf.values import FORMATS
from arb_ternary_interchange.gguf.vocabulary import read_vocabulary

#: Activation of each architecture that is imported.
ARCHITECTURES: Final = {"llama": "swiglu", "qwen3": "swiglu", "arcee": "relu2", "bitnet": "swiglu"}

#: Keys under the architecture's name that make YaRN of any type of scaling, unless they have one of
#: these values.
_YARN: Final[dict[str, tuple[float, ...]]] = {
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (-1.0, 0.0),
}

_GROUP_SIZES: Final[dict[str, GroupSize]] = {
    "32": 32,
    "64": 64,
    "128": 128,
    "256": 256,
    "row": "row",
    "tensor": "tensor",
}


class GgufModel:
    """A GGUF file as a :class:`.PublishedModel`.

    Raises:
        DataError: the architecture is not one that is imported, a key is missing or contradicts
            another, or a tensor is missing or of another shape than the keys say.
    """

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._metadata = file.metadata
        self.architecture: str = self._metadata.one("general.architecture", str)
        if self.architecture not in ARCHITECTURES:
            raise DataError(
                f"{file.path}: the architecture is {self.architecture!r}",
                f"Imported are {', '.join(ARCHITECTURES)}.",
            )
        parts = self._metadata.get("split.count", 1)
        if parts != 1:
            raise DataError(
                f"{file.path}: it is one of {parts} files of a model",
                "Put them together: llama-gguf-split --merge.",
            )
        if self._key("expert_count", int, 0):
            raise DataError(f"{file.path}: the model has experts, which are not imported")
        self.options: Mapping[str, Any] = self._options()
        self._infos = self._find_tensors()
        self.vocabulary_size: int = self._infos["embedding"].shape[0]

    @property
    def tokenizer(self) -> Mapping[str, Any] | None:
        return self._vocabulary[0]

    @cached_property
    def unmapped(self) -> tuple[str, ...]:
        known = {info.name for info in self._infos.values()}
        known |= {scale_name(name) for name in known}
        known.add(ROPE_FACTORS)
        notes = [
            f"tensor {name} has no place in the decoder"
            for name in self._file.tensors
            if name not in known
        ]
        notes += unused_keys(self._metadata, self.architecture, self.options["activation"])
        return (*notes, *self._vocabulary[1])

    def names(self) -> Collection[str]:
        """Return the paths of all tensors."""
        return self._infos.keys()

    def read(self, name: str) -> Tensor | ScaledTrits:
        """Read one tensor, with its ``.scale`` applied and rows of queries and keys half-split.

        Raises:
            DataError: its type is not read, or a number in it is infinite or NaN.
        """
        info = self._infos[name]
        group_size = None if name == "embedding" else self.options.get("group_size")
        found = _times(read_tensor(self._file, info, group_size), self._scale(info))
        part = name.rpartition(".")[2]
        if self.architecture not in INTERLEAVED or part not in ("query", "key"):
            return found
        heads = self.options["heads" if part == "query" else "kv_heads"]
        rows = from_interleaved(info.shape[0], heads)
        if isinstance(found, Tensor):
            return found[rows]
        scale = found.scale[rows] if found.scale.dim() == 2 else found.scale
        return evolve(found, trits=found.trits[rows], scale=scale)

    @cached_property
    def _vocabulary(self) -> tuple[Mapping[str, Any] | None, tuple[str, ...]]:
        return read_vocabulary(self._metadata, self.vocabulary_size)

    # --- keys

    def _key(self, name: str, type_: type[Any], default: Any = None) -> Any:
        """Return the value of a key of the architecture. A list of equal values, one per layer,
        counts as that value.
        """
        key = f"{self.architecture}.{name}"
        value = self._metadata.get(key)
        if not isinstance(value, ArrayInFile):
            return self._metadata.one(key, type_, default)
        # A list longer than the tensors is not read at all.
        readable = len(value) <= len(self._file.tensors) and value.kind in FORMATS
        different = set(value) if readable else set()
        if len(different) != 1:
            raise DataError(
                f"{self._file.path}: {key!r} differs from layer to layer, which is not imported"
            )
        return different.pop()

    def _positive(self, key: str, default: float | None = None) -> float:
        value: float = self._key(key, float, default)
        if not 0 < value < math.inf:
            raise DataError(
                f"{self._file.path}: {self.architecture}.{key} is {value}; it has to be positive"
            )
        return value

    def _options(self) -> dict[str, Any]:
        path = self._file.path
        width = self._key("embedding_length", int)
        heads = self._key("attention.head_count", int)
        kv_heads = self._key("attention.head_count_kv", int, heads)
        if min(width, heads, kv_heads) < 1 or heads % kv_heads:
            raise DataError(
                f"{path}: {width} features, {heads} heads and {kv_heads} of keys do not make an "
                f"attention"
            )
        head_dim = self._key("attention.key_length", int, width // heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            if self._key(key, int, head_dim) != head_dim or head_dim < 2 or head_dim % 2:
                raise DataError(
                    f"{path}: {key} is not the {head_dim} features of a head, which have to be even"
                )
        options = {
            "width": width,
            "layers": self._key("block_count", int),
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "feed_forward": self._key("feed_forward_length", int),
            "activation": self._activation(),
            "max_length": self._key("context_length", int),
            "norm_eps": self._positive("attention.layer_norm_rms_epsilon"),
            "rotary_base": self._positive("rope.freq_base", 10000.0),
            "tie_embeddings": NAMES.name("head") not in self._file.tensors,
        }
        group_size = self._group_size()
        if group_size is not None:
            options["group_size"] = group_size
        scaling = self._rotary_scaling()
        if scaling != 1.0:
            options["rotary_scaling"] = scaling
        if ROPE_FACTORS in self._file.tensors:
            options["rotary_factors"] = self._rotary_factors(head_dim // 2)
        return options

    def _group_size(self) -> GroupSize | None:
        """Return the option of the decoder that was exported; None if the file does not have it, or
        has no ternary linear.
        """
        ternary = {name for name, info in self._file.tensors.items() if is_ternary(info)}
        if not ternary - {NAMES.name("embedding")}:
            return None
        return _GROUP_SIZES.get(self._metadata.one(GROUP_SIZE, str, ""))

    def _activation(self) -> str:
        written = self._key("hidden_activation", str, "")
        if self.architecture == "bitnet" and written == "relu2":
            return "reglu2"
        return ARCHITECTURES[self.architecture]

    def _rotary_scaling(self) -> float:
        """Return the factor by which all planes of rotation turn slower.

        As in llama.cpp, a factor without a type means linear scaling, ``rope.scale_linear`` is the
        older key of the factor, and 0 stands for 1.

        Raises:
            DataError: the type is one that the decoder does not compute.
        """
        kind = self._key("rope.scaling.type", str, "linear")
        if kind not in ("linear", "none"):
            raise self._without_rotation("rope.scaling.type", repr(kind))
        for key, neutral in _YARN.items():
            value = self._key(key, float, neutral[0])
            if value not in neutral:
                raise self._without_rotation(key, str(value))
        key = "rope.scaling.factor"
        if f"{self.architecture}.{key}" not in self._metadata:
            key = "rope.scale_linear"
        if kind == "none" or self._key(key, float, 0.0) == 0:
            return 1.0
        return self._positive(key)

    def _without_rotation(self, key: str, value: str) -> DataError:
        """Return the error of a key that asks for a rotation that the decoder does not compute."""
        return DataError(
            f"{self._file.path}: {self.architecture}.{key} is {value}",
            "The decoder computes no scaling and linear scaling. YaRN and longrope change with the "
            "length of a sequence, or scale attention too.",
        )

    # --- tensors

    def _rotary_factors(self, planes: int) -> list[float]:
        info = self._file.tensors[ROPE_FACTORS]
        if info.shape != (planes,):
            raise DataError(
                f"{self._file.path}: {ROPE_FACTORS} has the shape {info.shape} instead of "
                f"{(planes,)}"
            )
        factors = read_tensor(self._file, info)
        if isinstance(factors, ScaledTrits) or not bool((factors > 0).all()):
            raise DataError(f"{self._file.path}: {ROPE_FACTORS} has to hold positive numbers")
        return [float(factor) for factor in factors]

    def _scale(self, info: TensorInfo) -> float:
        name = scale_name(info.name)
        if name == info.name or name not in self._file.tensors:
            return 1.0
        scale = self._file.tensors[name]
        value = read_tensor(self._file, scale) if math.prod(scale.shape) == 1 else None
        if not isinstance(value, Tensor) or float(value) <= 0:
            raise DataError(f"{self._file.path}: tensor {name!r} has to be one positive number")
        return float(value)

    def _find_tensors(self) -> dict[str, TensorInfo]:
        """Return the tensors of the model by path.

        Memory for a model is allocated by its options. They must not promise more than the file
        holds.

        Raises:
            DataError: a tensor is missing, or of another shape than the keys say.
        """
        file = self._file
        layers = self.options["layers"]
        if not 1 <= layers <= len(file.tensors):
            raise DataError(f"{file.path}: it claims {layers} blocks, and has no tensors for them")
        embedding = file.tensors.get(NAMES.name("embedding"))
        rows = 0 if embedding is None else embedding.shape[0]
        shape = DecoderShape.of_published(file.path, self.architecture, self.options, rows)
        found = {}
        for path, wanted in shape.tensors():
            info = file.tensors.get(NAMES.name(path))
            if info is None:
                if is_bias(path):
                    continue
                raise DataError(f"{file.path}: the tensor of {path} is missing")
            if info.shape != wanted:
                raise DataError(
                    f"{file.path}: tensor {info.name!r} has the shape {info.shape}, and the keys "
                    f"say {wanted}"
                )
            found[path] = info
        return found


def _times(found: Tensor | ScaledTrits, factor: float) -> Tensor | ScaledTrits:
    if factor == 1.0:
        return found
    if isinstance(found, Tensor):
        return found * factor
    return evolve(found, scale=found.scale * torch.tensor(factor))
