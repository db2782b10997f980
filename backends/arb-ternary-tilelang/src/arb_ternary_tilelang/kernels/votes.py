"""Gradients turned into votes on the chip.

TileLang reads the annotations of kernels as values, so this module does not postpone them.
"""

from typing import Any

from attrs import frozen

from arb_ternary_tilelang.kernels.bits import INFINITY, UNIT, Bits
from arb_ternary_tilelang.lane import Lane, Option, Tiles, given

#: Where a gradient comes from: ``grad.T @ x``, or the sum of the gradients of each id.
PRODUCT = "product"
LOOKUP = "lookup"
#: What a vote is: a sign, a gradient times float factors, a gradient shifted right.
SIGN = 0
FACTORS = 1
SHIFTS = 2
_FLOAT_MAX = 3.4028234663852886e38
_INT_MAX = 2**31 - 1


@frozen
class Rule:
    """Options that a kernel that casts votes is compiled for.

    Attributes:
        source: :data:`PRODUCT` or :data:`LOOKUP`.
        kind: :data:`SIGN`, :data:`FACTORS` or :data:`SHIFTS`; None if an argument selects it.
        grad: dtype of the gradient of the result; int8 gives exact int32 sums, others float32.
        x: dtype of the activations.
        bits: bits of an accumulator.
        learns: whether scores for the exponents are wanted.
    """

    source: str
    kind: int | None
    grad: str
    x: str
    bits: int
    learns: bool

    @property
    def integer(self) -> bool:
        """Whether the gradient of the weight is exact."""
        return self.grad == "int8"

    @property
    def high(self) -> int:
        """The largest accumulator; the smallest is its negative, or for sign votes of 8 bits one
        less.
        """
        return {8: 127, 4: 7, 2: 1}[self.bits]

    def chosen(self, kind: int, argument: Any) -> Any:
        """Whether votes are of this kind; only integers are shifted."""
        if kind == SHIFTS and not self.integer:
            return False
        if self.kind is None:
            return argument == kind
        return self.kind == kind


