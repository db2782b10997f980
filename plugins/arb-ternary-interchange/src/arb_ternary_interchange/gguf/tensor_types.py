"""The types of tensors in GGUF files: how many weights a block has, and how many bytes."""

from __future__ import annotations

from typing import Final

from attrs import frozen


@frozen
class TensorType:
    """A type of tensor.

    Attributes:
        id: its number in a file.
        name: its name in llama.cpp.
        block: weights of a row that are stored together.
        size: bytes of a block.
    """

    id: int
    name: str
    block: int
    size: int

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of a row of ``columns`` weights, a multiple of ``block``."""
        return columns // self.block * self.size


F32: Final = TensorType(0, "F32", 1, 4)
F16: Final = TensorType(1, "F16", 1, 2)
Q4_0: Final = TensorType(2, "Q4_0", 32, 18)
Q4_1: Final = TensorType(3, "Q4_1", 32, 20)
Q8_0: Final = TensorType(8, "Q8_0", 32, 34)
Q4_K: Final = TensorType(12, "Q4_K", 256, 144)
Q6_K: Final = TensorType(14, "Q6_K", 256, 210)
BF16: Final = TensorType(30, "BF16", 1, 2)
TQ1_0: Final = TensorType(34, "TQ1_0", 256, 54)
TQ2_0: Final = TensorType(35, "TQ2_0", 256, 66)
Q2_0: Final = TensorType(42, "Q2_0", 64, 18)

#: A fork of llama.cpp writes this under the number of Q2_0: the same with 128 weights per block.
FORK_Q2_0: Final = TensorType(42, "Q2_0", 128, 34)

#: Types that hold each number by itself.
FLOAT_TYPES: Final = (F32, F16, BF16)
#: Types in which trits are written.
TERNARY_TYPES: Final = (TQ2_0, TQ1_0, Q2_0, Q4_0)
#: Types whose values are read.
READABLE_TYPES: Final = (
    F32,
    F16,
    BF16,
    Q8_0,
    Q4_0,
    Q4_1,
    Q4_K,
    Q6_K,
    TQ1_0,
    TQ2_0,
    Q2_0,
    FORK_Q2_0,
)

# Types that are listed and measured, but not read. Q8_1 and Q8_K are types of activations, which no
# file holds.
_OTHERS: Final = (
    TensorType(6, "Q5_0", 32, 22),
    TensorType(7, "Q5_1", 32, 24),
    TensorType(10, "Q2_K", 256, 84),
    TensorType(11, "Q3_K", 256, 110),
    TensorType(13, "Q5_K", 256, 176),
    TensorType(16, "IQ2_XXS", 256, 66),
    TensorType(17, "IQ2_XS", 256, 74),
    TensorType(18, "IQ3_XXS", 256, 98),
    TensorType(19, "IQ1_S", 256, 50),
    TensorType(20, "IQ4_NL", 32, 18),
    TensorType(21, "IQ3_S", 256, 110),
    TensorType(22, "IQ2_S", 256, 82),
    TensorType(23, "IQ4_XS", 256, 136),
    TensorType(24, "I8", 1, 1),
    TensorType(25, "I16", 1, 2),
    TensorType(26, "I32", 1, 4),
    TensorType(27, "I64", 1, 8),
    TensorType(28, "F64", 1, 8),
    TensorType(29, "IQ1_M", 256, 56),
    TensorType(39, "MXFP4", 32, 17),
    TensorType(40, "NVFP4", 64, 36),
    TensorType(41, "Q1_0", 128, 18),
)
_KNOWN: Final = (F32, F16, Q4_0, Q4_1, Q8_0, Q4_K, Q6_K, BF16, TQ1_0, TQ2_0, Q2_0, *_OTHERS)

#: Every known type by its number.
TYPES: Final = {kind.id: kind for kind in _KNOWN}

#: The number under which the fork bitnet.cpp writes its own type I2_S; llama.cpp has no such type.
I2_S_OF_FORK: Final = 36
