"""The options of the study ``network``: model, machines, how votes are cast, ways to train."""

from __future__ import annotations

from typing import Final, Literal, get_args

from attrs import frozen

from arb_ternary.config.options import fraction, non_negative, option, optional, positive

SchemeName = Literal[
    "votes", "votes_node_sums", "trit_gathers", "ddp", "fsdp2", "hsdp", "powersgd", "one_bit_adam"
]
#: Every scheme, in the order of the table.
SCHEMES: Final[tuple[SchemeName, ...]] = get_args(SchemeName)


@frozen(kw_only=True)
class MatrixSizes:
    """Weight matrices of one size."""

    rows: int = option(help="outputs of the matrix", validator=positive)
    columns: int = option(help="inputs of the matrix", validator=positive)
    count: int = option(1, "matrices of this size", validator=positive)


@frozen(kw_only=True)
class DecoderSizes:
    """A decoder with SwiGLU, its embedding and head included, all of it ternary."""

    width: int = option(help="features of a token", validator=positive)
    layers: int = option(help="blocks", validator=positive)
    heads: int = option(help="heads of attention", validator=positive)
    kv_heads: int = option(help="heads of keys and values", validator=positive)
    feed_forward: int = option(help="hidden features of the feed-forward part", validator=positive)
    vocabulary: int = option(help="token ids", validator=positive)


@frozen(kw_only=True)
class ModelSizes:
    """A model by its sizes, in one of two ways."""

    decoder: DecoderSizes | None = option(None, "sizes of a decoder")
    matrices: tuple[MatrixSizes, ...] = option((), "ternary matrices, one by one")
    float_parameters: int = option(
        0, "parameters that stay float, in addition to the matrices", validator=non_negative
    )

    def __attrs_post_init__(self) -> None:
        if (self.decoder is None) == (not self.matrices):
            found = "both are given" if self.matrices else "none is given"
            raise ValueError(f"a model is either decoder or matrices; {found}")


@frozen(kw_only=True)
class ClusterConfig:
    """Machines of several GPUs each; bandwidths are those of one direction."""

    name: str = option(help="name in the table")
    nodes: int = option(1, "machines", validator=positive)
    gpus: int = option(8, "GPUs of a machine", validator=positive)
    inside: float = option(
        450.0, "GB/s that a GPU sends to others of its machine", validator=positive
    )
    between: float = option(
        400.0, "GB/s that a machine sends to others; its GPUs share them evenly", validator=positive
    )
    latency: float = option(
        0.0, "microseconds per message, in addition to its bytes", validator=non_negative
    )
    micro_batches: int | None = option(
        None,
        "micro-batches per step on all GPUs together; null = one on each",
        validator=optional(positive),
    )

    @property
    def ranks(self) -> int:
        """GPUs of all machines."""
        return self.nodes * self.gpus

    @property
    def batches(self) -> int:
        """Micro-batches per step on all GPUs together."""
        return self.ranks if self.micro_batches is None else self.micro_batches

    @property
    def rounds(self) -> int:
        """Micro-batches per step on the GPU that has most."""
        return -(-self.batches // self.ranks)

    def __attrs_post_init__(self) -> None:
        if self.batches < self.ranks:
            raise ValueError(
                f"micro_batches: {self.batches} are fewer than the {self.ranks} GPUs, and some "
                f"would have none"
            )


@frozen(kw_only=True)
class VotesConfig:
    """How votes are cast, as options of ``scaled_votes``, and how often weights flip."""

    levels: Literal[3] | None = option(3, "3 = a vote is -1, 0 or 1; null = votes in quanta")
    rate: float = option(
        0.1, "rate of the votes; only votes in quanta depend on it", validator=positive
    )
    clip: float = option(2.5, "largest normalised gradient", validator=positive)
    cell: int = option(64, "quanta per trit", validator=positive)
    vote_bits: Literal[8, 4, 2] = option(8, "bits of an accumulator")
    group_size: Literal[32, 64, 128, 256, "row"] = option("row", "weights that share an exponent")
    scale_rule: Literal["residual", "frozen"] = option(
        "frozen", "whether exponents learn, by votes of their own"
    )
    flip_share: float = option(
        0.0028, "share of the weights that flip per step", validator=fraction
    )
    sums_in: Literal["bytes", "words"] = option(
        "bytes",
        "sums of a machine's votes: digits in bytes as on the wire, or packed into 64-bit words",
    )

    def largest(self, micro_batches: int) -> int:
        """Return the largest vote of one micro-batch of a step with ``micro_batches`` of them.

        Votes in quanta are rounded up from the clip; a whole number can be rounded to the next.
        """
        if self.levels == 3:
            return 1
        # In 1/256, as kernels take it.
        limit = round(256 * self.clip * self.cell * self.rate / micro_batches)
        return min(max(1, limit), 256 * 127) // 256 + 1


@frozen(kw_only=True)
class NetworkConfig:
    """Options of the study."""

    model: ModelSizes = option(help="the model")
    clusters: tuple[ClusterConfig, ...] = option(
        help="the machines; each gives a part of the table"
    )
    votes: VotesConfig = option(help="how votes are cast", factory=VotesConfig)
    schemes: tuple[SchemeName, ...] = option(SCHEMES, "ways to train, in the order of the table")
    powersgd_rank: int = option(4, "rank of PowerSGD's factors", validator=positive)
    one_bit_warmup: float = option(
        0.15,
        "share of the steps that 1-bit Adam takes uncompressed; its authors' BERT-Large: 0.15",
        validator=fraction,
    )

    def __attrs_post_init__(self) -> None:
        for name in ("clusters", "schemes"):
            if not getattr(self, name):
                raise ValueError(f"{name}: the table would be empty")
        names = [cluster.name for cluster in self.clusters]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"clusters: two are called {name!r}")
