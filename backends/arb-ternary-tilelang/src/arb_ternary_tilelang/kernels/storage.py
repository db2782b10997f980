"""Trits and accumulators to and from their words.

TileLang reads the annotations of kernels as values, so this module does not postpone them.
"""

from typing import Any

from arb_ternary_tilelang.kernels.bits import UNIT, Bits
from arb_ternary_tilelang.lane import Lane


def pack(lane: Lane, *, N: int, K: int) -> Any:
    """Pack int8 ``[N, K]`` in -1..1 into words ``[N, ceil(K / 16)]``; the padding holds 0."""
    T = lane.T
    bits = Bits(lane)
    threads = lane.width
    W = lane.size("W", -(-K // UNIT))
    N = lane.size("N", N)
    K = lane.size("K", K)

    @T.prim_func
    def pack_trits(
        trits: T.Tensor((N, K), "int8"),
        words: T.Tensor((N, W), "int32"),
    ):
        with lane.grid(N, T.ceildiv(W, threads), threads=threads) as (n, block):
            for t in lane.parallel(threads):
                word = T.alloc_var("uint32")
                u = block * threads + t
                word = T.uint32(0x55555555)
                if u < W:
                    for v in T.serial(UNIT):
                        k = u * UNIT + v
                        if k < K:
                            trit = T.cast(
                                trits[n, k],
                                "int32",
                            )
                            word = bits.with_trit(word, v, trit)
                    words[n, u] = T.reinterpret(word, "int32")

    return pack_trits


def unpack(lane: Lane, *, N: int, K: int) -> Any:
    """Unpack words ``[N, ceil(K / 16)]`` to int8 ``[N, K]``."""
    T = lane.T
    bits = Bits(lane)
    threads = lane.width
    W = lane.size("W", -(-K // UNIT))
    N = lane.size("N", N)
    K = lane.size("K", K)

    @T.prim_func
    def unpack_trits(
        words: T.Tensor((N, W), "int32"),
        trits: T.Tensor((N, K), "int8"),
    ):
        with lane.grid(N, T.ceildiv(W, threads), threads=threads) as (n, block):
            for t in lane.parallel(threads):
                word = T.alloc_var("uint32")
                u = block * threads + t
                if u < W:
                    word = T.reinterpret(words[n, u], "uint32")
                    for v in T.serial(UNIT):
                        k = u * UNIT + v
                        if k < K:
                            trits[n, k] = T.cast(
                                bits.trit(word, v),
                                "int8",
                            )

    return unpack_trits


def pack_nibbles(lane: Lane, *, N: int, K: int) -> Any:
    """Pack int8 ``[N, K]`` in -7..7 into words of 8 columns, two for every word of trits.

    The padding holds 0.
    """
    T = lane.T
    bits = Bits(lane)
    threads = lane.width
    V = lane.size("V", 2 * -(-K // UNIT))
    N = lane.size("N", N)
    K = lane.size("K", K)

    @T.prim_func
    def pack_votes(
        votes: T.Tensor((N, K), "int8"),
        words: T.Tensor((N, V), "int32"),
    ):
        with lane.grid(N, T.ceildiv(V, threads), threads=threads) as (n, block):
            for t in lane.parallel(threads):
                word = T.alloc_var("uint32")
                u = block * threads + t
                word = T.uint32(0x88888888)
                if u < V:
                    for v in T.serial(8):
                        k = u * 8 + v
                        if k < K:
                            value = T.cast(
                                votes[n, k],
                                "int32",
                            )
                            word = bits.with_nibble(word, v, value)
                    words[n, u] = T.reinterpret(word, "int32")

    return pack_votes


def unpack_nibbles(lane: Lane, *, N: int, K: int) -> Any:
    """Unpack words of 8 columns to int8 ``[N, K]``."""
    T = lane.T
    bits = Bits(lane)
    threads = lane.width
    V = lane.size("V", 2 * -(-K // UNIT))
    N = lane.size("N", N)
    K = lane.size("K", K)

    @T.prim_func
    def unpack_votes(
        words: T.Tensor((N, V), "int32"),
        votes: T.Tensor((N, K), "int8"),
    ):
        with lane.grid(N, T.ceildiv(V, threads), threads=threads) as (n, block):
            for t in lane.parallel(threads):
                word = T.alloc_var("uint32")
                u = block * threads + t
                if u < V:
                    word = T.reinterpret(words[n, u], "uint32")
                    for v in T.serial(8):
                        k = u * 8 + v
                        if k < K:
                            votes[n, k] = T.cast(
                                bits.nibble(word, v),
                                "int8",
                            )

    return unpack_votes
