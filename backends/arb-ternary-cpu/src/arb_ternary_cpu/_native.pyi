from typing import overload

sources: str

def usable_isas() -> list[str]: ...
def isa_index(name: str) -> int: ...

# --- limits of the machine

def read_words(isa: int, threads: int, address: int, words: int, /) -> int: ...
def int8_peak(isa: int, threads: int, seconds: float, /) -> float: ...

# --- votes

class Weight:
    """A weight, its accumulators and where statistics go; addresses, 0 for none."""

    def __init__(
        self,
        rows: int,
        columns: int,
        group_size: int,
        bits: int,
        packed: int,
        votes: int,
        exponent_votes: int,
        stats: int,
        scale: int,
        /,
    ) -> None: ...

class Scaled:
    """The rule of scaled votes."""

    def __init__(
        self,
        magnitudes: int,
        vote_scale: int,
        shifts: bool,
        limit: int,
        exponent_shift: int,
        noise_shift: int,
        seed: int,
        step: int,
        stream: int,
        /,
    ) -> None: ...

def cast_linear(
    isa: int,
    threads: int,
    weight: Weight,
    scaled: Scaled | None,
    grad_type: int,
    grad: int,
    x_type: int,
    x: int,
    tokens: int,
) -> None: ...
def cast_lookup(
    isa: int,
    threads: int,
    weight: Weight,
    scaled: Scaled | None,
    correlation: int,
    steps: int,
    ids: int,
    grad_type: int,
    grad: int,
    tokens: int,
) -> bool: ...
def cast_vectors(isa: int, vectors: list[tuple[Weight, Scaled | None, int, int]]) -> None: ...
def sum_vectors(vectors: list[tuple[int, int, int, int, int]]) -> None: ...
def flip_trits(
    isa: int,
    threads: int,
    rows: int,
    columns: int,
    bits: int,
    packed: int,
    votes: int,
    threshold: int,
    leak: int,
    decay: int,
    carry: bool,
    seed: int,
    step: int,
    stream: int,
    first_row: int,
    /,
) -> int: ...
def flip_exponents(
    isa: int,
    threads: int,
    exponent: int,
    votes: int,
    origin: int,
    row_stride: int,
    group_stride: int,
    rows: int,
    groups: int,
    threshold: int,
    band: int,
    leak: int,
    /,
) -> int: ...
def pack_votes(
    votes: int, rows: int, columns: int, bits: int, out: int, threads: int, /
) -> None: ...
def unpack_votes(
    stored: int, rows: int, columns: int, bits: int, out: int, threads: int, /
) -> None: ...

# --- products
# Arguments in order: instruction set, threads, addresses with the sizes of what they point to.
# Those of a weight are packed, exponent, rows, columns, groups, group_size. An address of 0 stands
# for None.

largest_spread: int

