"""The teacher in training: its blocks in memory or one at a time, and the whole as a module.

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
    """``model`` as a module without parameters of its own, so that nothing in it learns.

    Args:
        model: on disk.
        memory: bytes of blocks that stay in memory, those that are used first. The block in use is
            not counted.
        device: where it computes.
        dtype: number format of its matrices and of their products; the residual stream, norms and
            softmaxes are float32.
    """

    def __init__(
        self, model: FloatModel, memory: int, device: torch.device, dtype: FloatDtype = "float32"
    ) -> None:
        super().__init__()
        self.model = model
        self._device = device
        self._free = memory
        self._dtype = DTYPES[dtype]
        self._narrow = self._dtype is not torch.float32
        self._head: Tensor | None = None
        self._kept: dict[int, Block] = {}
        self._last: tuple[int, Block] | None = None

    @property
    def max_length(self) -> int:
        """Longest sequence."""
        return self.model.config.max_length

    def block(self, number: int) -> Block:
        """Return a block, on the device."""
        if number in self._kept:
            return self._kept[number]
        if self._last is not None and self._last[0] == number:
            return self._last[1]
        self._last = None  # before the next is read: one at a time
        block = self.model.block(number).to(self._device)
        if self._narrow:
            for module in block.modules():
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
        """Return the residual stream before the first block."""
        return self.model.embed(tokens_BS)

    def run_blocks(self, x_BSD: Tensor, first: int, last: int) -> Tensor:
        """Return the residual stream after the blocks from ``first`` to ``last`` (exclusive)."""
        dtype = self._dtype if self._narrow else None
        with torch.autocast(self._device.type, dtype, enabled=self._narrow):
            for number in range(first, last):
                x_BSD = self.model.through(self.block(number), x_BSD)
        return x_BSD

    def hidden(self, tokens_BS: Tensor) -> Tensor:
        """Return the residual stream after the last block, float32 ``[B, S, D]``."""
        return self.run_blocks(self.embed(tokens_BS), 0, self.model.config.layers)

    @torch.no_grad()
    def logits(self, x_BSD: Tensor) -> Tensor:
        """Apply final norm and head: ``[..., V]`` in the number format of the matrices."""
        if self._head is None:
            self._head = self.model.head(self._device).to(self._dtype)
        return F.linear(self.model.normed(x_BSD).to(self._dtype), self._head)

    @torch.no_grad()
    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Return logits ``[B, S, V]``."""
        return self.logits(self.hidden(tokens_BS))


def as_student(model: nn.Module, teacher: FloatModel) -> Decoder:
    """Return ``model`` if it is a decoder of as many blocks, width and vocabulary as ``teacher``.

    Raises:
        ConfigError: it is not; all differences are named.
    """
    student = student_of(model)
    sizes = {
        "layers": (len(student.blocks), teacher.config.layers),
        "width": (student.config.width, teacher.config.width),
        "vocabulary": (student.vocabulary_size, teacher.vocabulary_size),
    }
    unlike = [
        f"{name}: {mine}, the teacher's is {its}"
        for name, (mine, its) in sizes.items()
        if mine != its
    ]
    if unlike:
        raise ConfigError(
            f"model: the teacher in {teacher.path} does not fit it: {'; '.join(unlike)}",
            "Give the model the teacher's sizes (`arb upcycle inspect` shows them), or name "
            "another teacher.",
        )
    return student
