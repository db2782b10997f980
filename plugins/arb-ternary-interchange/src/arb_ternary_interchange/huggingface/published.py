"""A model folder as the source of an import: its options, and its weights one at a time."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from arb_ternary.errors import DataError
from arb_ternary_interchange.decoder.published import ScaledTrits, part_shapes
from arb_ternary_interchange.huggingface.codes import TRITS_PER_BYTE, unpack
from arb_ternary_interchange.huggingface.dense_ternary import absmean_trits, ternary_parts
from arb_ternary_interchange.huggingface.folder import WeightFiles, model_folder
from arb_ternary_interchange.huggingface.model_config import ModelConfig, read_model_config
from arb_ternary_interchange.huggingface.tensor_names import hf_name, is_linear, neutral_names
from arb_ternary_interchange.huggingface.tokenizer_files import read_tokenizer

_FLOATS: Final = {
    "F64": torch.float32,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_PACKED: Final = "U8"
#: Rows that are looked at together.
_ROWS: Final = 1024


class HfModel:
    """A model folder of transformers, a ``PublishedModel``.

    Everything that its files say of sizes has been checked when it is built; no weight has been
    read.

    Attributes:
        folder: where it lies.
        config: what its ``config.json`` says.
        weights: its tensors.

    Raises:
        DataError: a file is damaged, or its tensors are not those of its config.
    """

    def __init__(self, source: Path) -> None:
        self.folder = model_folder(source)
        self.config: ModelConfig = read_model_config(self.folder / "config.json")
        self.weights = WeightFiles.open(self.folder)
        self._check_layers()
        layers = int(self.config.options["layers"])
        names = neutral_names(
            self.config.architecture, layers, tied=self.config.tied, biases=self.config.biases
        )
        self._names = dict.fromkeys(names)
        for name in self._names:
            self._check(name)

    @property
    def architecture(self) -> str:
        """Of the decoder that computes the same."""
        return self.config.architecture

    @property
    def options(self) -> Mapping[str, Any]:
        """Of that decoder, as far as the folder says."""
        return self.config.options

    @property
    def vocabulary_size(self) -> int:
        """Rows of the embedding."""
        return self.config.vocabulary_size

    @cached_property
    def tokenizer(self) -> Mapping[str, Any] | None:
        """Of the folder, as ``Tokenizer.to_json`` writes it; None when it has none that can be
        read.
        """
        return read_tokenizer(self.folder)

    @cached_property
    def unmapped(self) -> tuple[str, ...]:
        """What of the folder is left out, a sentence each."""
        used = {hf_name(name) for name in self._names} | set(self._zeros())
        used |= {
            hf_name(name) + "_scale"
            for name in self._names
            if is_linear(name) and self._scaled(name)
        }
        unused = [name for name in self.weights.files if name not in used]
        notes = list(self.config.notes)
        if unused:
            more = f" and {len(unused) - 5} more" if len(unused) > 5 else ""
            shown = ", ".join(name[:120] for name in unused[:5])
            notes.append(f"Tensors that a {self.config.model_type} does not use: {shown}{more}.")
        return tuple(notes)

    def names(self) -> Collection[str]:
        """Module paths of the tensors."""
        return self._names.keys()

    def check_values(self) -> None:
        """DataError where a tensor that the decoder has no place for is not zero."""
        for name in self._zeros():
            if bool(self.weights.read(name).any()):
                raise DataError(
                    f"{self.weights.files[name].path}: tensor {name!r} is not zero: of the "
                    "decoder's linears only query, key and value can have a bias"
                )

    def read(self, name: str) -> Tensor | ScaledTrits:
        """A tensor, from disk: trits and scale of what is ternary, and else a float tensor.

        Raises:
            DataError: it holds what no such tensor can.
        """
        stored = hf_name(name)
        entry = self.weights.files[stored].entries[stored]
        tensor = self.weights.read(stored)
        where = f"{self.weights.files[stored].path}: tensor {stored!r}"
        if entry.dtype == _PACKED:
            return ScaledTrits(unpack(tensor, where), self._scale(name), entry.shape[1])
        weight = tensor.to(_FLOATS[entry.dtype])
        if not all(bool(part.isfinite().all()) for part in torch.split(weight, _ROWS)):
            raise DataError(f"{where}: holds numbers that are not finite")
        if weight.dim() == 1:
            return weight.float()
        quantization = self.config.quantization
        if quantization is not None and quantization.online and self._converted(name):
            return absmean_trits(weight)
        parts = ternary_parts(weight)
        scaled = is_linear(name) and self._scaled(name)
        if parts is None:
            return weight.float() * self._scale(name) if scaled else weight
        return (
            ScaledTrits(parts.trits, parts.scale * self._scale(name), parts.group_size)
            if scaled
            else parts
        )

    def _check_layers(self) -> None:
        """DataError before ``layers`` names are made, where the files have not so many."""
        layers = int(self.config.options["layers"])
        last = hf_name(f"blocks.{layers - 1}.attention.query")
        if self.weights.entry(last) is None:
            raise DataError(
                f"{self.config.path}: 'num_hidden_layers' is {layers}, and there is no tensor "
                f"{last!r}"
            )

    def _shape(self, name: str) -> tuple[int, ...]:
        """The logical shape that the config gives a tensor."""
        known = part_shapes(self.config.options, self.vocabulary_size)
        return known[name.split(".", 2)[2] if name.startswith("blocks.") else name]

    def _check(self, name: str) -> None:
        stored = hf_name(name)
        entry = self.weights.entry(stored)
        if entry is None:
            raise DataError(
                f"{self.folder}: the tensor {stored!r} of a {self.config.model_type} is missing"
            )
        where = f"{self.weights.files[stored].path}: tensor {stored!r}"
        shape = self._shape(name)
        if entry.dtype == _PACKED:
            if not is_linear(name) or self.config.quantization is None:
                raise DataError(
                    f"{where}: is uint8: linears are packed alone, as 'quantization_config' of "
                    f"{self.config.path} says"
                )
            if entry.shape != (shape[0] // TRITS_PER_BYTE, *shape[1:]) or shape[0] % TRITS_PER_BYTE:
                raise DataError(
                    f"{where}: is {list(entry.shape)}; {list(shape)} trits packed along the rows, "
                    f"four a byte, are [{shape[0] / TRITS_PER_BYTE:g}, {shape[1]}]"
                )
            if not self._scaled(name):
                raise DataError(
                    f"{self.folder}: the tensor {stored + '_scale'!r}, the scale of packed trits, "
                    f"is missing"
                )
        elif entry.dtype not in _FLOATS:
            raise DataError(
                f"{where}: is {entry.dtype}; weights are {', '.join(_FLOATS)}, or packed as "
                f"{_PACKED}"
            )
        elif entry.shape != shape:
            raise DataError(
                f"{where}: is {list(entry.shape)}, and {self.config.path} makes it {list(shape)}"
            )

    def _scaled(self, name: str) -> bool:
        """Whether a linear has a scale; DataError when that is no number."""
        stored = hf_name(name) + "_scale"
        entry = self.weights.entry(stored)
        packed = self.weights.files[hf_name(name)].entries[hf_name(name)].dtype == _PACKED
        if entry is None or not (packed or self._converted(name)):
            return False
        if entry.dtype not in _FLOATS or entry.shape not in {(), (1,)}:
            raise DataError(
                f"{self.weights.files[stored].path}: tensor {stored!r}: must be one float number, "
                f"not {entry.dtype} {list(entry.shape)}"
            )
        return True

    def _scale(self, name: str) -> Tensor:
        """What a linear's trits are multiplied by, float32 ``[1]``."""
        stored = hf_name(name) + "_scale"
        value = float(self.weights.read(stored))
        if not 1e-30 < value < 1e30:
            raise DataError(
                f"{self.weights.files[stored].path}: tensor {stored!r}: {value} is no scale"
            )
        quantization = self.config.quantization
        return torch.tensor(
            [1 / value if quantization is not None and quantization.divides else value]
        )

    def _converted(self, name: str) -> bool:
        """Whether transformers makes a BitNet linear of a module."""
        quantization = self.config.quantization
        if quantization is None or not is_linear(name):
            return False
        module = hf_name(name).removesuffix(".weight")
        skipped = ("lm_head",) if quantization.skipped is None else quantization.skipped
        return not any(module.endswith(part) or module.startswith(f"{part}.") for part in skipped)

    def _zeros(self) -> list[str]:
        """Names of the biases that the decoder has no place for."""
        parts = ["self_attn.o_proj"] if self.config.output_bias else []
        parts += (
            [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
            if self.config.hidden_biases
            else []
        )
        layers = range(int(self.config.options["layers"]))
        wanted = (f"model.layers.{layer}.{part}.bias" for layer in layers for part in parts)
        return [name for name in wanted if name in self.weights.files]