def pack(threads: int, trits: int, rows: int, columns: int, packed: int, /) -> bool: ...
def unpack(threads: int, packed: int, rows: int, columns: int, trits: int, /) -> None: ...
def quantize_rows(
    isa: int, threads: int, x: int, dtype: int, rows: int, columns: int, q: int, scale: int, /
) -> None: ...
def norm_quantize_rows(
    isa: int,
    threads: int,
    x: int,
    dtype: int,
    rows: int,
    columns: int,
    eps: float,
    q: int,
    scale: int,
    /,
) -> None: ...
def quantize_gradient(
    isa: int,
    threads: int,
    grad: int,
    dtype: int,
    count: int,
    seed: int,
    step: int,
    stream: int,
    q: int,
    scale: int,
    /,
) -> None: ...
def quantize_patches(
    isa: int,
    threads: int,
    x: int,
    dtype: int,
    image: tuple[int, ...],
    window: tuple[int, ...],
    q: int,
    scale: int,
    /,
) -> None: ...
def convolve_int8(
    isa: int,
    threads: int,
    x: int,
    dtype: int,
    image: tuple[int, ...],
    window: tuple[int, ...],
    packed: int,
    exponent: int,
    rows: int,
    columns: int,
    groups: int,
    group_size: int,
    bias: int,
    out: int,
    out_dtype: int,
    /,
) -> bool: ...
def fold_patches(
    threads: int, patches: int, image: tuple[int, ...], window: tuple[int, ...], out: int, /
) -> None: ...
def linear_int8(
    isa: int,
    threads: int,
    x: int,
    scale: int,
    m: int,
    packed: int,
    exponent: int,
    rows: int,
    columns: int,
    groups: int,
    group_size: int,
    bias: int,
    out: int,
    dtype: int,
    /,
) -> int: ...
def linear_float(
    isa: int,
    threads: int,
    x: int,
    x_dtype: int,
    m: int,
    packed: int,
    exponent: int,
    rows: int,
    columns: int,
    groups: int,
    group_size: int,
    bias: int,
    out: int,
    dtype: int,
    /,
) -> None: ...
def grad_input_int8(
    isa: int,
    threads: int,
    grad: int,
    scale: int,
    m: int,
    packed: int,
    exponent: int,
    rows: int,
    columns: int,
    groups: int,
    group_size: int,
    out: int,
    dtype: int,
    /,
) -> int: ...
def grad_input_float(
    isa: int,
    threads: int,
    grad: int,
    grad_dtype: int,
    m: int,
    packed: int,
    exponent: int,
    rows: int,
    columns: int,
    groups: int,
    group_size: int,
    out: int,
    dtype: int,
    /,
) -> None: ...
def lookup_rows(
    isa: int,
    threads: int,
    ids: int,
    count: int,
    packed: int,
    exponent: int,
    rows: int,
    columns: int,
    groups: int,
    group_size: int,
    out: int,
    dtype: int,
    /,
) -> int: ...

# --- between the products of a block
# Rows in pieces: heads, features of a head, length, strides of batch, head and position in
# elements. Gains are 0 for none; for a backward they are followed by what their gradients are added
# to.

def normalise_quantize(
    isa: int,
    threads: int,
    x: int,
    sizes: tuple[int, ...],
    dtype: int,
    rows: int,
    eps: float,
    gain: int,
    q: int,
    scale: int,
    r: int,
    /,
) -> None: ...
def normalise_back(
    isa: int,
    threads: int,
    first: int,
    second: int,
    third: int,
    x: int,
    sizes: tuple[int, ...],
    r: int,
    gain: tuple[int, int],
    dtype: int,
    rows: int,
    out: int,
    out_sizes: tuple[int, ...],
    /,
) -> None: ...
def activate_quantize(
    isa: int,
    threads: int,
    kind: int,
    gate: int,
    up: int,
    dtype: int,
    rows: int,
    columns: int,
    eps: float,
    gain: int,
    q: int,
    scale: int,
    r: int,
    /,
) -> None: ...
def activate_back(
    isa: int,
    threads: int,
    kind: int,
    grad: int,
    gate: int,
    up: int,
    r: int,
    gain: tuple[int, int],
    dtype: int,
    rows: int,
    columns: int,
    grad_gate: int,
    grad_up: int,
    /,
) -> None: ...
def scale_columns_back(
    isa: int,
    threads: int,
    grad: int,
    x: int,
    factor: tuple[int, int],
    dtype: int,
    rows: int,
    columns: int,
    out: int,
    /,
) -> None: ...
def turn_heads(
    isa: int,
    threads: int,
    x: int,
    dtype: int,
    rows: int,
    y: int,
    sizes: tuple[int, ...],
    cos: int,
    sin: int,
    eps: float,
    gain: int,
    r: int,
    /,
) -> None: ...
def turn_heads_back(
    isa: int,
    threads: int,
    grad: int,
    sizes: tuple[int, ...],
    x: int,
    dtype: int,
    rows: int,
    cos: int,
    sin: int,
    r: int,
    gain: tuple[int, int],
    out: int,
    /,
) -> None: ...
def quantize_both(
    isa: int,
    threads: int,
    grad: int,
    dtype: int,
    rows: int,
    columns: int,
    row_scale: int,
    seed: int,
    step: int,
    stream: int,
    folded_stream: int,
    q: int,
    folded: int,
    scales: int,
    /,
) -> None: ...

# --- attention
# `inputs`: queries, keys, values, cosines, sines, gains of queries and of keys (the last four 0 for
# none); `sizes`: batch, length, heads, key heads, features; `grads`: of queries, keys, values, and
# of both gains. An eps below 0: heads are not normalised.

