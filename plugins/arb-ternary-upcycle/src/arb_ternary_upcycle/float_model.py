"""A float decoder on disk, read block by block.

``model.safetensors`` in its folder is a file of the exporter ``safetensors``, which writes it whole
or not at all. Here tensors go by the paths of the decoder's modules, as in
``arb_ternary_interchange.decoder``: ``attention.query`` is the weight of that linear.

Shapes: ``B`` sequences, ``S`` positions, ``D`` width, ``V`` vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
import torch.nn.functional as F
from attrs import evolve, frozen
from torch import Tensor, nn

from arb_ternary.config.fields import to_plain
from arb_ternary.errors import ComponentError, DataError
from arb_ternary_interchange.safetensors.exporter import write_export
from arb_ternary_interchange.safetensors.importer import read_export
from arb_ternary_text.models.attention import make_positions
from arb_ternary_text.models.block import Block
from arb_ternary_text.models.config import FLOAT_PARTS, DecoderConfig
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_text.models.rms_norm import rms_norm
from arb_ternary_train.safetensors_file import SafetensorsFile
from arb_ternary_upcycle.stage_options import FloatDtype

DTYPES: Final[Mapping[FloatDtype, torch.dtype]] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
}

_Module = TypeVar("_Module", bound=nn.Module)

#: The file of a float model.
MODEL_FILE: Final = "model.safetensors"


def is_float_model(path: Path) -> bool:
    """Return whether the folder ``path`` has a complete float model."""
    return (path / MODEL_FILE).is_file()


def float_config(config: DecoderConfig) -> DecoderConfig:
    """Return the options of the float decoder that computes what a decoder of ``config`` does.

    Scale factors of updates and logits are 1, and there are no scales besides the weights:
    ``arb_ternary_interchange.decoder.weights.exported_weights`` has multiplied them in.
    """
    return evolve(
        config,
        float_parts=FLOAT_PARTS,
        activations="float",
        gradients="float",
        group_size=128,
        scale_rule="residual",
        embedding_scale_rule="residual",
        vote_bits=8,
        learned_norms=False,
        inner_gains=config.has_sub_norms or config.has_query_key_norm,
        stored_eps=False,
        linear_scales=False,
        row_scales=False,
        vector_trits=None,
        residual_scale=0,
        logit_scale=0,
        zero_head=False,
        zero_residual=False,
    )


def block_outline(config: DecoderConfig) -> dict[str, Tensor]:
    """Return the tensors of a block by name, on the device ``meta``."""
    with torch.device("meta"):
        return neutral_tensors(Block(config))


def neutral_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a float decoder, or of a part of it, by the names used in the files."""
    return {_neutral(key): tensor for key, tensor in module.state_dict().items()}


class FloatModel:
    """A float decoder on disk. Blocks are float32, whatever the file holds.

    Embedding, final norm and head are read at their first use and stay in memory, in the number
    format of the files.

    Attributes:
        path: its folder.
        config: the decoder's options; all parts and the activations are float.
        vocabulary_size: ``V``.
        tokenizer: ``to_json`` of its tokenizer; None if it has none.
        digest: SHA-256 in hexadecimal of what it is and was made from.
    """

    def __init__(self, path: Path) -> None:
        """Open the model in the folder ``path``.

        Raises:
            DataError: there is none, it is not complete, or it is damaged.
        """
        self.path = path
        if not is_float_model(path):
            raise DataError(f"{path}: no complete float model: it has no {MODEL_FILE}")
        self._file, content = read_export(path / MODEL_FILE)
        self.digest = hashlib.sha256(self._file.metadata["arb_ternary"].encode()).hexdigest()
        options = {key: value for key, value in content["model"].items() if key != "name"}
        self.config = DecoderConfig(**options)
        self.vocabulary_size: int = content["vocabulary_size"]
        self.tokenizer: Mapping[str, Any] | None = content.get("tokenizer")
        self._keys = {_neutral(key): key for key in self._file}
        self._ends: dict[str, Tensor] | None = None

    @property
    def dtype(self) -> FloatDtype:
        """Number format of the file."""
        outline = self._file.outline(self._keys["embedding"])
        return "bfloat16" if outline.dtype is torch.bfloat16 else "float32"

    # --- weights

    def ends(self) -> dict[str, Tensor]:
        """Return ``embedding``, ``final_norm`` and, unless tied, ``head``, in float32."""
        return {name: _wide(value) for name, value in self._end_tensors().items()}

    def block_weights(self, number: int) -> dict[str, Tensor]:
        """Return the tensors of a block by their names inside it; float ones in float32."""
        if not 0 <= number < self.config.layers:
            raise DataError(
                f"{self.path}: there is no block {number}; there are {self.config.layers}"
            )
        return self._read(f"blocks.{number}.")

    def weights(self) -> dict[str, Tensor]:
        """Return all tensors of the model by name; float ones in float32."""
        return self._read("")

    def _read(self, prefix: str) -> dict[str, Tensor]:
        return {
            name.removeprefix(prefix): _wide(self._file[key])
            for name, key in self._keys.items()
            if name.startswith(prefix)
        }

    def block(self, number: int) -> Block:
        """Return a block: float32, on the CPU, in evaluation mode, without gradients."""
        with torch.device("meta"):
            block = Block(self.config)
        return _filled(block, self.block_weights(number))

    def decoder(self) -> Decoder:
        """Return the whole model: float32, on the CPU, in evaluation mode, without gradients."""
        with torch.device("meta"):
            decoder = Decoder(self.config, self.vocabulary_size)
        return _filled(decoder, self.weights())

    # --- forward pass, on the device of its input

    @torch.no_grad()
    def embed(self, tokens_BS: Tensor) -> Tensor:
        """Return the residual stream before the first block, float32 ``[B, S, D]``."""
        return _wide(F.embedding(tokens_BS, self._end("embedding", tokens_BS.device)))

    @torch.no_grad()
    def through(self, block: Block, x_BSD: Tensor) -> Tensor:
        """Run ``block``, which has the sizes of this model's blocks, on whole sequences."""
        config = self.config
        positions = make_positions(
            config, x_BSD, start=0, total=x_BSD.size(1), window=config.sliding_window
        )
        y_BSD: Tensor = block(x_BSD, positions)
        return y_BSD

    @torch.no_grad()
    def normed(self, x_BSD: Tensor) -> Tensor:
        """Apply the final norm, in float32."""
        return rms_norm(x_BSD, self.config.norm_eps) * _wide(self._end("final_norm", x_BSD.device))

    def head(self, device: torch.device) -> Tensor:
        """Return the matrix of the head, ``[V, D]`` in the number format of the files."""
        return self._end("embedding" if self.config.tied else "head", device)

    # --- files

    def _end(self, name: str, device: torch.device) -> Tensor:
        ends = self._end_tensors()
        if ends[name].device != device:
            ends[name] = ends[name].to(device)
        return ends[name]

    def _end_tensors(self) -> dict[str, Tensor]:
        if self._ends is None:
            self._ends = {
                name: self._file[key]
                for name, key in self._keys.items()
                if not name.startswith("blocks.")
            }
        return self._ends


