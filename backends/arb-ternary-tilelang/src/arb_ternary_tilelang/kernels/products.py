"""Products with a packed weight.

TileLang reads the annotations of kernels as values, so this module does not postpone them.
"""

from typing import Any

from arb_ternary_tilelang.kernels.bits import UNIT, Bits
from arb_ternary_tilelang.lane import Lane, Option, Tiles, given

#: A mode of :func:`product`: exact int32 sums, to be combined by the caller.
SUMS = "sums"


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
    bits = Bits(lane.T)
    integer = mode in ("int8", SUMS)
    if integer:
        held = "int8"
        sums = "int32"
    else:
        held = mode
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
    depth = tiles.depth
    units = (columns if turned else depth) // UNIT
    simple = lane.cuda and mode == "float32"
    stages = tiles.stages if lane.cuda else 0

    def left_shift(level: Any) -> Any:
        """The shift of a level; a negative level shifts by 0."""
        return T.cast(T.max(level, 0), "uint32")

    @T.macro
    def decode(
        words: Any,
        levels: Any,
        tile: Any,
        n: Any,
        u: Any,
        line: Any,
        place: Any,
        group: Any,
    ) -> None:
        word = T.alloc_var("uint32")
        level = T.alloc_var("int32")
        values = T.alloc_local((UNIT,), held)
        word = T.uint32(0x55555555)
        level = 0
        if n < N and u < W:
            word = T.reinterpret(words[n, u], "uint32")
            level = T.cast(levels[n, u * UNIT // group], "int32")
        if integer and lane.cuda:
            # Four weights at a time: code - 1 in every byte without borrows between them, then the
            # shift.
            kept = T.alloc_var("uint32")
            kept = T.if_then_else(
                level < 0,
                T.uint32(0),
                T.uint32(0x01010101) * (T.uint32(0xFF) >> left_shift(level)),
            )
            for p in T.unroll(4):
                four = T.alloc_var("uint32")
                four = bits.four_codes(word, p)
                four = ((four | T.uint32(0x80808080)) - T.uint32(0x01010101)) ^ T.uint32(0x80808080)
                four = (four & kept) << left_shift(level)
                for b in T.unroll(4):
                    values[4 * p + b] = T.cast(four >> T.cast(8 * b, "uint32"), "int8")
        else:
            for v in T.unroll(UNIT):
                trit = bits.trit(word, v)
                if integer:
                    values[v] = T.cast(
                        T.if_then_else(level < 0, 0, trit << T.max(level, 0)),
                        held,
                    )
                else:
                    values[v] = T.cast(
                        T.cast(trit, "float32") * bits.power_of_two(level),
                        held,
                    )
        if turned:
            for v in T.unroll(UNIT):
                tile[place * UNIT + v, line] = values[v]
        else:
            for v in lane.vectorized(UNIT):
                tile[line, place * UNIT + v] = values[v]

    @T.macro
    def multiply(a_tile: Any, w_tile: Any, total: Any) -> None:
        if simple:
            for i, j in lane.parallel(rows, columns):
                for r in T.serial(depth):
                    total[i, j] = total[i, j] + a_tile[i, r] * w_tile[j, r]
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
        a: T.Tensor((M, R), held),
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
            a_tile = lane.shared((rows, depth), held)
            w_tile = lane.shared((columns, depth), held)
            total = lane.accumulator((rows, columns), sums)
            T.clear(total)
            steps = T.ceildiv(T.ceildiv(R, depth), splits)
            for i in T.Pipelined(steps, num_stages=stages):
                at = z * steps + i
                T.copy(a[bm * rows, at * depth], a_tile)
                if turned:
                    for t in lane.parallel(depth * units):
                        n = at * depth + t // units
                        u = bp * units + t % units
                        decode(
                            words,
                            levels,
                            w_tile,
                            n,
                            u,
                            t // units,
                            t % units,
                            lane.constant(G, group),
                        )
                else:
                    for t in lane.parallel(columns * units):
                        n = bp * columns + t // units
                        u = at * units + t % units
                        decode(
                            words,
                            levels,
                            w_tile,
                            n,
                            u,
                            t // units,
                            t % units,
                            lane.constant(G, group),
                        )
                multiply(a_tile, w_tile, total)
            for i, j in lane.parallel(rows, columns):
                if bm * rows + i < M and bp * columns + j < P:
                    if mode == SUMS:
                        result[z, bm * rows + i, bp * columns + j] = total[i, j]
                    else:
                        y = settle(
                            total[i, j],
                            scale,
                            floor,
                            added,
                            biased,
                            bm * rows + i,
                            bp * columns + j,
                        )
                        result[z, bm * rows + i, bp * columns + j] = T.cast(y, out)

    return multiply_weight


def finish(lane: Lane, turned: bool, out: str, bias: Option) -> Any:
    """Turn partial sums ``[S, M, P]`` into ``float32(sum) * scale * 2**floor + bias``."""
    T = lane.T
    bits = Bits(lane.T)
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
                if block * threads + t < P:
                    total = T.alloc_var("int32")
                    total = 0
                    for z in T.serial(Z):
                        total = total + parts[z, m, block * threads + t]
                    y = T.alloc_var("float32")
                    y = T.cast(total, "float32") * scale[0 if turned else m]
                    y = y * bits.power_of_two(floor[block * threads + t])
                    if given(bias, biased):
                        y = y + added[block * threads + t]
                    result[m, block * threads + t] = T.cast(y, out)

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
    bits = Bits(lane.T)
    lanes = 32 if lane.cuda else 1
    groups = 4
    each = 2
    rows = groups * each
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
            answer = T.call_extern(
                "int32",
                "__dp4a",
                T.reinterpret(left, "int32"),
                T.reinterpret(right, "int32"),
                total,
            )
        else:
            for b in T.serial(4):
                l = byte(left, b)
                r = byte(right, b)
                answer = answer + l * r
        return answer

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
            parts = lane.shared((rows, lanes), "int32")
            for t in lane.parallel(lanes * groups):
                totals = T.alloc_local((each,), "int32")
                fours = T.alloc_local((4 * chunk,), "int32")
                held = T.alloc_local((chunk,), "int32")
                for e in T.unroll(each):
                    totals[e] = 0
                for i in T.serial(T.ceildiv(W // chunk, lanes)):
                    if i * lanes + t % lanes < W // chunk:
                        at = (i * lanes + t % lanes) * chunk
                        for c in lane.vectorized(4 * chunk):
                            fours[c] = a[m, at * 4 + c]
                        for e in T.unroll(each):
                            n = block * rows + t // lanes * each + e
                            if n < N:
                                for c in lane.vectorized(chunk):
                                    held[c] = words[n, at + c]
                                for c in T.unroll(chunk):
                                    part = T.alloc_var("int32")
                                    part = 0
                                    for p in T.unroll(4):
                                        four = T.reinterpret(fours[4 * c + p], "uint32")
                                        codes = bits.four_codes(
                                            T.reinterpret(held[c], "uint32"),
                                            p,
                                        )
                                        part = dot(four, codes, part)
                                        part = dot(four, T.uint32(0xFFFFFFFF), part)
                                    level = T.cast(
                                        levels[n, (at + c) * UNIT // lane.constant(G, group)],
                                        "int32",
                                    )
                                    totals[e] = totals[e] + (part << level)
                for e in T.unroll(each):
                    parts[t // lanes * each + e, t % lanes] = totals[e]
            for t in lane.parallel(rows):
                if block * rows + t < N:
                    total = T.alloc_var("int32")
                    total = 0
                    for i in T.serial(lanes):
                        total = total + parts[t, i]
                    y = T.alloc_var("float32")
                    y = T.cast(total, "float32") * scale[m]
                    y = y * bits.power_of_two(floor[block * rows + t])
                    if given(bias, biased):
                        y = y + added[block * rows + t]
                    result[m, block * rows + t] = T.cast(y, out)

    return multiply_rows


def lookup(lane: Lane, out: str, *, N: int, K: int, G: int) -> Any:
    """Decode rows ``W[ids]``: ``[M, K]``."""
    T = lane.T
    bits = Bits(lane.T)
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