def attend(
    isa: int,
    threads: int,
    inputs: tuple[int, int, int, int, int, int, int],
    dtype: int,
    sizes: tuple[int, int, int, int, int],
    query_eps: float,
    key_eps: float,
    seen: int,
    logs: int,
    /,
) -> None: ...
def attend_back(
    isa: int,
    threads: int,
    inputs: tuple[int, int, int, int, int, int, int],
    dtype: int,
    sizes: tuple[int, int, int, int, int],
    query_eps: float,
    key_eps: float,
    seen: int,
    logs: int,
    grad: int,
    grads: tuple[int, int, int, int, int],
    /,
) -> None: ...

# --- what travels between ranks
# Bases by their index in wire.h; a weight as strips of 16 rows.

def pack_digits(
    isa: int, threads: int, base: int, values: int, count: int, out: int, /
) -> bool: ...
def add_digits(
    isa: int, threads: int, base: int, packed: int, count: int, total: int, wide: bool, /
) -> None: ...
def sums_to_quanta(
    isa: int,
    threads: int,
    sums: int,
    wide: bool,
    count: int,
    whole: int,
    fraction: int,
    seed: int,
    step: int,
    stream: int,
    start: int,
    out: int,
    /,
) -> None: ...
def settle_votes(
    isa: int,
    threads: int,
    whole: int,
    wide: bool,
    rows: int,
    columns: int,
    bits: int,
    low: int,
    high: int,
    votes: int,
    /,
) -> None: ...
def count_flips(
    threads: int, before: int, after: int, strips: int, columns: int, counts: int, /
) -> None: ...
def list_flips(
    threads: int,
    before: int,
    after: int,
    strips: int,
    columns: int,
    first: int,
    places: int,
    directions: int,
    /,
) -> None: ...
def apply_flips(
    packed: int, rows: int, columns: int, places: int, directions: int, count: int, /
) -> int: ...

# --- a step of decoding

most_sequences: int

class Norm:
    """An RMSNorm, or none at all; its gain as floats (address 0: 1) or as a ternary row."""

    @overload
    def __init__(self) -> None: ...
    @overload
    def __init__(self, eps: float, gain: int, dtype: int, /) -> None: ...
    @overload
    def __init__(
        self, eps: float, packed: int, exponent: int, columns: int, groups: int, group_size: int, /
    ) -> None: ...

class Projection:
    """A ternary weight and the address of its factor, or of one for each row, 0 for 1; or none at
    all.
    """

    @overload
    def __init__(self) -> None: ...
    @overload
    def __init__(
        self,
        packed: int,
        exponent: int,
        rows: int,
        columns: int,
        groups: int,
        group_size: int,
        factor: int,
        by_rows: bool,
        /,
    ) -> None: ...

class DecodeLayer:
    """One block."""

    attention_norm: Norm
    query_norm: Norm
    key_norm: Norm
    output_norm: Norm
    feed_norm: Norm
    hidden_norm: Norm
    query: Projection
    key: Projection
    value: Projection
    output: Projection
    gate: Projection
    up: Projection
    down: Projection
    residual_scale: float

    def __init__(self) -> None: ...

class DecodePlan:
    """A decoder; the tensors whose addresses it holds belong to who made it."""

    final_norm: Norm
    head: Projection
    logit_scale: float

    def __init__(
        self,
        width: int,
        heads: int,
        key_heads: int,
        features: int,
        hidden: int,
        vocabulary: int,
        activation: int,
        speeds: list[float],
        /,
    ) -> None: ...
    def set_embedding(self, rows: int, dtype: int, /) -> None: ...
    def set_ternary_embedding(self, table: Projection, /) -> None: ...
    def add_layer(self, layer: DecodeLayer, /) -> None: ...
    def step(
        self,
        isa: int,
        threads: int,
        batch: int,
        ids: int,
        position: float,
        cache: int,
        kept: int,
        capacity: int,
        slot: int,
        past: int,
        out: int,
        dtype: int,
        /,
    ) -> bool: ...
    def rows(
        self,
        isa: int,
        threads: int,
        tokens: tuple[int, int, int, int, int, int, int, int],
        cache: tuple[int, int, int, int, int, int],
        kept: int,
        out: int,
        dtype: int,
        /,
    ) -> bool: ...
