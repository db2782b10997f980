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
    stored = "int8" if rule.bits == 8 else "int32"
    # Whether the 16 accumulators of a word are read and written at once.
    whole_words = lane.fixed and K % UNIT == 0
    wide = whole_words and rule.bits == 8
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

    def is_nan(value: Any) -> Any:
        """Whether a float32 is NaN."""
        return bits.magnitude(value) > INFINITY

    def size_of(value: Any) -> Any:
        """``|value|`` in the dtype of the sums of magnitudes."""
        size = T.max(value, -value)
        if integer:
            # Not negative: its upper half is 0, and need not be worked out.
            size = T.cast(size, "uint32")
        return T.cast(size, sizes)

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
        v = T.alloc_var("int32")
        v = 0
        if rule.chosen(SIGN, kind):
            v = bits.clamp(g, -1, 1) if integer else bits.sign(g, T.cast(0, sums), "int32")
        if rule.chosen(FACTORS, kind):
            h = bits.hashed(bits.index(n, K, k), key_0, key_1)
            p = T.alloc_var("float32")
            p = T.cast(g, "float32")
            if integer:
                p = p * scale[0]
            p = p * T.reinterpret(row_scale, "float32")
            p = p * T.reinterpret(column_scale, "float32")
            bounded = T.alloc_var("float32")
            none = is_nan(p)
            bounded = T.if_then_else(
                none,
                T.float32(0.0),
                bits.clamp(p, -top, top),
            )
            v = T.cast(
                T.floor(bounded + bits.narrowed(h, noise_shift)),
                "int32",
            )
        if rule.chosen(SHIFTS, kind):
            h = bits.hashed(bits.index(n, K, k), key_0, key_1)
            power = (T.reinterpret(scale[0], "int32") >> 23) - 127
            shift = T.alloc_var("int32")
            shift = row_scale - power + column_scale
            if shift >= 0:
                shift = T.min(shift, 31)
                bound = bounds[shift]
                noise = T.cast(h, "int64") & bits.low_mask(shift)
                wide_sum = T.cast(bits.clamp(g, -bound, bound), "int64") + noise
                v = T.cast(wide_sum >> T.cast(shift, "int64"), "int32")
            else:
                # Clamped before the shift too, so that 32 bits are enough.
                bound = limit >> 8
                v = bits.clamp(g, -bound, bound) << T.min(-shift, 16)
                v = bits.clamp(v, -bound, bound)
        return v

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
            bounds = lane.shared((32,), "int32")
            if rule.chosen(SHIFTS, kind):
                # The largest magnitude of a gradient before each shift.
                for t in lane.parallel(32):
                    bound = (T.cast(limit, "int64") << T.cast(t, "int64")) >> T.int64(8)
                    bounds[t] = T.cast(T.min(bound, T.int64(_INT_MAX)), "int32")
            form(a, b, order, starts, g_tile, bn, bk)
            for t in lane.parallel(rows * units):
                word = T.alloc_var("uint32")
                sixteen = T.alloc_local((UNIT,), "int8")
                scales = T.alloc_local((UNIT,), "int32")
                score = T.alloc_var("int32")
                square = T.alloc_var("float32")
                size = T.alloc_var(sizes)
                fault = T.alloc_var("int32")
                score = 0
                square = T.float32(0.0)
                size = T.cast(0, sizes)
                fault = 0
                line = t // units
                place = t % units
                r = bn * rows + line
                u = bk * units + place
                if r < count and u < W:
                    n = T.alloc_var("int32")
                    n = r
                    if mapped:
                        n = T.cast(names[r], "int32")
                    word = T.reinterpret(words[n, u], "uint32")
                    if wide:
                        for i in lane.vectorized(UNIT):
                            sixteen[i] = votes[n, u * UNIT + i]
                    top = T.alloc_var("float32")
                    top = T.cast(limit, "float32") * T.float32(1.0 / 256)
                    row_scale = T.alloc_var("int32")
                    row_scale = 0
                    if scaled(kind):
                        row_scale = vote_scale[n]
                    if wide_scale:
                        for i in lane.vectorized(UNIT):
                            scales[i] = vote_scale[N + u * UNIT + i]
                    for part in lane.unrolled(parts):
                        held = T.alloc_var("uint32")
                        if rule.bits != 8:
                            held = T.reinterpret(votes[n, parts * u + part], "uint32")
                        for i in lane.unrolled(each):
                            at = part * each + i
                            k = u * UNIT + at
                            if k < K:
                                g = T.alloc_var(sums)
                                if integer:
                                    g = g_tile[line, place * UNIT + at]
                                else:
                                    # A choice, no branch: after a branch the compiler takes the
                                    # number from before.
                                    raw = T.alloc_var("float32")
                                    raw = g_tile[line, place * UNIT + at]
                                    bad = T.alloc_var("int32")
                                    bad = T.cast(is_nan(raw), "int32")
                                    fault = fault + bad
                                    bounded = bits.clamp(
                                        raw,
                                        T.float32(-_FLOAT_MAX),
                                        T.float32(_FLOAT_MAX),
                                    )
                                    g = T.if_then_else(
                                        bad != 0,
                                        T.float32(0.0),
                                        bounded,
                                    )
                                    g_tile[line, place * UNIT + at] = g
                                whole = T.cast(g, "float32")
                                square = square + whole * whole
                                if scaled(kind):
                                    size = size + size_of(g)
                                column_scale = T.alloc_var("int32")
                                if wide_scale:
                                    column_scale = scales[at]
                                elif scaled(kind):
                                    column_scale = vote_scale[N + k]
                                v = vote(
                                    g,
                                    scale,
                                    row_scale,
                                    column_scale,
                                    bounds,
                                    top,
                                    limit,
                                    noise_shift,
                                    key_0,
                                    key_1,
                                    kind,
                                    n,
                                    k,
                                )
                                score = score + v * bits.trit(word, at)
                                old = T.alloc_var("int32")
                                if wide:
                                    old = T.cast(sixteen[at], "int32")
                                elif rule.bits == 8:
                                    old = T.cast(votes[n, k], "int32")
                                elif rule.bits == 4:
                                    old = bits.nibble(held, i)
                                else:
                                    old = bits.trit(held, i)
                                left = bits.clamp(old - v, lowest(kind), high)
                                if wide:
                                    sixteen[at] = T.cast(left, "int8")
                                elif rule.bits == 8:
                                    votes[n, k] = T.cast(left, "int8")
                                elif rule.bits == 4:
                                    held = bits.with_nibble(held, i, left)
                                else:
                                    held = bits.with_trit(held, i, left)
                        if rule.bits != 8:
                            votes[n, parts * u + part] = T.reinterpret(held, "int32")
                    if wide:
                        for i in lane.vectorized(UNIT):
                            votes[n, u * UNIT + i] = sixteen[i]
                score_tile[line, place] = score
                square_tile[line, place] = square
                size_tile[line, place] = size
                fault_tile[line, place] = fault
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
                    for i in T.serial(rows):
                        if bn * rows + i < count:
                            whole = T.cast(g_tile[i, t], "float32")
                            square = square + whole * whole
                            if scaled(kind):
                                size = size + size_of(g_tile[i, t])
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
