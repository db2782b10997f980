"""The types of tensors that a GGUF file can name: how many weights a block has, and how many
bytes.
"""

from __future__ import annotations

from typing import Final

from attrs import frozen


@frozen
class TensorType:
    """A type of tensor.

    Attributes:
        id: the number that stands in a file.
        name: as llama.cpp writes it.
        block: weights of a row that are stored together.
        size: bytes of a block.
    """

    id: int
    name: str
    block: int
    size: int

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of ``columns`` weights, a multiple of ``block``."""
        return columns // self.block * self.size


F32: Final = TensorType(0, "F32", 1, 4)
F16: Final = TensorType(1, "F16", 1, 2)
Q4_0: Final = TensorType(2, "Q4_0", 32, 18)
Q4_1: Final = TensorType(3, "Q4_1", 32, 20)
Q8_0: Final = TensorType(8, "Q8_0", 32, 34)
BF16: Final = TensorType(30, "BF16", 1, 2)
TQ1_0: Final = TensorType(34, "TQ1_0", 256, 54)
TQ2_0: Final = TensorType(35, "TQ2_0", 256, 66)
Q2_0: Final = TensorType(42, "Q2_0", 64, 18)

#: What a fork of llama.cpp wrote under the number of Q2_0: the same with 128 weights a block.
FORK_Q2_0: Final = TensorType(42, "Q2_0", 128, 34)

# Types that are listed and measured, but not read: (number, name, weights of a block, bytes of a
# block). Q8_1 and Q8_K are of activations, and in no file.
_OTHERS: Final = (
    (6, "Q5_0", 32, 22),
    (7, "Q5_1", 32, 24),
    (10, "Q2_K", 256, 84),
    (11, "Q3_K", 256, 110),
    (12, "Q4_K", 256, 144),
    (13, "Q5_K", 256, 176),
    (14, "Q6_K", 256, 210),
    (16, "IQ2_XXS", 256, 66),
    (17, "IQ2_XS", 256, 74),
    (18, "IQ3_XXS", 256, 98),
    (19, "IQ1_S", 256, 50),
    (20, "IQ4_NL", 32, 18),
    (21, "IQ3_S", 256, 110),
    (22, "IQ2_S", 256, 82),
    (23, "IQ4_XS", 256, 136),
    (24, "I8", 1, 1),
    (25, "I16", 1, 2),
    (26, "I32", 1, 4),
    (27, "I64", 1, 8),
    (28, "F64", 1, 8),
    (29, "IQ1_M", 256, 56),
    (39, "MXFP4", 32, 17),
    (40, "NVFP4", 64, 36),
    (41, "Q1_0", 128, 18),
)

#: Every known type by its number.
TYPES: Final = {
    kind.id: kind
    for kind in (
        F32,
        F16,
        Q4_0,
        Q4_1,
        Q8_0,
        BF16,
        TQ1_0,
        TQ2_0,
        Q2_0,
        *(TensorType(*row) for row in _OTHERS),
    )
}
