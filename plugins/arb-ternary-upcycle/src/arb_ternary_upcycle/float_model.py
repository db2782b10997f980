"""A float decoder on disk, read block by block.

* ``model.json``: options of the decoder, vocabulary, tokenizer, dtype, digest. It is written last,
  so that a folder that has it is complete.
* ``ends.safetensors``: ``embedding``, ``final_norm`` and, unless tied, ``head``.
* ``block-00000.safetensors`` and so on: the tensors of a block.

Tensors go by the paths of the decoder's modules, as in ``arb_ternary_interchange.decoder``:
``attention.query`` is the weight of that linear. Shapes: ``B`` sequences, ``S`` positions, ``D``
width, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
import torch.nn.functional as F
from attrs import evolve
from torch import Tensor, nn

from arb_ternary.errors import ArbError, DataError
from arb_ternary_text.models.attention import make_positions
from arb_ternary_text.models.block import Block
from arb_ternary_text.models.config import FLOAT_PARTS, DecoderConfig
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_text.models.rms_norm import rms_norm
from arb_ternary_train.safetensors_file import SafetensorsFile
from arb_ternary_upcycle.stage_options import FloatDtype
from arb_ternary_upcycle.store import read_json

DTYPES: Final[Mapping[FloatDtype, torch.dtype]] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
}

_Module = TypeVar("_Module", bound=nn.Module)

FORMAT: Final = "arb-ternary-float-model"
VERSION: Final = 1
MODEL_FILE: Final = "model.json"
ENDS_FILE: Final = "ends.safetensors"


def block_file(number: int) -> str:
    """Return the name of a block's file."""
    return f"block-{number:05d}.safetensors"


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


def ends_outline(config: DecoderConfig, vocabulary_size: int) -> dict[str, Tensor]:
    """Return the tensors outside the blocks by name, on the device ``meta``."""
    with torch.device("meta"):
        return neutral_tensors(Decoder(config, vocabulary_size, blocks=nn.ModuleList()))


def neutral_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a float decoder, or of a part of it, by the names used in the files."""
    return {_neutral(key): tensor for key, tensor in module.state_dict().items()}


class FloatModel:
    """A float decoder on disk. Blocks and logits are float32, whatever the files hold.

    Embedding, final norm and head are read at their first use and stay in memory, in the number
    format of the files.

    Attributes:
        path: its folder.
        config: the decoder's options; all parts and the activations are float.
        vocabulary_size: ``V``.
        tokenizer: ``to_json`` of its tokenizer; None if it has none.
        dtype: number format of the files.
        digest: SHA-256 in hexadecimal of the whole model.
    """

    def __init__(self, path: Path, content: Mapping[str, Any]) -> None:
        self.path = path
        self.config = DecoderConfig(**content["decoder"])
        self.vocabulary_size: int = content["vocabulary_size"]
        self.tokenizer: Mapping[str, Any] | None = content["tokenizer"]
        self.dtype: FloatDtype = content["dtype"]
        self.digest: str = content["digest"]
        self._ends: dict[str, Tensor] | None = None

    @classmethod
    def open(cls, path: Path) -> FloatModel:
        """Open the model in the folder ``path``.

        Raises:
            DataError: there is none, it is not complete, or its description is damaged.
        """
        file = path / MODEL_FILE
        if not file.exists():
            raise DataError(f"{path}: no complete float model: it has no {MODEL_FILE}")
        try:
            content = read_json(file)
        except ArbError as error:
            raise DataError(error.what) from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise DataError(f"{file}: not a {FORMAT}")
        if content.get("version") != VERSION:
            raise DataError(f"{file}: {FORMAT} of version {content.get('version')}, not {VERSION}")
        try:
            return cls(path, content)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{file}: damaged: {error}") from error

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
        stored = SafetensorsFile(self.path / block_file(number))
        return {name: _wide(value) for name, value in stored.items()}

    def weights(self) -> dict[str, Tensor]:
        """Return all tensors of the model by name; float ones in float32."""
        found = self.ends()
        for number in range(self.config.layers):
            for name, value in self.block_weights(number).items():
                found[f"blocks.{number}.{name}"] = value
        return found

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

    @torch.no_grad()
    def logits(self, x_BSD: Tensor) -> Tensor:
        """Apply final norm and head: float32 ``[B, S, V]``."""
        return F.linear(self.normed(x_BSD), _wide(self.head(x_BSD.device)))

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
            self._ends = dict(SafetensorsFile(self.path / ENDS_FILE))
        return self._ends


def _filled(module: _Module, tensors: Mapping[str, Tensor]) -> _Module:
    state = {key: tensors[_neutral(key)] for key in module.state_dict()}
    module.load_state_dict(state, assign=True)
    return module.eval().requires_grad_(False)


def _neutral(key: str) -> str:
    """Return the name of a tensor in the files from its key in a state dict."""
    return key.removesuffix(".weight")


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor
