"""A model folder as a published model: its options, and its tensors by the decoder's paths."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch
from attrs import evolve
from torch import Tensor

from arb_ternary.errors import DataError
from arb_ternary_interchange.decoder.published import ScaledTrits
from arb_ternary_interchange.decoder.tensors import DecoderShape, is_linear
from arb_ternary_interchange.huggingface.dense_ternary import absmean_trits, ternary_parts
from arb_ternary_interchange.huggingface.folder import WeightFiles, model_folder
from arb_ternary_interchange.huggingface.known import note_of, unknown_files
from arb_ternary_interchange.huggingface.model_config import ModelConfig, read_model_config
from arb_ternary_interchange.huggingface.packing import TRITS_PER_BYTE, unpack
from arb_ternary_interchange.huggingface.tensors import HEAD, NAMES
from arb_ternary_interchange.huggingface.tokenizer_files import FoundTokenizer, read_tokenizer

#: The dtype of packed trits.
PACKED: Final = "U8"
#: The dtypes of weights that are read, and those in which they are looked at.
_FLOATS: Final = {
    "F64": torch.float32,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
#: Rows that are looked at together.
_ROWS: Final = 1024


class HfModel:
    """A model folder of transformers as a :class:`.PublishedModel`.

    When it is built, everything that its files say of sizes has been checked, and no weight has
    been read; only a head that ought to be the embedding has been compared with it.

    Attributes:
        folder: the folder.
        config: its ``config.json``.
        weights: its tensors.

    Raises:
        DataError: a file is damaged, or its tensors are not those of its config.
    """

    def __init__(self, source: Path) -> None:
        self.folder = model_folder(source)
        self.config: ModelConfig = read_model_config(self.folder / "config.json")
        self.architecture: str = self.config.architecture
        self.vocabulary_size: int = self.config.vocabulary_size
        self.weights = WeightFiles.open(self.folder)
        self.options: Mapping[str, Any] = self._options()
        self._check_layers()
        shape = DecoderShape.of_published(
            self.config.path, self.architecture, self.options, self.vocabulary_size
        )
        self._shapes = dict(shape.tensors(biases=self.config.biases))
        for name in self._shapes:
            self._check(name)

    @cached_property
    def tokenizer(self) -> Mapping[str, Any] | None:
        return self._tokenizer.state

    @cached_property
    def unmapped(self) -> tuple[str, ...]:
        used = set(self._unsupported_biases())
        for path in self._shapes:
            name = NAMES.name(path)
            used.add(name)
            if self._has_scale(path):
                used.add(f"{name}_scale")
        if self.options["tie_embeddings"]:
            used.add(NAMES.name("head"))  # the same numbers as the embedding
        tensors = [name for name in self.weights.files if name not in used]
        files = unknown_files(self.folder, self.weights.paths)
        return (
            *self.config.notes,
            *self._untied,
            *note_of(f"Tensors that a {self.config.model_type} does not use", tensors),
            *note_of("Files that are not used", files),
            *self._tokenizer.notes,
        )

    def names(self) -> Collection[str]:
        """Return the paths of all tensors."""
        return self._shapes.keys()

    def check_values(self) -> None:
        """Raise DataError if a bias that the decoder has no place for is not zero."""
        for name in self._unsupported_biases():
            if bool(self.weights.read(name).any()):
                raise DataError(
                    f"{self.weights.where(name)} is not zero: of the decoder's linears only query, "
                    f"key and value can have a bias"
                )

    def read(self, name: str) -> Tensor | ScaledTrits:
        """Read a tensor from disk: trits and scale of a ternary one, floats of any other.

        Raises:
            DataError: it holds what no such tensor can.
        """
        stored = NAMES.name(name)
        dtype = self.weights.files[stored].entries[stored].dtype
        tensor = self.weights.read(stored)
        where = self.weights.where(stored)
        if dtype == PACKED:
            return ScaledTrits(unpack(tensor, where), self._scale(name), tensor.shape[1])
        weight = tensor.to(_FLOATS[dtype])
        if not all(bool(part.isfinite().all()) for part in torch.split(weight, _ROWS)):
            raise DataError(f"{where}: holds numbers that are not finite")
        if weight.dim() == 1:
            return weight.float()

        quantization = self.config.quantization
        if quantization is not None and quantization.online and self._is_quantised(name):
            return absmean_trits(weight)
        found = ternary_parts(weight)
        if not self._has_scale(name):
            return weight if found is None else found
        scale = self._scale(name)
        if found is None:
            return weight.float() * scale
        return evolve(found, scale=found.scale * scale)

    @cached_property
    def _tokenizer(self) -> FoundTokenizer:
        return read_tokenizer(self.folder, self.config.model_type, self.vocabulary_size)

    def _options(self) -> Mapping[str, Any]:
        """Return the options of the decoder. A head that differs from the embedding is a head of
        its own, whatever the config says; transformers takes it so too.
        """
        options = self.config.options
        head = NAMES.name("head")
        embedding = NAMES.name("embedding")
        self._untied: tuple[str, ...] = ()
        if not options["tie_embeddings"] or head not in self.weights.files:
            return options
        if embedding in self.weights.files and self.weights.are_equal(head, embedding):
            return options
        self._untied = (
            f"'tie_word_embeddings' is true, and {head} differs from {embedding}: it is read as a "
            f"head of its own.",
        )
        return {**options, "tie_embeddings": False}

    # --- checks

    def _check_layers(self) -> None:
        """Raise DataError if the files have fewer layers than the config says, before names of so
        many are made.
        """
        layers = int(self.options["layers"])
        last = NAMES.name(f"blocks.{layers - 1}.attention.query")
        if self.weights.entry(last) is None:
            raise DataError(
                f"{self.config.path}: 'num_hidden_layers' is {layers}, and there is no tensor "
                f"{last!r}"
            )

    def _check(self, path: str) -> None:
        """Raise DataError unless the tensor at ``path`` is there with its shape."""
        stored = NAMES.name(path)
        entry = self.weights.entry(stored)
        if entry is None:
            raise DataError(
                f"{self.folder}: the tensor {stored!r} of a {self.config.model_type} is missing"
            )
        if entry.dtype == PACKED:
            self._check_packed(path, entry.shape)
            return
        where = self.weights.where(stored)
        if entry.dtype not in _FLOATS:
            raise DataError(
                f"{where}: is {entry.dtype}; weights are {', '.join(_FLOATS)}, or packed as "
                f"{PACKED}"
            )
        shape = self._shapes[path]
        if entry.shape != shape:
            raise DataError(
                f"{where}: is {list(entry.shape)}, and {self.config.path} makes it {list(shape)}"
            )

    def _check_packed(self, path: str, there: tuple[int, ...]) -> None:
        stored = NAMES.name(path)
        where = self.weights.where(stored)
        if not is_linear(path) or self.config.quantization is None:
            raise DataError(
                f"{where}: is uint8: only linears are packed, if 'quantization_config' of "
                f"{self.config.path} says so"
            )
        rows, columns = self._shapes[path]
        if there != (rows // TRITS_PER_BYTE, columns) or rows % TRITS_PER_BYTE:
            raise DataError(
                f"{where}: is {list(there)}; {[rows, columns]} trits packed along the rows, four "
                f"per byte, are [{rows / TRITS_PER_BYTE:g}, {columns}]"
            )
        if not self._has_scale(path):
            raise DataError(
                f"{self.folder}: the tensor {stored + '_scale'!r}, the scale of packed trits, is "
                f"missing"
            )

    # --- scales and biases

    def _has_scale(self, path: str) -> bool:
        """Whether the tensor at ``path`` has a scale; raises DataError if that is not a number."""
        stored = NAMES.name(path)
        name = f"{stored}_scale"
        entry = self.weights.entry(name)
        if entry is None or not is_linear(path):
            return False
        packed = self.weights.files[stored].entries[stored].dtype == PACKED
        if not packed and not self._is_quantised(path):
            return False
        if entry.dtype not in _FLOATS or entry.shape not in {(), (1,)}:
            raise DataError(
                f"{self.weights.where(name)}: must be one float number, not {entry.dtype} "
                f"{list(entry.shape)}"
            )
        return True

    def _scale(self, path: str) -> Tensor:
        """Return the factor of a linear's trits, float32 ``[1]``."""
        name = f"{NAMES.name(path)}_scale"
        value = float(self.weights.read(name))
        if not 1e-30 < value < 1e30:
            raise DataError(f"{self.weights.where(name)}: {value} is not a scale")
        quantization = self.config.quantization
        divides = quantization is not None and quantization.divides
        return torch.tensor([1 / value if divides else value])

    def _is_quantised(self, path: str) -> bool:
        """Whether transformers makes a BitNet linear of the module at ``path``."""
        quantization = self.config.quantization
        if quantization is None or not is_linear(path):
            return False
        module = NAMES.name(path).removesuffix(".weight")
        left = quantization.float_modules
        for part in (HEAD,) if left is None else left:
            if module.endswith(part) or module.startswith(f"{part}."):
                return False
        return True

    def _unsupported_biases(self) -> list[str]:
        """Return the names of the biases that the decoder has no place for."""
        modules = []
        if self.config.output_bias:
            modules.append("self_attn.o_proj")
        if self.config.hidden_biases:
            modules += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
        found = []
        for layer in range(int(self.options["layers"])):
            for module in modules:
                name = f"model.layers.{layer}.{module}.bias"
                if name in self.weights.files:
                    found.append(name)
        return found