def cast(
    lane: Lane,
    rule: Rule,
    tiles: Tiles,
    *,
    N: int,
    K: int,
    G: int,
) -> Any:
    """Form a tile of the gradient, cast its votes, and store its part of scores and statistics.

    The tile stays in the memory of its block. Sums over rows and columns are stored as parts, one
    per tile, so that the order in which they are added never changes.

    For a product ``a`` is ``grad [M, N]`` and ``b`` is ``x [M, K]``. On CUDA int8 operands come in
    blocks of ``tiles.depth`` rows, ``[blocks, N, depth]`` and ``[blocks, K, depth]``, because the
    matrix units want the terms of a sum side by side. For a lookup ``a`` is ``grad [M, K]``.
    """
    T = lane.T
    bits = Bits(lane)
    rows = tiles.rows
    columns = tiles.columns
    depth = lane.depth(tiles, rule.grad)
    units = columns // UNIT
    # Rows of a tile that its threads take at a time.
    lines = min(rows, tiles.threads // units) if lane.cuda else 1
    steps = rows // lines
    parts = 2 if rule.bits == 4 else 1
    each = UNIT // parts
    high = rule.high
    integer = rule.integer
    mapped = rule.source == LOOKUP
    sums = "int32" if integer else "float32"
    sizes = "int64" if integer else "float32"
    blocked = lane.cuda and integer and not mapped
    simple = lane.cuda and rule.grad == "float32"
    stages = tiles.stages if lane.cuda else 0
    W = lane.size("W", -(-K // UNIT))
    V = lane.size("V", 2 * -(-K // UNIT))
    N = lane.size("N", N)
    K = lane.size("K", K)
    if rule.bits == 8:
        V = K
    elif rule.bits == 2:
        V = W
    whole_words = lane.whole_words(K)
    wide = whole_words and rule.bits == 8
    if wide:
        V = K // 4
    stored = "int8" if rule.bits == 8 and not wide else "int32"
    wide_scale = whole_words and N % UNIT == 0 and rule.kind != SIGN
    M = T.dynamic("M")
    R = T.dynamic("R")
    L = T.dynamic("L")
    Q = T.dynamic("Q")
    D = T.dynamic("D")
    S = T.dynamic("S")

    def scaled(kind: Any) -> Any:
        """Whether votes are as large as the gradient."""
        return given(rule.kind, kind)

    def lowest(kind: Any) -> Any:
        """The smallest accumulator."""
        if rule.bits != 8:
            return -high
        if rule.kind is None:
            return T.if_then_else(kind == SIGN, -128, -127)
        return -128 if rule.kind == SIGN else -127

    def size_of(value: Any) -> Any:
        """``|value|``; of an integer as uint32."""
        if integer:
            return T.cast(T.abs(value), "uint32")
        return bits.call("float32", "arb_magnitude", value)

    starts_shape = (Q,)
    if mapped:
        a_shape = (M, K)
        b_shape = (Q,)
        starts_shape = (T.dynamic("P"),)
        count = R
    elif blocked:
        a_shape = (M, N, depth)
        b_shape = (M, K, depth)
        count = N
    else:
        a_shape = (M, N)
        b_shape = (M, K)
        count = N

    @T.macro
    def form(a: Any, b: Any, order: Any, starts: Any, g_tile: Any, bn: Any, bk: Any) -> None:
        if mapped:
            for t in lane.parallel(rows * columns):
                total = T.alloc_var(sums)
                total = T.cast(0, sums)
                r = bn * rows + t // columns
                k = bk * columns + t % columns
                if r < count and k < K:
                    first = T.alloc_var("int32")
                    first = T.cast(starts[r], "int32")
                    several = T.alloc_var("int32")
                    several = T.cast(starts[r + 1], "int32") - first
                    for i in T.serial(several):
                        m = T.alloc_var("int32")
                        m = T.cast(order[first + i], "int32")
                        total = total + T.cast(a[m, k], sums)
                g_tile[t // columns, t % columns] = total
        else:
            if blocked:
                a_tile = lane.shared((rows, depth), "int8")
                b_tile = lane.shared((columns, depth), "int8")
            else:
                a_tile = lane.shared((depth, rows), rule.grad)
                b_tile = lane.shared((depth, columns), rule.grad)
            total = lane.accumulator((rows, columns), sums)
            T.clear(total)
            for i in T.Pipelined(
                M if blocked else T.ceildiv(M, depth),
                num_stages=stages,
            ):
                if blocked:
                    T.copy(a[i, bn * rows : bn * rows + rows, 0:depth], a_tile)
                    T.copy(b[i, bk * columns : bk * columns + columns, 0:depth], b_tile)
                    T.gemm(a_tile, b_tile, total, transpose_B=True)
                else:
                    T.copy(a[i * depth, bn * rows], a_tile)
                    T.copy(b[i * depth, bk * columns], b_tile)
                    if simple:
                        for m in T.serial(depth):
                            for p, q in T.Parallel(rows, columns):
                                total[p, q] = total[p, q] + a_tile[m, p] * b_tile[m, q]
                    else:
                        T.gemm(a_tile, b_tile, total, transpose_A=True)
            for p, q in lane.parallel(rows, columns):
                g_tile[p, q] = total[p, q]

    @T.macro
    def vote(
        g: Any,
        scale: Any,
        row_scale: Any,
        column_scale: Any,
        bounds: Any,
        top: Any,
        limit: Any,
        noise_shift: Any,
        key_0: Any,
        key_1: Any,
        kind: Any,
        n: Any,
        k: Any,
    ) -> Any:
        move = T.alloc_var("int32")
        move = 0
        if rule.chosen(SIGN, kind):
            move = -bits.clamp(g, -1, 1) if integer else bits.sign(-g, T.cast(0, sums), "int32")
        if rule.chosen(FACTORS, kind):
            h = bits.hashed(bits.index(n, K, k), key_0, key_1)
            p = T.alloc_var("float32")
            p = T.cast(g, "float32")
            if integer:
                p = p * scale[0]
            p = p * T.reinterpret(row_scale, "float32")
            p = p * T.reinterpret(column_scale, "float32")
            # A product that is NaN stays NaN, of which no vote is made.
            p = bits.call("float32", "arb_clip", p, top)
            p = bits.call("float32", "arb_plus_noise", p, h, noise_shift)
            move = bits.call("int32", "arb_ceil", -p)
        if rule.chosen(SHIFTS, kind):
            h = bits.hashed(bits.index(n, K, k), key_0, key_1)
            shift = T.alloc_var("int32")
            shift = bits.call("int32", "arb_shift", row_scale, column_scale)
            entry = T.alloc_local((4,), "int32")
            for i in lane.vectorized(4):
                entry[i] = bounds[shift, i]
            # Minus the shifted sum of gradient and noise is the shifted sum of their complements.
            noise = ~h & T.reinterpret(entry[2], "uint32")
            clipped = bits.clamp(g, entry[0], entry[1])
            wide_sum = T.cast(noise, "int64") - T.cast(clipped, "int64")
            move = T.cast(wide_sum >> T.cast(shift, "int64"), "int32")
        return move

    @T.macro
    def add(scores: Any, r: Any, j: Any, amount: Any) -> None:
        if lane.cuda:
            T.atomic_add(scores[r, j], amount)
        else:
            scores[r, j] = scores[r, j] + amount

    @T.prim_func
    def cast_votes(
        a: T.Tensor(a_shape, rule.grad),
        b: T.Tensor(b_shape, rule.x),
        order: T.Tensor((L,), "int64"),
        starts: T.Tensor(starts_shape, "int64"),
        names: T.Tensor((R,), "int64"),
        words: T.Tensor((N, W), "int32"),
        votes: T.Tensor((N, V), stored),
        scores: T.Tensor((T.dynamic("A"), T.dynamic("E")), "int32"),
        scale: T.Tensor((S,), "float32"),
        vote_scale: T.Tensor((D,), "int32"),
        row_squares: T.Tensor((T.dynamic("X"), T.dynamic("Y")), "float32"),
        column_squares: T.Tensor((T.dynamic("Z"), K), "float32"),
        row_sizes: T.Tensor((T.dynamic("X1"), T.dynamic("Y1")), sizes),
        column_sizes: T.Tensor((T.dynamic("Z1"), T.dynamic("K1")), sizes),
        faults: T.Tensor((T.dynamic("X2"), T.dynamic("Y2")), "int32"),
        group: T.int32,
        limit: T.int32,
        noise_shift: T.int32,
        key_0: T.int32,
        key_1: T.int32,
        kind: T.int32,
    ):
        with lane.grid(
            T.ceildiv(count, rows),
            T.ceildiv(K, columns),
            threads=tiles.threads,
        ) as (bn, bk):
            g_tile = lane.shared((rows, columns), sums)
            score_tile = lane.shared((rows, units), "int32")
            square_tile = lane.shared((rows, units), "float32")
            size_tile = lane.shared((rows, units), sizes)
            fault_tile = lane.shared((rows, units), "int32")
            square_part = lane.shared((lines, columns), "float32")
            size_part = lane.shared((lines, columns), sizes)
            bounds = lane.shared((32, 4), "int32")
            if rule.chosen(SHIFTS, kind):
                # The range of a gradient before each shift, and the mask of its noise.
                for t in lane.parallel(32):
                    bound = T.alloc_var("int64")
                    bound = (T.cast(limit, "int64") << T.cast(t, "int64")) >> T.int64(8)
                    bound = T.min(bound, T.int64(_INT_MAX))
                    bounds[t, 0] = T.cast(-bound, "int32")
                    bounds[t, 1] = T.cast(bound, "int32")
                    bounds[t, 2] = T.cast(bits.low_mask(t), "int32")
                    bounds[t, 3] = 0
            form(a, b, order, starts, g_tile, bn, bk)
            # A thread takes 16 columns, and rows that lie `lines` apart.
            for t in lane.parallel(lines * units):
                fours = T.alloc_local((4,), "int32")
                scales = T.alloc_local((UNIT,), "int32")
                values = T.alloc_local((UNIT,), sums)
                moves = T.alloc_local((UNIT,), "int32")
                own = T.alloc_local((UNIT,), "uint32")
                above = T.alloc_local((UNIT,), "uint32")
                column_square = T.alloc_local((UNIT,), "float32")
                column_size = T.alloc_local((UNIT,), sizes)
                place = t % units
                u = bk * units + place
                top = T.alloc_var("float32")
                top = T.cast(limit, "float32") * T.float32(1.0 / 256)
                power = T.alloc_var("int32")
                power = 0
                if rule.chosen(SHIFTS, kind):
                    power = (T.reinterpret(scale[0], "int32") >> 23) - 127
                least = T.alloc_var("int32")
                least = _INT_MAX
                for i in lane.unrolled(UNIT):
                    column_square[i] = T.float32(0.0)
                    column_size[i] = T.cast(0, sizes)
                    above[i] = T.uint32(0)
                    scales[i] = 0
                if wide_scale:
                    for i in lane.vectorized(UNIT):
                        scales[i] = vote_scale[N + u * UNIT + i]
                elif scaled(kind):
                    for i in lane.unrolled(UNIT):
                        if u * UNIT + i < K:
                            scales[i] = vote_scale[N + u * UNIT + i]
                if rule.chosen(SHIFTS, kind):
                    for i in lane.unrolled(UNIT):
                        least = T.min(least, scales[i])
                for s in lane.unrolled(steps):
                    line = s * lines + t // units
                    r = bn * rows + line
                    word = T.alloc_var("uint32")
                    score = T.alloc_var("int32")
                    plain = T.alloc_var("int32")
                    square = T.alloc_var("float32")
                    size = T.alloc_var(sizes)
                    fault = T.alloc_var("int32")
                    score = 0
                    plain = 0
                    square = T.float32(0.0)
                    size = T.cast(0, sizes)
                    fault = 0
                    if r < count and u < W:
                        n = T.alloc_var("int32")
                        n = r
                        if mapped:
                            n = T.cast(names[r], "int32")
                        word = T.reinterpret(words[n, u], "uint32")
                        row_scale = T.alloc_var("int32")
                        row_scale = 0
                        if scaled(kind):
                            row_scale = vote_scale[n] - power
                        if whole_words:
                            for i in lane.vectorized(UNIT):
                                values[i] = g_tile[line, place * UNIT + i]
                        else:
                            for i in lane.unrolled(UNIT):
                                values[i] = T.cast(0, sums)
                                if u * UNIT + i < K:
                                    values[i] = g_tile[line, place * UNIT + i]
                        if not integer:
                            for i in lane.unrolled(UNIT):
                                size = size + size_of(values[i])
                            # Only a number that is not finite can make the sum so.
                            if bits.magnitude(size) >= INFINITY:
                                size = T.float32(0.0)
                                for i in lane.unrolled(UNIT):
                                    bad = T.alloc_var("int32")
                                    bad = T.cast(bits.magnitude(values[i]) > INFINITY, "int32")
                                    fault = fault + bad
                                    bounded = bits.clamp(
                                        values[i],
                                        T.float32(-_FLOAT_MAX),
                                        T.float32(_FLOAT_MAX),
                                    )
                                    values[i] = T.if_then_else(bad != 0, T.float32(0.0), bounded)
                                    size = size + size_of(values[i])
                        for i in lane.unrolled(UNIT):
                            whole = T.alloc_var("float32")
                            whole = T.cast(values[i], "float32")
                            square = bits.fused(whole, whole, square)
                            column_square[i] = bits.fused(whole, whole, column_square[i])
                            if integer:
                                # Two sizes side by side, or one above the other, are below 2**32.
                                own[i] = size_of(values[i])
                                above[i] = above[i] + own[i]
                                if i % 2 == 1:
                                    size = size + T.cast(own[i - 1] + own[i], sizes)
                            else:
                                column_size[i] = column_size[i] + size_of(values[i])
                        for i in lane.unrolled(UNIT):
                            moves[i] = vote(
                                values[i],
                                scale,
                                row_scale,
                                scales[i],
                                bounds,
                                top,
                                limit,
                                noise_shift,
                                key_0,
                                key_1,
                                kind,
                                n,
                                u * UNIT + i,
                            )
                        if rule.chosen(SHIFTS, kind):
                            bound = limit >> 8
                            # To the left; clipped before it too, so that 32 bits are enough.
                            if row_scale + least < 0:
                                for i in lane.unrolled(UNIT):
                                    left = T.alloc_var("int32")
                                    left = -(row_scale + scales[i])
                                    if left > 0:
                                        moves[i] = bits.clamp(-values[i], -bound, bound)
                                        moves[i] = moves[i] << T.min(left, 16)
                                        moves[i] = bits.clamp(moves[i], -bound, bound)
                        if rule.learns:
                            for q in lane.unrolled(4):
                                # Codes are trits plus one.
                                four = bits.bytes_of(moves, 4 * q)
                                codes = (word >> T.cast(2 * q, "uint32")) & T.uint32(0x03030303)
                                score = bits.call("int32", "arb_dot", four, codes, score)
                                plain = bits.call(
                                    "int32", "arb_dot", four, T.uint32(0x01010101), plain
                                )
                            score = plain - score
                        if wide:
                            for q in lane.vectorized(4):
                                fours[q] = votes[n, 4 * u + q]
                            for q in lane.unrolled(4):
                                left_four = bits.call(
                                    "uint32",
                                    "arb_moved",
                                    T.reinterpret(fours[q], "uint32"),
                                    moves[4 * q],
                                    moves[4 * q + 1],
                                    moves[4 * q + 2],
                                    moves[4 * q + 3],
                                    lowest(kind),
                                )
                                fours[q] = T.reinterpret(left_four, "int32")
                            for q in lane.vectorized(4):
                                votes[n, 4 * u + q] = fours[q]
                        else:
                            for part in lane.unrolled(parts):
                                held = T.alloc_var("uint32")
                                if rule.bits != 8:
                                    held = T.reinterpret(votes[n, parts * u + part], "uint32")
                                for i in lane.unrolled(each):
                                    at = part * each + i
                                    k = u * UNIT + at
                                    if k < K:
                                        old = T.alloc_var("int32")
                                        if rule.bits == 8:
                                            old = T.cast(votes[n, k], "int32")
                                        elif rule.bits == 4:
                                            old = bits.nibble(held, i)
                                        else:
                                            old = bits.trit(held, i)
                                        left = bits.clamp(old + moves[at], lowest(kind), high)
                                        if rule.bits == 8:
                                            votes[n, k] = T.cast(left, "int8")
                                        elif rule.bits == 4:
                                            held = bits.with_nibble(held, i, left)
                                        else:
                                            held = bits.with_trit(held, i, left)
                                if rule.bits != 8:
                                    votes[n, parts * u + part] = T.reinterpret(held, "int32")
                    if integer and (s % 2 == 1 or s == steps - 1):
                        for i in lane.unrolled(UNIT):
                            column_size[i] = column_size[i] + T.cast(above[i], sizes)
                            above[i] = T.uint32(0)
                    score_tile[line, place] = score
                    square_tile[line, place] = square
                    if scaled(kind):
                        size_tile[line, place] = size
                    if not integer:
                        fault_tile[line, place] = fault
                for i in lane.vectorized(UNIT):
                    square_part[t // units, place * UNIT + i] = column_square[i]
                if scaled(kind):
                    for i in lane.vectorized(UNIT):
                        size_part[t // units, place * UNIT + i] = column_size[i]
            for t in lane.parallel(rows):
                r = bn * rows + t
                if r < count:
                    square = T.alloc_var("float32")
                    size = T.alloc_var(sizes)
                    fault = T.alloc_var("int32")
                    score = T.alloc_var("int32")
                    square = T.float32(0.0)
                    size = T.cast(0, sizes)
                    fault = 0
                    score = 0
                    for i in T.serial(units):
                        square = square + square_tile[t, i]
                        if scaled(kind):
                            size = size + size_tile[t, i]
                        if not integer:
                            fault = fault + fault_tile[t, i]
                        if rule.learns:
                            u = bk * units + i
                            score = score + score_tile[t, i]
                            j = u * UNIT // lane.constant(G, group)
                            if u < W and (
                                i == units - 1
                                or u == W - 1
                                or (u + 1) * UNIT // lane.constant(G, group) != j
                            ):
                                add(scores, r, j, score)
                                score = 0
                    row_squares[bk, r] = square
                    if scaled(kind):
                        row_sizes[bk, r] = size
                    if not integer:
                        faults[bk, r] = fault
            for t in lane.parallel(columns):
                k = bk * columns + t
                if k < K:
                    square = T.alloc_var("float32")
                    size = T.alloc_var(sizes)
                    square = T.float32(0.0)
                    size = T.cast(0, sizes)
                    for i in lane.unrolled(lines):
                        square = square + square_part[i, t]
                        if scaled(kind):
                            size = size + size_part[i, t]
                    column_squares[bn, k] = square
                    if scaled(kind):
                        column_sizes[bn, k] = size

    return cast_votes


def settle(lane: Lane, scaled: Option, mapped: Option) -> Any:
    """Subtract scores ``[R, J]`` from exponent votes ``[N, J]``.

    Row ``r`` of the scores belongs to row ``names[r]`` of the votes if ``mapped``, else to row
    ``r``.
    """
    T = lane.T
    bits = Bits(lane)
    threads = lane.width
    N = T.dynamic("N")
    J = T.dynamic("J")
    R = T.dynamic("R")
    L = T.dynamic("L")

    @T.prim_func
    def settle_scores(
        scores: T.Tensor((R, J), "int32"),
        names: T.Tensor((L,), "int64"),
        exponent_votes: T.Tensor((N, J), "int8"),
        shift: T.int32,
        key_0: T.int32,
        key_1: T.int32,
        scaled_given: T.int32,
        mapped_given: T.int32,
    ):
        with lane.grid(R, T.ceildiv(J, threads), threads=threads) as (r, block):
            for t in lane.parallel(threads):
                if block * threads + t < J:
                    j = block * threads + t
                    n = T.alloc_var("int32")
                    n = r
                    if given(mapped, mapped_given):
                        n = T.cast(names[r], "int32")
                    moved = T.alloc_var("int64")
                    moved = T.cast(scores[r, j], "int64")
                    low = T.alloc_var("int64")
                    low = T.int64(-128)
                    if given(scaled, scaled_given):
                        low = T.int64(-127)
                        h = bits.hashed(bits.index(n, J, j), key_0, key_1)
                        mask = bits.low_mask(shift)
                        moved = (moved + (T.cast(h, "int64") & mask)) >> T.cast(shift, "int64")
                    else:
                        moved = bits.sign(moved, T.int64(0), "int64")
                    left = T.cast(exponent_votes[n, j], "int64") - moved
                    left_8 = bits.clamp(left, low, T.int64(127))
                    exponent_votes[n, j] = T.cast(left_8, "int8")

    return settle_scores
