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
    bits = Bits(lane)
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
    # Whether the 16 accumulators of a word are read and written at once.
    wide = lane.fixed and bits_held == 8 and K % UNIT == 0
    # Threads that count flips together.
    warps = threads // 32 if lane.cuda else threads

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
            counts = lane.shared((warps,), "int32")
            width = lane.constant(K, columns)
            for t in lane.parallel(threads):
                word = T.alloc_var("uint32")
                sixteen = T.alloc_local((UNIT,), "int8")
                four = T.alloc_local((4,), "int32")
                count = T.alloc_var("int32")
                count = 0
                u = block * threads + t
                if u < W:
                    word = T.reinterpret(words[n, u], "uint32")
                    if wide:
                        for i in lane.vectorized(UNIT):
                            sixteen[i] = votes[n, u * UNIT + i]
                    for part in lane.unrolled(parts):
                        held = T.alloc_var("uint32")
                        if bits_held != 8:
                            held = T.reinterpret(votes[n, parts * u + part], "uint32")
                        for q in lane.unrolled(each // 4):
                            # Crossings are rare: four accumulators are looked at together.
                            largest = T.alloc_var("int32")
                            largest = 0
                            for b in lane.unrolled(4):
                                i = 4 * q + b
                                k = u * UNIT + part * each + i
                                four[b] = 0
                                if k < width:
                                    if wide:
                                        four[b] = T.cast(sixteen[i], "int32")
                                    elif bits_held == 8:
                                        four[b] = T.cast(votes[n, k], "int32")
                                    elif bits_held == 4:
                                        four[b] = bits.nibble(held, i)
                                    else:
                                        four[b] = bits.trit(held, i)
                                size = T.max(four[b], -four[b])
                                largest = T.max(largest, size)
                            if largest >= threshold:
                                for b in lane.unrolled(4):
                                    at = part * each + 4 * q + b
                                    crossed = T.alloc_var("int32")
                                    crossed = bits.crossed(four[b], threshold)
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
                                                four[b] = four[b] - crossed * threshold
                                            else:
                                                four[b] = crossed * (threshold >> 1)
                                        else:
                                            four[b] = 0
                            for b in lane.unrolled(4):
                                i = 4 * q + b
                                k = u * UNIT + part * each + i
                                left = T.alloc_var("int32")
                                left = four[b]
                                if given(scaled, scaled_given):
                                    h = bits.hashed(
                                        bits.index(n, width, k),
                                        key_0,
                                        key_1,
                                    )
                                    size = T.max(left, -left)
                                    size = size - decay(size, rate, h)
                                    left = T.if_then_else(left < 0, -size, size)
                                else:
                                    left = left - bits.clamp(left, -rate, rate)
                                if wide:
                                    sixteen[i] = T.cast(left, "int8")
                                elif k < width:
                                    if bits_held == 8:
                                        votes[n, k] = T.cast(left, "int8")
                                    elif bits_held == 4:
                                        held = bits.with_nibble(held, i, left)
                                    else:
                                        held = bits.with_trit(held, i, left)
                        if bits_held != 8:
                            votes[n, parts * u + part] = T.reinterpret(held, "int32")
                    if wide:
                        for i in lane.vectorized(UNIT):
                            votes[n, u * UNIT + i] = sixteen[i]
                    if count != 0:
                        words[n, u] = T.reinterpret(word, "int32")
                if lane.cuda:
                    for s in T.unroll(5):
                        count = count + T.shfl_xor(count, 16 >> s)
                    if t % 32 == 0:
                        counts[t // 32] = count
                else:
                    counts[t] = count
            for _ in lane.parallel(1):
                total = T.alloc_var("int32")
                total = 0
                for i in T.serial(warps):
                    total = total + counts[i]
                moved[n, block] = total

    return flip


def flip_exponents(lane: Lane) -> Any:
    """Move exponents whose votes crossed the threshold by one step within their band.

    ``moved`` is 1 for those that changed.
    """
    T = lane.T
    bits = Bits(lane)
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