@frozen(eq=False)
class _FloatTensors:
    """Tensors by their names here, as ``TensorParts`` under the decoder's keys.

    Attributes:
        outline: the decoder's state dict.
        made: all tensors, some at a time.
    """

    outline: Mapping[str, Tensor]
    made: Iterable[Mapping[str, Tensor]]

    def outlines(self) -> Iterable[tuple[str, Tensor]]:
        return self.outline.items()

    def parts(self) -> Iterator[Mapping[str, Tensor]]:
        keys = {_neutral(key): key for key in self.outline}
        for tensors in self.made:
            yield {
                keys[name]: value.to(self.outline[keys[name]].dtype)
                for name, value in tensors.items()
            }


def write_float_model(
    path: Path,
    config: DecoderConfig,
    vocabulary_size: int,
    tokenizer: Mapping[str, Any] | None,
    tensors: Iterable[Mapping[str, Tensor]],
    *,
    dtype: FloatDtype = "float32",
    origin: Mapping[str, Any] | None = None,
) -> FloatModel:
    """Write a float decoder, unless the folder has one of the same arguments; open it.

    Args:
        path: the folder; it is created.
        config: options of the decoder; see ``float_config``.
        vocabulary_size: rows of the embedding.
        tokenizer: ``to_json`` of the tokenizer, or None.
        tensors: all tensors by name, some at a time; ``blocks.0.attention.query`` is the weight of
            that linear.
        dtype: number format of float tensors in the file.
        origin: what decides the tensors, plain JSON.

    Raises:
        ComponentError: a tensor is missing, or its shape is not the decoder's.
        ArbError: the file cannot be written.
    """
    metadata = {
        "model": {"name": "decoder", **to_plain(config)},
        "vocabulary_size": vocabulary_size,
        "origin": {"dtype": dtype, **(origin or {})},
    }
    if tokenizer is not None:
        metadata["tokenizer"] = dict(tokenizer)
    file = path / MODEL_FILE
    if file.is_file():
        found = SafetensorsFile(file).metadata.get("arb_ternary")
        if found == json.dumps(metadata, sort_keys=True):
            return FloatModel(path)
    if path.exists():
        shutil.rmtree(path)
    with torch.device("meta"):
        outline = Decoder(config, vocabulary_size).state_dict()
    for key, value in outline.items():
        if value.is_floating_point():
            outline[key] = value.to(DTYPES[dtype])
    written = write_export(file, _FloatTensors(outline, tensors), metadata)
    absent = sorted(outline.keys() - written.keys())
    if absent:
        file.unlink()
        raise ComponentError(f"{file}: not written: {', '.join(absent[:3])}")
    return FloatModel(path)


def _filled(module: _Module, tensors: Mapping[str, Tensor]) -> _Module:
    state = {key: tensors[_neutral(key)] for key in module.state_dict()}
    module.load_state_dict(state, assign=True)
    return module.eval().requires_grad_(False)


def _neutral(key: str) -> str:
    """Return the name of a tensor in the files from its key in a state dict."""
    return key.removesuffix(".weight")


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor
