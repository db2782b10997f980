"""Memory for weights in pages of 2 MiB, where the system has them.

Reading a weight once per token takes as long as its bytes take from memory. On pages of 4 KiB the
processor looks up an address for every 4 KiB of them, and prefetching stops at each page. A weight
of less than 4 MiB contains no aligned 2 MiB, so weights get huge pages only if they lie side by
side in one region.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections import Counter
from typing import Final

import torch
from torch import Tensor, nn

#: Bytes of a huge page.
HUGE_PAGE: Final = 2 << 20
#: Bytes of a cache line, at which every tensor begins.
_LINE: Final = 64
#: Bytes of tensors that are moved before their old memory is returned to the system.
_FREED: Final = 64 << 20


class Region:
    """A region of memory on huge pages, or on ordinary ones where the system has no others.

    The memory is returned to the system when the last tensor of the region is gone.

    Args:
        size: bytes for all tensors, each rounded up by :func:`rounded_size`.
    """

    def __init__(self, size: int) -> None:
        # Private memory: the system's setting for shared memory is another one.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._memory = mmap.mmap(-1, size + HUGE_PAGE, flags=flags)
        address = torch.frombuffer(self._memory, dtype=torch.uint8, count=1).data_ptr()
        self._offset = -address % HUGE_PAGE
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                self._memory.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                # The kernel was built without them: ordinary pages hold the same bytes.
                return

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the next tensor of the region; its values are zero."""
        count = math.prod(shape)
        tensor = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=self._offset)
        self._offset += rounded_size(count * dtype.itemsize)
        return tensor.view(shape)


def rounded_size(size: int) -> int:
    """Return the bytes that a tensor of ``size`` bytes takes in a :class:`Region`."""
    return -(-size // _LINE) * _LINE


def move_to_huge_pages(model: nn.Module) -> int:
    """Move the tensors of a model on the CPU into one region, in the order of its modules.

    Parameters and buffers stay the same objects, with the same values at another address. Nothing
    happens for a model that is smaller than a huge page.

    Returns:
        The number of bytes that were moved.
    """
    found: dict[int, Tensor] = {}
    holders: Counter[int] = Counter()
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and id(tensor) not in found and _can_move(tensor):
                found[id(tensor)] = tensor
                holders[tensor.data_ptr()] += 1
    # Tensors that share their memory keep it.
    moved = [tensor for tensor in found.values() if holders[tensor.data_ptr()] == 1]
    size = sum(rounded_size(tensor.nbytes) for tensor in moved)
    if size < HUGE_PAGE:
        return 0
    region = Region(size)
    freed = 0
    with torch.no_grad():
        for tensor in moved:
            place = region.take(tuple(tensor.shape), tensor.dtype)
            place.copy_(tensor)
            tensor.data = place
            freed += tensor.nbytes
            if freed >= _FREED:
                _return_freed_memory()
                freed = 0
    _return_freed_memory()
    return size


def _return_freed_memory() -> None:
    """Return what was freed to the system; glibc keeps it otherwise, so that models count twice."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _can_move(tensor: Tensor) -> bool:
    """Return whether a tensor has memory of its own, without gaps, on the CPU."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.device.type != "cpu":
        return False
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_inference():
        return False
    own = tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor.is_contiguous() and own and tensor.nbytes > 0
