"""Votes turned into flips.

TileLang reads the annotations of kernels as values, so this module does not postpone them.
"""

from typing import Any

from arb_ternary_tilelang.kernels.bits import UNIT, Bits
from arb_ternary_tilelang.lane import Lane, Option, given


def flip_trits(
    lane: Lane,
    bits_held: int,
    scaled: Option,
    carry: Option,
    *,
    N: int,
    K: int,
) -> Any:
    """Move trits whose accumulators crossed the threshold by one step.

    A crossing sets the accumulator to 0. With ``carry`` it keeps what exceeds the threshold
    instead, or half the threshold if the trit was at its bound already. Every accumulator then
    shrinks by ``rate``: the leak, or with ``scaled`` the decay. ``moved`` gets the number of trits
    that changed, by block.
    """
    T = lane.T
    bits = Bits(T)
    threads = lane.width
    parts = 2 if bits_held == 4 else 1
    each = UNIT // parts
    W = lane.size("W", -(-K // UNIT))
    V = lane.size("V", 2 * -(-K // UNIT))
    N = lane.size("N", N)
    K = lane.size("K", K)
    if bits_held == 8:
        V = K
    elif bits_held == 2:
        V = W
    stored = "int8" if bits_held == 8 else "int32"

    def decay(size: Any, rate: Any, hashed: Any) -> Any:
        """``size * rate / 2**16``, rounded stochastically."""
        noise = T.cast(hashed & T.uint32(0xFFFF), "int32")
        return (size * rate + noise) >> 16

    @T.prim_func
    def flip(
        words: T.Tensor((N, W), "int32"),
        votes: T.Tensor((N, V), stored),
        moved: T.Tensor((N, T.dynamic("B")), "int32"),
        columns: T.int32,
        threshold: T.int32,
        rate: T.int32,
        key_0: T.int32,
        key_1: T.int32,
        scaled_given: T.int32,
        carry_given: T.int32,
    ):
        with lane.grid(N, T.ceildiv(W, threads), threads=threads) as (n, block):
            counts = lane.shared((threads,), "int32")
            for t in lane.parallel(threads):
                word = T.alloc_var("uint32")
                count = T.alloc_var("int32")
                count = 0
                u = block * threads + t
                if u < W:
                    word = T.reinterpret(words[n, u], "uint32")
                    for part in T.serial(parts):
                        held = T.alloc_var("uint32")
                        if bits_held != 8:
                            held = T.reinterpret(votes[n, parts * u + part], "uint32")
                        for i in T.serial(each):
                            at = part * each + i
                            k = u * UNIT + at
                            if k < columns:
                                vote = T.alloc_var("int32")
                                if bits_held == 8:
                                    vote = T.cast(votes[n, k], "int32")
                                elif bits_held == 4:
                                    vote = bits.nibble(held, i)
                                else:
                                    vote = bits.trit(held, i)
                                crossed = T.alloc_var("int32")
                                crossed = bits.crossed(vote, threshold)
                                if crossed != 0:
                                    before = T.alloc_var("int32")
                                    before = bits.trit(word, at)
                                    after = T.alloc_var("int32")
                                    after = bits.clamp(before + crossed, -1, 1)
                                    word = bits.with_trit(word, at, after)
                                    if after != before:
                                        count = count + 1
                                    if given(carry, carry_given):
                                        if after != before:
                                            vote = vote - crossed * threshold
                                        else:
                                            vote = crossed * (threshold >> 1)
                                    else:
                                        vote = 0
                                size = T.alloc_var("int32")
                                size = T.max(vote, -vote)
                                if given(scaled, scaled_given):
                                    if rate != 0:
                                        h = T.alloc_var("uint32")
                                        h = bits.hashed(
                                            bits.index(n, columns, k),
                                            key_0,
                                            key_1,
                                        )
                                        size = size - decay(size, rate, h)
                                else:
                                    size = T.max(size - rate, 0)
                                if vote < 0:
                                    size = -size
                                if bits_held == 8:
                                    votes[n, k] = T.cast(size, "int8")
                                elif bits_held == 4:
                                    held = bits.with_nibble(held, i, size)
                                else:
                                    held = bits.with_trit(held, i, size)
                        if bits_held != 8:
                            votes[n, parts * u + part] = T.reinterpret(held, "int32")
                    if count != 0:
                        words[n, u] = T.reinterpret(word, "int32")
                counts[t] = count
            for _ in lane.parallel(1):
                total = T.alloc_var("int32")
                total = 0
                for i in T.serial(threads):
                    total = total + counts[i]
                moved[n, block] = total

    return flip


def flip_exponents(lane: Lane) -> Any:
    """Move exponents whose votes crossed the threshold by one step within their band.

    ``moved`` is 1 for those that changed.
    """
    T = lane.T
    bits = Bits(T)
    threads = lane.width
    C = T.dynamic("C")

    @T.prim_func
    def move(
        exponent: T.Tensor((C,), "int8"),
        votes: T.Tensor((C,), "int8"),
        origin: T.Tensor((C,), "int8"),
        moved: T.Tensor((C,), "int8"),
        threshold: T.int32,
        band: T.int32,
        leak: T.int32,
    ):
        with lane.grid(T.ceildiv(C, threads), threads=threads) as b:
            for t in lane.parallel(threads):
                c = b * threads + t
                if c < C:
                    vote = T.alloc_var("int32")
                    vote = T.cast(votes[c], "int32")
                    up = bits.crossed(vote, threshold)
                    before = T.alloc_var("int32")
                    before = T.cast(exponent[c], "int32")
                    centre = T.cast(origin[c], "int32")
                    wanted = T.alloc_var("int32")
                    wanted = bits.clamp(
                        before + up,
                        centre - band,
                        centre + band,
                    )
                    wanted = bits.clamp(wanted, -126, 127)
                    moved[c] = T.cast(wanted != before, "int8")
                    exponent[c] = T.cast(wanted, "int8")
                    vote = vote - threshold * up
                    size = T.max(T.max(vote, -vote) - leak, 0)
                    votes[c] = T.cast(T.if_then_else(vote < 0, -size, size), "int8")

    return move
