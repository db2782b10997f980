"""A float decoder on disk, read block by block.

======================
============================================================================================
``model.json`` options of the decoder, vocabulary, tokenizer, dtype, digest; written last: a folder
that has
                        it is complete
``ends.safetensors`` ``embedding``, ``final_norm`` and, unless tied, ``head``
``block-00000.safe...`` a block's tensors ======================
============================================================================================

Tensors go by the paths of the decoder's modules, as in ``arb_ternary_interchange.decoder``:
``attention.query`` is the weight of that linear. Shapes: ``B`` sequences, ``S`` positions, ``D``
width, ``V`` vocabulary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from attrs import evolve
from torch import Tensor, nn

from arb_ternary.errors import DataError
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

FORMAT: Final = "arb-ternary-float-model"
VERSION: Final = 1
MODEL_FILE: Final = "model.json"
ENDS_FILE: Final = "ends.safetensors"


def block_file(number: int) -> str:
    """Name of the file of a block."""
    return f"block-{number:05d}.safetensors"


def float_config(config: DecoderConfig) -> DecoderConfig:
    """The options of the float decoder that has the weights of a decoder of ``config``, every part
    in float.

    Powers of two in front of updates and logits are 1: they are in the weights that
    ``arb_ternary_interchange.decoder.weights.exported_weights`` gives, and so is what eps and
    scales of their own did.
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
    """Every tensor of a block by its name, without numbers, on the device ``meta``."""
    with torch.device("meta"):
        return {_neutral(key): tensor for key, tensor in Block(config).state_dict().items()}


def ends_outline(config: DecoderConfig, vocabulary_size: int) -> dict[str, Tensor]:
    """Every tensor outside the blocks by its name, without numbers, on the device ``meta``."""
    with torch.device("meta"):
        decoder = Decoder(config, vocabulary_size, blocks=nn.ModuleList())
    return {_neutral(key): tensor for key, tensor in decoder.state_dict().items()}


class FloatModel:
    """A float decoder on disk; nothing changes it. Blocks and logits are float32, whatever the
    files hold.

    Embedding, final norm and head stay in memory, in the dtype of the files, once they have been
    used.

    Attributes:
        path: its folder.
        config: the decoder's options; all parts are float, activations too.
        vocabulary_size: ``V``.
        tokenizer: ``to_json`` of its tokenizer; None where it has none.
        dtype: of the files.
        digest: SHA-256 in hexadecimal of everything in it.
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
        """The model in the stage folder ``path``.

        Raises:
            DataError: there is none, it is not complete, or its description is damaged.
        """
        file = path / MODEL_FILE
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise DataError(f"{path}: no complete float model: it has no {MODEL_FILE}") from error
        except (OSError, ValueError) as error:
            raise DataError(f"{file}: cannot be read: {error}") from error
        if not isinstance(content, dict) or (content.get("format"), content.get("version")) != (
            FORMAT,
            VERSION,
        ):
            raise DataError(f"{file}: not a {FORMAT} of version {VERSION}")
        try:
            return cls(path, content)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{file}: damaged: {error}") from error

    # --- weights

    def weights(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names begin with ``prefix``, by what follows it; float ones in float32.

        ``""`` gives all of the model; ``"blocks.3."`` reads that block alone.
        """
        place = re.match(r"blocks\.(\d+)\.", prefix)
        found = {} if place else dict(self._end_tensors())
        for number in [int(place[1])] if place else range(self.config.layers):
            found |= {
                f"blocks.{number}.{name}": value
                for name, value in self._block_tensors(number).items()
            }
        return {
            name.removeprefix(prefix): _wide(value)
            for name, value in found.items()
            if name.startswith(prefix)
        }

    def ends(self) -> dict[str, Tensor]:
        """``embedding``, ``final_norm`` and, unless tied, ``head``, float32."""
        return {name: _wide(value) for name, value in self._end_tensors().items()}

    def block(self, number: int) -> Block:
        """Block ``number``: float32, on the CPU, in evaluation mode, without gradients."""
        with torch.device("meta"):
            block = Block(self.config)
        tensors = self._block_tensors(number)
        state = {key: _wide(tensors[_neutral(key)]) for key in block.state_dict()}
        block.load_state_dict(state, assign=True)
        return block.eval().requires_grad_(False)

    def decoder(self) -> Decoder:
        """All of it as one module: float32, on the CPU, in evaluation mode, without gradients."""
        with torch.device("meta"):
            decoder = Decoder(self.config, self.vocabulary_size)
        tensors = self.weights("")
        decoder.load_state_dict(
            {key: tensors[_neutral(key)] for key in decoder.state_dict()}, assign=True
        )
        return decoder.eval().requires_grad_(False)

    # --- a pass, on the device of what goes in

    @torch.no_grad()
    def embed(self, tokens_BS: Tensor) -> Tensor:
        """The residual stream before the first block, float32 ``[B, S, D]``."""
        return _wide(F.embedding(tokens_BS, self._end("embedding", tokens_BS.device)))

    @torch.no_grad()
    def run_block(self, number: int, x_BSD: Tensor) -> Tensor:
        """The residual stream after block ``number``, of whole sequences."""
        return self.through(self.block(number).to(x_BSD.device), x_BSD)

    @torch.no_grad()
    def through(self, block: Block, x_BSD: Tensor) -> Tensor:
        """The residual stream after ``block``, which is one of this model's, or has its sizes and
        options.
        """
        config = self.config
        positions = make_positions(
            config, x_BSD, start=0, total=x_BSD.size(1), window=config.sliding_window
        )
        y_BSD: Tensor = block(x_BSD, positions)
        return y_BSD

    @torch.no_grad()
    def logits(self, x_BSD: Tensor) -> Tensor:
        """Final norm and head of the residual stream after the last block, float32 ``[B, S,
        V]``.
        """
        return F.linear(self.normed(x_BSD), _wide(self.head(x_BSD.device)))

    @torch.no_grad()
    def normed(self, x_BSD: Tensor) -> Tensor:
        """The final norm of the residual stream after the last block, float32."""
        return rms_norm(x_BSD, self.config.norm_eps) * _wide(self._end("final_norm", x_BSD.device))

    def head(self, device: torch.device) -> Tensor:
        """The matrix of the head, or of the embedding where that is tied, ``[V, D]`` in the dtype
        of the files.
        """
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

    def _block_tensors(self, number: int) -> dict[str, Tensor]:
        if not 0 <= number < self.config.layers:
            raise DataError(
                f"{self.path}: there is no block {number}; there are {self.config.layers}"
            )
        return dict(SafetensorsFile(self.path / block_file(number)))


def _neutral(key: str) -> str:
    """The name of a tensor from its key in a state dict."""
    return key.removesuffix(".weight")


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor
