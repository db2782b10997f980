"""Small integers as digits of bytes: the form in which votes travel between ranks.

A value ``v`` in ``-limit .. limit`` is the digit ``v + limit`` in base ``2 * limit + 1``. Bases 3,
5, 15 and 255 pack ``p`` = 5, 3, 2 and 1 digits into a byte. ``n`` values take ``m = ceil(n / p)``
bytes. Byte ``i`` holds the values ``i``, ``i + m``, ``i + 2 m``, ..., least significant first, so
that neighbouring bytes hold neighbouring values and a processor works on many at a time. Digits
beyond ``n`` are ``v = 0``. Base 65535 stands for int16, two bytes each in the order of the machine.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

#: Digits per byte, by base.
_DIGITS: Final = {3: 5, 5: 3, 15: 2, 255: 1}
#: The base that stands for int16.
RAW: Final = 65535


def base_for(limit: int) -> int:
    """Return the smallest base for values in ``-limit .. limit``.

    Raises:
        ValueError: the limit is negative, or above 32,767.
    """
    if limit >= 0:
        for base in (*_DIGITS, RAW):
            if limit <= base // 2:
                return base
    raise ValueError(f"votes between ranks must fit int16, 0..{RAW // 2}, got a limit of {limit}")


def bytes_for(count: int, base: int) -> int:
    """Return the number of bytes that ``count`` values take."""
    return 2 * count if base == RAW else -(-count // _per_byte(base))


def _per_byte(base: int) -> int:
    if base not in _DIGITS:
        raise ValueError(f"base must be one of {[*_DIGITS, RAW]}, got {base}")
    return _DIGITS[base]


def require(condition: Tensor, message: str) -> None:
    """Raise ValueError unless the bool scalar is true.

    On a GPU it is an assertion of the device, for which the host does not wait.
    """
    if not condition.is_cpu:
        torch._assert_async(condition, message)
    elif not condition:
        raise ValueError(message)


def digits_to_bytes(values: Tensor, base: int) -> Tensor:
    """Pack int16 ``[n]`` into uint8 ``[bytes_for(n, base)]``.

    Raises:
        ValueError: a value has no digit in this base; on a GPU an assertion of the device.
    """
    if values.dtype != torch.int16 or values.dim() != 1:
        raise ValueError(f"values must be int16 [n], got {values.dtype} {list(values.shape)}")
    width = bytes_for(values.numel(), base)
    if base == RAW:
        packed = torch.empty(width, dtype=torch.uint8, device=values.device)
        packed.view(torch.int16).copy_(values)
        return packed
    count = values.numel()
    half = base // 2
    if count:
        low, high = values.aminmax()
        has_digits = (low >= -half) & (high <= half)
        require(has_digits, f"a value is outside {-half}..{half}, the digits of base {base}")
    codes = torch.full((_per_byte(base), width), half, dtype=torch.uint8, device=values.device)
    codes.view(-1)[:count] = values + half
    # Horner's rule, from the most significant digit.
    packed = codes[-1]
    for plane in reversed(codes[:-1].unbind()):
        packed = packed.mul_(base).add_(plane)
    return packed


def add_digits_(total: Tensor, packed: Tensor, base: int) -> None:
    """Add packed values to ``total``, int16 or int32 ``[n]``, in place.

    The caller knows that the sums fit, and that ``packed`` holds ``n`` values.
    """
    if base == RAW:
        # A piece of a message may start at an odd address.
        total.add_(packed.clone().view(torch.int16))
        return
    half = base // 2
    width = packed.numel()
    rest = packed
    for start in range(0, total.numel(), max(width, 1)):
        plane = total[start : start + width]
        digits = rest.remainder(base)[: plane.numel()]
        rest = rest.div(base, rounding_mode="floor")
        plane.add_(digits).sub_(half)
