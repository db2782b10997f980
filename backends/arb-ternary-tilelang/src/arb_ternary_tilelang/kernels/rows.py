"""Quantisation of activations and gradients.

TileLang reads the annotations of kernels as values, so this module does not postpone them.
"""

from typing import Any

from arb_ternary_tilelang.kernels.bits import INFINITY, Bits
from arb_ternary_tilelang.lane import Lane, Option, given


def quantize_rows(lane: Lane, dtype: str, norm: Option, *, K: int) -> Any:
    """Quantise rows to int8 and a scale; with ``norm`` after ``x * rsqrt(mean(x**2) + eps)``.

    The largest absolute value is found among the bits of the floats, whose order as integers is
    that of the values, with infinities and NaN at the end: it does not depend on the order of the
    search, and a NaN is not lost.
    """
    T = lane.T
    bits = Bits(lane)
    threads = lane.width
    M = T.dynamic("M")
    K = lane.size("K", K)

    def column(i: Any, t: Any) -> Any:
        """The column that a thread reads in iteration ``i``."""
        return i * threads + t

    def element(x: Any, m: Any, i: Any, t: Any) -> Any:
        """The element that a thread reads in iteration ``i``, float32."""
        value = x[m, column(i, t)]
        return T.cast(value, "float32")

    @T.prim_func
    def quantize(
        x: T.Tensor((M, K), dtype),
        q: T.Tensor((M, K), "int8"),
        scale: T.Tensor((M,), "float32"),
        eps: T.float32,
        norm_given: T.int32,
    ):
        with lane.grid(M, threads=threads) as m:
            sums = lane.shared((threads,), "float32")
            tops = lane.shared((threads,), "int32")
            factor = lane.shared((1,), "float32")
            row = lane.shared((1,), "float32")
            if given(norm, norm_given):
                for t in lane.parallel(threads):
                    total = T.alloc_var("float32")
                    total = T.float32(0.0)
                    for i in T.serial(T.ceildiv(K, threads)):
                        if column(i, t) < K:
                            value = element(x, m, i, t)
                            total = total + value * value
                    sums[t] = total
                for _ in lane.parallel(1):
                    squares = T.alloc_var("float32")
                    squares = T.float32(0.0)
                    for i in T.serial(threads):
                        squares = squares + sums[i]
                    factor[0] = T.float32(1.0) / T.sqrt(
                        squares / T.cast(K, "float32") + eps,
                    )
            for t in lane.parallel(threads):
                top = T.alloc_var("int32")
                top = 0
                for i in T.serial(T.ceildiv(K, threads)):
                    if column(i, t) < K:
                        value = T.alloc_var("float32")
                        value = element(x, m, i, t)
                        if given(norm, norm_given):
                            value = value * factor[0]
                        top = T.max(top, bits.magnitude(value))
                tops[t] = top
            for _ in lane.parallel(1):
                most = T.alloc_var("int32")
                most = 0
                for i in T.serial(threads):
                    most = T.max(most, tops[i])
                row[0] = T.reinterpret(most, "float32") / T.float32(127.0)
                scale[m] = row[0]
            for t in lane.parallel(threads):
                for i in T.serial(T.ceildiv(K, threads)):
                    if column(i, t) < K:
                        value = T.alloc_var("float32")
                        value = element(x, m, i, t)
                        if given(norm, norm_given):
                            value = value * factor[0]
                        code = T.alloc_var("int32")
                        code = 0
                        if row[0] > T.float32(0.0) and T.reinterpret(row[0], "int32") < INFINITY:
                            code = T.cast(
                                T.nearbyint(value / row[0]),
                                "int32",
                            )
                        q[m, column(i, t)] = T.cast(code, "int8")

    return quantize


def largest(lane: Lane, dtype: str) -> Any:
    """Find the bits of the largest ``|x|`` of each block of a vector; NaN counts as 0."""
    T = lane.T
    bits = Bits(lane)
    threads = lane.width
    C = T.dynamic("C")
    B = T.dynamic("B")
    each = 16

    def index(b: Any, i: Any, t: Any) -> Any:
        """The element that a thread of block ``b`` reads in iteration ``i``."""
        return (b * each + i) * threads + t

    @T.prim_func
    def find_largest(
        x: T.Tensor((C,), dtype),
        tops: T.Tensor((B,), "int32"),
    ):
        with lane.grid(B, threads=threads) as b:
            found = lane.shared((threads,), "int32")
            for t in lane.parallel(threads):
                top = T.alloc_var("int32")
                top = 0
                for i in T.serial(each):
                    if index(b, i, t) < C:
                        value = T.cast(x[index(b, i, t)], "float32")
                        size = bits.magnitude(value)
                        if size <= INFINITY:
                            top = T.max(top, size)
                found[t] = top
            for _ in lane.parallel(1):
                most = T.alloc_var("int32")
                most = 0
                for i in T.serial(threads):
                    most = T.max(most, found[i])
                tops[b] = most

    return find_largest


def quantize_gradient(lane: Lane, dtype: str) -> Any:
    """Round a vector to int8 stochastically, with a power of two for scale.

    ``top`` holds the bits of the largest ``|x|``. The scale is ``2**e`` for the smallest ``e`` with
    ``top <= 127 * 2**e``. For ``top = 1.f * 2**p`` that is ``p - 6`` if ``1.f`` is at most
    127 / 64, else ``p - 5``.
    """
    T = lane.T
    bits = Bits(lane)
    threads = lane.width
    C = T.dynamic("C")

    @T.prim_func
    def round_gradient(
        x: T.Tensor((C,), dtype),
        top: T.Tensor((1,), "int32"),
        q: T.Tensor((C,), "int8"),
        scale: T.Tensor((1,), "float32"),
        key_0: T.int32,
        key_1: T.int32,
    ):
        with lane.grid(T.ceildiv(C, threads), threads=threads) as b:
            for t in lane.parallel(threads):
                exponent = T.alloc_var("int32")
                exponent = (top[0] >> 23) - 127 - 6
                if (top[0] & 0x7FFFFF) > 0x7E0000:
                    exponent = exponent + 1
                exponent = T.max(exponent, -126)
                empty = top[0] == 0 or top[0] >= INFINITY
                if empty:
                    exponent = 0
                if b == 0 and t == 0:
                    scale[0] = bits.power_of_two(exponent)
                i = b * threads + t
                if i < C:
                    code = T.alloc_var("int32")
                    code = 0
                    value = T.cast(x[i], "float32")
                    if not empty and bits.magnitude(value) <= INFINITY:
                        h = bits.hashed(
                            T.cast(b, "int64") * threads + t,
                            key_0,
                            key_1,
                        )
                        moved = bits.uniform(h) + value / bits.power_of_two(exponent)
                        code = T.cast(
                            T.clamp(T.floor(moved), T.float32(-127.0), T.float32(127.0)),
                            "int32",
                        )
                    q[i] = T.cast(code, "int8")

    return round_gradient
