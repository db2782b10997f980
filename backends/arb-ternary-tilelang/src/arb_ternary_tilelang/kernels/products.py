"""Products with a packed weight.

TileLang reads the annotations of kernels as values, so this module does not postpone them.
"""

from math import gcd
from typing import Any, Final

from arb_ternary_tilelang.kernels.bits import UNIT, Bits
from arb_ternary_tilelang.lane import Lane, Option, Tiles, given

#: A mode of :func:`product`: exact int32 sums, to be combined by the caller.
SUMS = "sums"
#: Rows of a weight from which on a thread of :func:`gemv` takes four of them instead of two.
_MANY_OUTPUTS: Final = 2048


def words_of_a_level(K: int, G: int, most: int) -> int:
    """How many words of an aligned block of ``most`` words share a level: 1, 2, 4 or 8."""
    whole = gcd(8, most, -(-K // UNIT))
    return whole if G >= K else gcd(whole, G // UNIT)


def product(
    lane: Lane,
    turned: bool,
    mode: str,
    out: str,
    bias: Option,
    tiles: Tiles,
    splits: int,
    *,
    N: int,
    K: int,
    G: int,
) -> Any:
    """Multiply ``A @ W.T``, or ``A @ W`` if ``turned``.

    The weight is decoded tile by tile, next to the matrix units.

    Args:
        lane: the target.
        turned: whether the sum is over the rows of the weight.
        mode: ``int8``, :data:`SUMS`, or the float dtype of ``A``. Integer sums are taken over ``T
            << level``, where a negative level drops the weight; float ones over ``T * 2**level``.
        out: dtype of the result, int32 for sums.
        bias: whether a bias is added.
        tiles: sizes of tiles.
        splits: parts of the sum, each with its own result; more than one only for :data:`SUMS`.
        N: rows of the weight.
        K: columns of the weight.
        G: columns that share a level.
    """
    T = lane.T
    bits = Bits(lane)
    integer = mode in ("int8", SUMS)
    if integer:
        held_as = "int8"
        sums = "int32"
    else:
        held_as = mode
        sums = "float32"
    M = T.dynamic("M")
    W = lane.size("W", -(-K // UNIT))
    J = lane.size("J", -(-K // G))
    N = lane.size("N", N)
    K = lane.size("K", K)
    S = T.dynamic("S")
    F = T.dynamic("F")
    B = T.dynamic("B")
    if turned:
        R = N
        P = K
    else:
        R = K
        P = N
    rows = tiles.rows
    columns = tiles.columns
    depth = lane.depth(tiles, held_as)
    units = (columns if turned else depth) // UNIT
    simple = lane.cuda and mode == "float32"
    # Words of a row and rows of a word that a thread decodes at a time.
    run = 1
    high = 1
    if integer and turned:
        high = 4
    elif integer and lane.fixed:
        run = words_of_a_level(K, G, gcd(units, columns * units // tiles.threads))
    stages = tiles.stages if lane.cuda else 0

    def table_of(level: Any) -> Any:
        """Weights ``T << level`` by their code, in the bytes of a word.

        They are 0 for a level of -1, which shifts by 31.
        """
        shift = T.cast(level & 31, "uint32")
        return (T.uint32(0x000100FF) << shift) & T.uint32(0x00FF00FF)

    @T.macro
    def decode_half(word: Any, table: Any, first: Any, quads: Any) -> None:
        """Decode the columns of ``first`` and ``first + 2``, four of each.

        ``quads[0]`` gets the first two of both, in turn, ``quads[1]`` the others: where their codes
        lie in the word.
        """
        codes = T.alloc_var("uint32")
        codes = (word >> T.cast(2 * first, "uint32")) & T.uint32(0x33333333)
        quads[0] = bits.pick(table, T.uint32(0), codes)
        quads[1] = bits.pick(table, T.uint32(0), codes >> T.uint32(16))

    @T.macro
    def decode_words(
        words: Any,
        levels: Any,
        tile: Any,
        n: Any,
        u: Any,
        line: Any,
        place: Any,
        group: Any,
    ) -> None:
        """Decode ``run`` words of a row at a time, for the integer units."""
        held = T.alloc_local((run,), "int32")
        quads = T.alloc_local((2,), "uint32")
        values = T.alloc_local((UNIT,), "int8")
        level = T.alloc_var("int32")
        for c in T.unroll(run):
            held[c] = T.int32(0x55555555)
        level = 0
        if n < N and u < W:
            for c in lane.vectorized(run):
                held[c] = words[n, u + c]
            level = T.cast(levels[n, u * UNIT // group], "int32")
        table = T.alloc_var("uint32")
        table = table_of(level)
        for c in T.unroll(run):
            for first in T.unroll(2):
                word = T.reinterpret(held[c], "uint32")
                decode_half(word, table, first, quads)
                for second in T.unroll(2):
                    four = T.alloc_var("uint32")
                    odd = T.cast(second * 0x1111, "uint32")
                    selector = T.uint32(0x6420) + odd
                    four = bits.pick(quads[0], quads[1], selector)
                    quarter = 4 * (first + 2 * second)
                    for b in T.unroll(4):
                        byte = T.cast(8 * b, "uint32")
                        values[quarter + b] = T.cast(four >> byte, "int8")
            for v in lane.vectorized(UNIT):
                tile[line, (place + c) * UNIT + v] = values[v]

    @T.macro
    def decode_turned(
        words: Any,
        levels: Any,
        tile: Any,
        n: Any,
        u: Any,
        line: Any,
        place: Any,
        group: Any,
    ) -> None:
        """Decode a word of each of four rows, transposed in squares of four by four bytes."""
        held = T.alloc_local((4,), "uint32")
        tables = T.alloc_local((4,), "uint32")
        quads = T.alloc_local((2,), "uint32")
        square = T.alloc_local((8,), "uint32")
        half = T.alloc_local((4,), "uint32")
        values = T.alloc_local((4,), "int8")
        for r in T.unroll(4):
            held[r] = T.uint32(0x55555555)
            tables[r] = T.uint32(0)
            row = n + r
            if row < N and u < W:
                held[r] = T.reinterpret(words[row, u], "uint32")
                level = T.cast(levels[row, u * UNIT // group], "int32")
                tables[r] = table_of(level)
        for first in T.unroll(2):
            for r in T.unroll(4):
                decode_half(held[r], tables[r], first, quads)
                square[r] = quads[0]
                square[4 + r] = quads[1]
            for q in T.unroll(2):
                for r in T.unroll(2):
                    at = 4 * q + 2 * r
                    left = square[at]
                    right = square[at + 1]
                    half[r] = bits.pick(left, right, T.uint32(0x5140))
                    half[2 + r] = bits.pick(left, right, T.uint32(0x7362))
                for v in T.unroll(4):
                    four = T.alloc_var("uint32")
                    odd = T.cast(v % 2 * 0x2222, "uint32")
                    selector = T.uint32(0x5410) + odd
                    pair = v // 2
                    four = bits.pick(half[2 * pair], half[2 * pair + 1], selector)
                    quarter = 4 * (first + 2 * (v % 2))
                    column = place * UNIT + quarter + 2 * q + pair
                    for b in T.unroll(4):
                        byte = T.cast(8 * b, "uint32")
                        values[b] = T.cast(four >> byte, "int8")
                    for b in lane.vectorized(4):
                        tile[column, line + b] = values[b]

    @T.macro
    def decode_floats(
        words: Any,
        levels: Any,
        tile: Any,
        n: Any,
        u: Any,
        line: Any,
        place: Any,
        group: Any,
    ) -> None:
        """Decode a word to ``T * 2**level``."""
        word = T.alloc_var("uint32")
        level = T.alloc_var("int32")
        values = T.alloc_local((UNIT,), held_as)
        word = T.uint32(0x55555555)
        level = 0
        if n < N and u < W:
            word = T.reinterpret(words[n, u], "uint32")
            level = T.cast(levels[n, u * UNIT // group], "int32")
        for v in T.unroll(UNIT):
            trit = T.cast(bits.trit(word, v), "float32")
            values[v] = T.cast(trit * bits.power_of_two(level), held_as)
        if turned == simple:
            for v in lane.vectorized(UNIT):
                tile[line, place * UNIT + v] = values[v]
        else:
            for v in T.unroll(UNIT):
                tile[place * UNIT + v, line] = values[v]

    if not integer:
        decode_tile = decode_floats
    elif turned:
        decode_tile = decode_turned
    else:
        decode_tile = decode_words

    @T.macro
    def multiply(a_tile: Any, w_tile: Any, total: Any) -> None:
        if simple:
            for r in T.serial(depth):
                for i, j in lane.parallel(rows, columns):
                    total[i, j] = total[i, j] + a_tile[i, r] * w_tile[r, j]
        else:
            T.gemm(a_tile, w_tile, total, transpose_B=True)

    @T.macro
    def settle(
        value: Any,
        scale: Any,
        floor: Any,
        added: Any,
        biased: Any,
        m: Any,
        p: Any,
    ) -> Any:
        y = T.alloc_var("float32")
        y = T.cast(value, "float32")
        if integer:
            y = y * scale[0 if turned else m]
            y = y * bits.power_of_two(floor[p])
        if given(bias, biased):
            y = y + added[p]
        return y

    @T.prim_func
    def multiply_weight(
        a: T.Tensor((M, R), held_as),
        scale: T.Tensor((S,), "float32"),
        words: T.Tensor((N, W), "int32"),
        levels: T.Tensor((N, J), "int8"),
        floor: T.Tensor((F,), "int32"),
        added: T.Tensor((B,), "float32"),
        result: T.Tensor((splits, M, P), out),
        group: T.int32,
        biased: T.int32,
    ):
        with lane.grid(
            T.ceildiv(P, columns),
            T.ceildiv(M, rows),
            splits,
            threads=tiles.threads,
        ) as (bp, bm, z):
            a_tile = lane.shared((rows, depth), held_as)
            # The matrix units want the terms of a sum side by side, threads the columns.
            w_tile = lane.shared((depth, columns) if simple else (columns, depth), held_as)
            total = lane.accumulator((rows, columns), sums)
            T.clear(total)
            steps = T.ceildiv(T.ceildiv(R, depth), splits)
            for i in T.Pipelined(steps, num_stages=stages):
                at = z * steps + i
                T.copy(a[bm * rows, at * depth], a_tile)
                for t in lane.parallel((depth if turned else columns) // high * units // run):
                    line = t // (units // run) * high
                    place = t % (units // run) * run
                    if turned:
                        first_row = at * depth
                        first_word = bp * units
                    else:
                        first_row = bp * columns
                        first_word = at * units
                    decode_tile(
                        words,
                        levels,
                        w_tile,
                        first_row + line,
                        first_word + place,
                        line,
                        place,
                        lane.constant(G, group),
                    )
                multiply(a_tile, w_tile, total)
            for i, j in lane.parallel(rows, columns):
                m = bm * rows + i
                p = bp * columns + j
                if m < M and p < P:
                    if mode == SUMS:
                        result[z, m, p] = total[i, j]
                    else:
                        y = settle(
                            total[i, j],
                            scale,
                            floor,
                            added,
                            biased,
                            m,
                            p,
                        )
                        result[z, m, p] = T.cast(y, out)

    return multiply_weight


def finish(lane: Lane, turned: bool, out: str, bias: Option) -> Any:
    """Turn partial sums ``[S, M, P]`` into ``float32(sum) * scale * 2**floor + bias``."""
    T = lane.T
    bits = Bits(lane)
    threads = lane.width
    Z = T.dynamic("Z")
    M = T.dynamic("M")
    P = T.dynamic("P")
    S = T.dynamic("S")
    B = T.dynamic("B")

    @T.prim_func
    def add_parts(
        parts: T.Tensor((Z, M, P), "int32"),
        scale: T.Tensor((S,), "float32"),
        floor: T.Tensor((P,), "int32"),
        added: T.Tensor((B,), "float32"),
        result: T.Tensor((M, P), out),
        biased: T.int32,
    ):
        with lane.grid(M, T.ceildiv(P, threads), threads=threads) as (m, block):
            for t in lane.parallel(threads):
                p = block * threads + t
                if p < P:
                    total = T.alloc_var("int32")
                    total = 0
                    for z in T.serial(Z):
                        total = total + parts[z, m, p]
                    y = T.alloc_var("float32")
                    y = T.cast(total, "float32") * scale[0 if turned else m]
                    y = y * bits.power_of_two(floor[p])
                    if given(bias, biased):
                        y = y + added[p]
                    result[m, p] = T.cast(y, out)

    return add_parts


def gemv(lane: Lane, out: str, bias: Option, chunk: int, *, N: int, K: int, G: int) -> Any:
    """Multiply ``A @ W.T`` for very few int8 rows.

    Every word is read once, and 4 columns are multiplied at a time.

    Args:
        lane: the target.
        out: dtype of the result.
        bias: whether a bias is added.
        chunk: words that a thread reads at a time.
        N: rows of the weight.
        K: columns of the weight.
        G: columns that share a level.
    """
    T = lane.T
    bits = Bits(lane)
    lanes = 32 if lane.cuda else 1
    groups = 4
    each = 4 if lane.fixed and N >= _MANY_OUTPUTS else 2
    rows = groups * each
    run = words_of_a_level(K, G, chunk) if lane.fixed else 1
    M = T.dynamic("M")
    N = lane.size("N", N)
    W = lane.size("W", -(-K // UNIT))
    B = T.dynamic("B")
    J = lane.size("J", -(-K // G))
    X = lane.size("X", 4 * -(-K // UNIT))

    def byte(word: Any, index: Any) -> Any:
        """A byte of a word as a signed number, int32."""
        place = T.cast(8 * index, "uint32")
        signed = T.cast(word >> place, "int8")
        return T.cast(signed, "int32")

    @T.macro
    def dot(left: Any, right: Any, total: Any) -> Any:
        """Return ``total`` plus the dot product of four int8, which are the bytes of two words."""
        answer = T.alloc_var("int32")
        answer = total
        if lane.cuda:
            answer = T.call_extern("int32", "__dp4a", left, T.reinterpret(right, "int32"), total)
        else:
            for b in T.serial(4):
                l = byte(T.reinterpret(left, "uint32"), b)
                r = byte(right, b)
                answer = answer + l * r
        return answer

    def low_plane(word: Any, p: Any) -> Any:
        """``4**p * (trit + 1)`` of four columns: where they lie in the word, without a shift."""
        mask = T.uint32(0x03030303) << T.cast(2 * p, "uint32")
        return T.reinterpret(word, "uint32") & mask

    def high_plane(word: Any) -> Any:
        """``-64 * trit`` of the last four columns: ``64 * (trit + 1)`` would not fit into int8."""
        return (T.reinterpret(word, "uint32") & T.uint32(0xC0C0C0C0)) ^ T.uint32(0x40404040)

    @T.prim_func
    def multiply_rows(
        a: T.Tensor((M, X), "int32"),
        scale: T.Tensor((M,), "float32"),
        words: T.Tensor((N, W), "int32"),
        levels: T.Tensor((N, J), "int8"),
        floor: T.Tensor((N,), "int32"),
        added: T.Tensor((B,), "float32"),
        result: T.Tensor((M, N), out),
        group: T.int32,
        biased: T.int32,
    ):
        with lane.grid(T.ceildiv(N, rows), M, threads=lanes * groups) as (block, m):
            for t in lane.parallel(lanes * groups):
                totals = T.alloc_local((each,), "int32")
                fours = T.alloc_local((4 * chunk,), "int32")
                sums = T.alloc_local((chunk // run,), "int32")
                held = T.alloc_local((chunk,), "int32")
                for e in T.unroll(each):
                    totals[e] = 0
                for i in T.serial(T.ceildiv(W // chunk, lanes)):
                    if i * lanes + t % lanes < W // chunk:
                        at = (i * lanes + t % lanes) * chunk
                        for c in lane.vectorized(4 * chunk):
                            fours[c] = a[m, at * 4 + c]
                        for r in T.unroll(chunk // run):
                            sums[r] = 0
                            for c in T.unroll(run):
                                word = r * run + c
                                for p in T.unroll(3):
                                    four = fours[4 * word + p]
                                    sums[r] = dot(four, T.uint32(0x01010101), sums[r])
                        for e in T.unroll(each):
                            n = block * rows + t // lanes * each + e
                            if n < N:
                                for c in lane.vectorized(chunk):
                                    held[c] = words[n, at + c]
                                for r in T.unroll(chunk // run):
                                    # 64 times the sum over trits, plane by plane.
                                    part = T.alloc_var("int32")
                                    part = -64 * sums[r]
                                    codes = T.alloc_var("int32")
                                    for p in T.unroll(3):
                                        codes = 0
                                        for c in T.unroll(run):
                                            word = r * run + c
                                            four = fours[4 * word + p]
                                            low = low_plane(held[word], p)
                                            codes = dot(four, low, codes)
                                        part = part + (codes << (6 - 2 * p))
                                    codes = 0
                                    for c in T.unroll(run):
                                        word = r * run + c
                                        four = fours[4 * word + 3]
                                        codes = dot(four, high_plane(held[word]), codes)
                                    part = part - codes
                                    column = (at + r * run) * UNIT
                                    j = column // lane.constant(G, group)
                                    level = T.cast(levels[n, j], "int32")
                                    totals[e] = totals[e] + (part >> (6 - level))
                for e in T.unroll(each):
                    if lane.cuda:
                        for s in T.unroll(5):
                            totals[e] = totals[e] + T.shfl_xor(totals[e], 16 >> s)
                    n = block * rows + t // lanes * each + e
                    if t % lanes == 0 and n < N:
                        y = T.alloc_var("float32")
                        y = T.cast(totals[e], "float32") * scale[m]
                        y = y * bits.power_of_two(floor[n])
                        if given(bias, biased):
                            y = y + added[n]
                        result[m, n] = T.cast(y, out)

    return multiply_rows


def lookup(lane: Lane, out: str, *, N: int, K: int, G: int) -> Any:
    """Decode rows ``W[ids]``: ``[M, K]``."""
    T = lane.T
    bits = Bits(lane)
    threads = lane.width
    M = T.dynamic("M")
    W = lane.size("W", -(-K // UNIT))
    J = lane.size("J", -(-K // G))
    N = lane.size("N", N)
    K = lane.size("K", K)

    @T.prim_func
    def look_up(
        ids: T.Tensor((M,), "int64"),
        words: T.Tensor((N, W), "int32"),
        exponent: T.Tensor((N, J), "int8"),
        rows: T.Tensor((M, K), out),
        group: T.int32,
    ):
        with lane.grid(M, T.ceildiv(W, threads), threads=threads) as (m, block):
            for t in lane.parallel(threads):
                word = T.alloc_var("uint32")
                u = block * threads + t
                if u < W:
                    word = T.reinterpret(words[ids[m], u], "uint32")
                    scale = bits.power_of_two(
                        T.cast(
                            exponent[ids[m], u * UNIT // lane.constant(G, group)],
                            "int32",
                        )
                    )
                    for v in T.serial(UNIT):
                        if u * UNIT + v < K:
                            rows[m, u * UNIT + v] = T.cast(
                                T.cast(bits.trit(word, v), "float32") * scale,
                                out,
                            )

    return look_up
