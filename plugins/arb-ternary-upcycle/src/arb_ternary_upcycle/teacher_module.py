"""The teacher in training: its blocks in memory or one at a time, and all of it as a module.

Shapes: ``B`` samples, ``S`` positions, ``D`` width, ``V`` vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from arb_ternary.errors import ConfigError
from arb_ternary_text.models.block import Block
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_upcycle.float_model import DTYPES, FloatModel
from arb_ternary_upcycle.stage_options import FloatDtype
from arb_ternary_upcycle.student import student_of


class Teacher(nn.Module):
    """``model`` as a module without parameters of its own: nothing in it learns.

    Args:
        model: on disk.
        memory: bytes of blocks that stay in memory, those that are used first; beside them there is
            the one in use.
        device: where it computes.
        dtype: of its matrices and their products; the residual stream, norms and softmaxes are
            float32 all the same.
    """

    def __init__(
        self, model: FloatModel, memory: int, device: torch.device, dtype: FloatDtype = "float32"
    ) -> None:
        super().__init__()
        self.model = model
        self._device = device
        self._free = memory
        self._dtype = DTYPES[dtype]
        self._head: Tensor | None = None
        self._kept: dict[int, Block] = {}
        self._last: tuple[int, Block] | None = None

    @property
    def max_length(self) -> int:
        """Context: the longest sequence."""
        return self.model.config.max_length

    def block(self, number: int) -> Block:
        """Block ``number`` on the device."""
        if number in self._kept:
            return self._kept[number]
        if self._last is not None and self._last[0] == number:
            return self._last[1]
        self._last = None  # before the next is read: one at a time
        block = self.model.block(number).to(self._device)
        for module in block.modules() if self._dtype is not torch.float32 else ():
            if isinstance(module, nn.Linear):
                module.to(self._dtype)
        size = sum(tensor.nbytes for tensor in block.state_dict().values())
        if size <= self._free:
            self._kept[number] = block
            self._free -= size
        else:
            self._last = (number, block)
        return block

    def embed(self, tokens_BS: Tensor) -> Tensor:
        """The residual stream before the first block."""
        return self.model.embed(tokens_BS)

    def run_block(self, number: int, x_BSD: Tensor) -> Tensor:
        """The residual stream after block ``number``."""
        wide = self._dtype is torch.float32
        with torch.autocast(self._device.type, None if wide else self._dtype, enabled=not wide):
            return self.model.through(self.block(number), x_BSD)

    def hidden(self, tokens_BS: Tensor) -> Tensor:
        """The residual stream after the last block, float32 ``[B, S, D]``."""
        x_BSD = self.embed(tokens_BS)
        for number in range(self.model.config.layers):
            x_BSD = self.run_block(number, x_BSD)
        return x_BSD

    @torch.no_grad()
    def logits(self, x_BSD: Tensor) -> Tensor:
        """Final norm and head of the stream after the last block, ``[..., V]`` in the dtype of its
        matrices.
        """
        if self._dtype is torch.float32:
            return self.model.logits(x_BSD)
        if self._head is None:
            self._head = self.model.head(self._device).to(self._dtype)
        return F.linear(self.model.normed(x_BSD).to(self._dtype), self._head)

    @torch.no_grad()
    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Logits ``[B, S, V]``."""
        return self.logits(self.hidden(tokens_BS))


def as_student(model: nn.Module, teacher: FloatModel) -> Decoder:
    """``model``, when it is a decoder with as many blocks as ``teacher``, and its residual stream
    and vocabulary.

    Raises:
        ConfigError: it is not; all differences are named.
    """
    student = student_of(model)
    pairs = {
        "layers": (len(student.blocks), teacher.config.layers),
        "width": (student.config.width, teacher.config.width),
        "vocabulary": (student.vocabulary_size, teacher.vocabulary_size),
    }
    unlike = [
        f"{name}: {mine}, the teacher's is {its}"
        for name, (mine, its) in pairs.items()
        if mine != its
    ]
    if unlike:
        raise ConfigError(
            f"model: the teacher in {teacher.path} does not fit it: {'; '.join(unlike)}",
            "Give the model the teacher's sizes (`arb upcycle inspect` shows them), or name "
            "another teacher.",
        )
    return student
