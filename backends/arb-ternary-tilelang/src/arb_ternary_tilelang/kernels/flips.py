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
    shrinks by ``rate``: the leak, or with ``scaled`` the decay. The number of
    trits that changed is added to ``moved``, by row.
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
    wide = bits_held == 8 and lane.whole_words(K)
    if wide:
        V = K // 4
    stored = "int8" if bits_held == 8 and not wide else "int32"

    high = T.uint32(0x80808080)

    def decay(size: Any, rate: Any, hashed: Any) -> Any:
        """``size * rate / 2**16``, rounded stochastically."""
        noise = T.cast(hashed & T.uint32(0xFFFF), "int32")
        return (size * rate + noise) >> 16

    def crossing(sizes: Any, threshold: Any) -> Any:
        """Four bytes whose highest bit is set where an accumulator crosses the threshold."""
        return sizes + T.cast(128 - threshold, "uint32") * T.uint32(0x01010101)

    @T.macro
    def shrink(
        fours: Any,
        sizes: Any,
        n: Any,
        u: Any,
        rate: Any,
        key_0: Any,
        key_1: Any,
        scaled_given: Any,
    ) -> None:
        # No magnitude is above 127 here: 128 would have crossed.
        kept = T.alloc_local((4,), "uint32")
        for q in lane.unrolled(4):
            raised = T.alloc_var("uint32")
            if given(scaled, scaled_given):
                for b in lane.unrolled(4):
                    x = bits.mixed(bits.index(n, K, u * UNIT + 4 * q + b), key_0, key_1)
                    kept[b] = bits.call("uint32", "arb_decayed", sizes[q], b, rate, x)
                left_pair = bits.pick(kept[0], kept[1], T.uint32(0x62))
                right_pair = bits.pick(kept[2], kept[3], T.uint32(0x62))
                raised = bits.pick(left_pair, right_pair, T.uint32(0x5410))
            else:
                raised = bits.call("uint32", "arb_leaked", sizes[q], rate)
            fours[q] = bits.call("uint32", "arb_resized", fours[q], raised)

    @T.macro
    def cross(
        word: Any,
        count: Any,
        four: Any,
        b: Any,
        at: Any,
        threshold: Any,
        carry_given: Any,
    ) -> None:
        crossed = T.alloc_var("int32")
        crossed = bits.crossed(four[b], threshold)
        if crossed != 0:
            before = T.alloc_var("int32")
            before = bits.trit(word[0], at)
            after = T.alloc_var("int32")
            after = bits.clamp(before + crossed, -1, 1)
            word[0] = bits.with_trit(word[0], at, after)
            if after != before:
                count[0] = count[0] + 1
            if given(carry, carry_given):
                if after != before:
                    four[b] = four[b] - crossed * threshold
                else:
                    four[b] = crossed * (threshold >> 1)
            else:
                four[b] = 0

    @T.macro
    def report(words: Any, moved: Any, word: Any, count: Any, n: Any, u: Any) -> None:
        if count[0] != 0:
            words[n, u] = T.reinterpret(word[0], "int32")
            if lane.cuda:
                T.atomic_add(moved[n], count[0])
            else:
                moved[n] = moved[n] + count[0]

    @T.prim_func
    def flip(
        words: T.Tensor((N, W), "int32"),
        votes: T.Tensor((N, V), stored),
        moved: T.Tensor((N,), "int32"),
        columns: T.int32,
        threshold: T.int32,
        rate: T.int32,
        key_0: T.int32,
        key_1: T.int32,
        scaled_given: T.int32,
        carry_given: T.int32,
    ):
        with lane.grid(N, T.ceildiv(W, threads), threads=threads) as (n, block):
            width = lane.constant(K, columns)
            for t in lane.parallel(threads):
                word = T.alloc_local((1,), "uint32")
                fours = T.alloc_local((4,), "uint32")
                sizes = T.alloc_local((4,), "uint32")
                four = T.alloc_local((4,), "int32")
                count = T.alloc_local((1,), "int32")
                count[0] = 0
                u = block * threads + t
                if u < W:
                    if wide:
                        for q in lane.vectorized(4):
                            four[q] = votes[n, 4 * u + q]
                        # Crossings are rare: all are looked for together. The highest bit of a
                        # byte is set if its accumulator crosses.
                        over = T.alloc_var("uint32")
                        over = T.uint32(0)
                        for q in lane.unrolled(4):
                            fours[q] = T.reinterpret(four[q], "uint32")
                            sizes[q] = bits.call("uint32", "arb_magnitudes", fours[q])
                            over = over | crossing(sizes[q], threshold)
                        if over & high != T.uint32(0):
                            word[0] = T.reinterpret(words[n, u], "uint32")
                            for q in lane.unrolled(4):
                                if crossing(sizes[q], threshold) & high != T.uint32(0):
                                    for b in lane.unrolled(4):
                                        four[b] = bits.byte(fours[q], b)
                                        cross(
                                            word,
                                            count,
                                            four,
                                            b,
                                            4 * q + b,
                                            threshold,
                                            carry_given,
                                        )
                                    fours[q] = bits.bytes_of(four, 0)
                                    sizes[q] = bits.call("uint32", "arb_magnitudes", fours[q])
                            report(words, moved, word, count, n, u)
                        shrink(fours, sizes, n, u, rate, key_0, key_1, scaled_given)
                        for q in lane.unrolled(4):
                            four[q] = T.reinterpret(fours[q], "int32")
                        for q in lane.vectorized(4):
                            votes[n, 4 * u + q] = four[q]
                    else:
                        word[0] = T.reinterpret(words[n, u], "uint32")
                        for part in lane.unrolled(parts):
                            held = T.alloc_var("uint32")
                            if bits_held != 8:
                                held = T.reinterpret(votes[n, parts * u + part], "uint32")
                            for i in lane.unrolled(each):
                                k = u * UNIT + part * each + i
                                if k < width:
                                    if bits_held == 8:
                                        four[0] = T.cast(votes[n, k], "int32")
                                    elif bits_held == 4:
                                        four[0] = bits.nibble(held, i)
                                    else:
                                        four[0] = bits.trit(held, i)
                                    cross(
                                        word,
                                        count,
                                        four,
                                        0,
                                        part * each + i,
                                        threshold,
                                        carry_given,
                                    )
                                    left = T.alloc_var("int32")
                                    left = four[0]
                                    if given(scaled, scaled_given):
                                        h = bits.hashed(bits.index(n, width, k), key_0, key_1)
                                        size = T.max(left, -left)
                                        size = size - decay(size, rate, h)
                                        left = T.if_then_else(left < 0, -size, size)
                                    else:
                                        left = left - bits.clamp(left, -rate, rate)
                                    if bits_held == 8:
                                        votes[n, k] = T.cast(left, "int8")
                                    elif bits_held == 4:
                                        held = bits.with_nibble(held, i, left)
                                    else:
                                        held = bits.with_trit(held, i, left)
                            if bits_held != 8:
                                votes[n, parts * u + part] = T.reinterpret(held, "int32")
                        report(words, moved, word, count, n, u)

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
