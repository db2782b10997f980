"""The wire format: how votes, flips and rows of packed weights travel between ranks.

All sizes follow from what every rank knows, so that messages have no headers.
"""

from arb_ternary_distributed.wire.kernels import WIRE_KERNELS, wire_kernel

__all__ = ["WIRE_KERNELS", "wire_kernel"]
