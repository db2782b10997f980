"""Bytes and seconds of collectives on machines with several GPUs.

Rings pass through all GPUs of a machine before they leave it, and there is one ring per GPU of a
machine, each of which leaves through another GPU, so that all of them use the bandwidth that they
share. In an all-to-all every GPU sends each other one its part at once. Transfers inside a machine
and between machines overlap.
"""

from __future__ import annotations

from attrs import frozen

from arb_ternary_bench.network.config import ClusterConfig


@frozen
class Sent:
    """The bytes and messages that one GPU sends.

    Attributes:
        inside: bytes to GPUs of its machine.
        between: bytes to other machines.
        messages: number of messages that wait for one another.
    """

    inside: float
    between: float
    messages: int

    def times(self, count: float) -> Sent:
        """Return the same ``count`` times in a row; a fraction is a mean over steps."""
        return Sent(self.inside * count, self.between * count, round(self.messages * count))

    def seconds_inside(self, cluster: ClusterConfig) -> float:
        """Return the seconds of the bytes inside the machine."""
        return self.inside / (cluster.inside * 1e9)

    def seconds_between(self, cluster: ClusterConfig) -> float:
        """Return the seconds of the bytes that leave the machine."""
        return self.between / (cluster.between * 1e9 / cluster.gpus)

    def seconds(self, cluster: ClusterConfig) -> float:
        """Return the seconds until all is sent: the slower of both, and the latency of messages."""
        slower = max(self.seconds_inside(cluster), self.seconds_between(cluster))
        return slower + self.messages * cluster.latency * 1e-6


def all_gather(size: float, cluster: ClusterConfig) -> Sent:
    """Give every GPU all of ``size`` bytes, if each has a part of them; also a reduce-scatter.

    In a ring a GPU passes on all parts but one. One of the hops of a machine in a ring leaves it.
    """
    ranks = cluster.ranks
    passed = size * (ranks - 1) / ranks
    leaving = passed / cluster.gpus if cluster.nodes > 1 else 0.0
    return Sent(passed - leaving, leaving, ranks - 1)


def all_reduce(size: float, cluster: ClusterConfig) -> Sent:
    """Sum ``size`` bytes of every GPU for all: a reduce-scatter and an all-gather."""
    return all_gather(size, cluster).times(2)


def all_to_all(size: float, cluster: ClusterConfig) -> Sent:
    """Send every GPU its part of the ``size`` bytes that each GPU has; one part stays."""
    part = size / cluster.ranks
    messages = 1 if cluster.ranks > 1 else 0
    return Sent(part * (cluster.gpus - 1), part * (cluster.ranks - cluster.gpus), messages)


def inside_node(size: float, cluster: ClusterConfig) -> Sent:
    """Gather, reduce-scatter or exchange ``size`` bytes among the GPUs of each machine alone."""
    return Sent(size * (cluster.gpus - 1) / cluster.gpus, 0.0, cluster.gpus - 1)


def across_nodes(size: float, cluster: ClusterConfig) -> Sent:
    """Do the same among one GPU of each machine; all GPUs of a machine do so at once."""
    return Sent(0.0, size * (cluster.nodes - 1) / cluster.nodes, cluster.nodes - 1)
