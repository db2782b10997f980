"""Bytes and seconds of collectives on machines of several GPUs.

Rings go through all GPUs of a machine before they leave it, and there are as many rings as GPUs in
a machine, each of which leaves through another GPU: a bandwidth between machines that its GPUs
share is then used by all. In an exchange of all with all every GPU sends each other one its part at
once. What goes inside a machine and what leaves it are on the way at the same time.
"""

from __future__ import annotations

from attrs import frozen

from arb_ternary_bench.network.config import ClusterConfig


@frozen
class Sent:
    """What one GPU sends.

    Attributes:
        inside: bytes to GPUs of its machine.
        between: bytes to other machines.
        messages: that wait for one another.
    """

    inside: float
    between: float
    messages: int

    def times(self, count: float) -> Sent:
        """The same ``count`` times after one another; a fraction is a mean over steps."""
        return Sent(self.inside * count, self.between * count, round(self.messages * count))

    def seconds_inside(self, cluster: ClusterConfig) -> float:
        """Of the bytes within the machine."""
        return self.inside / (cluster.inside * 1e9)

    def seconds_between(self, cluster: ClusterConfig) -> float:
        """Of the bytes that leave the machine."""
        return self.between / (cluster.between * 1e9 / cluster.gpus)

    def seconds(self, cluster: ClusterConfig) -> float:
        """Until all is sent: the slower of the two, and the latency of messages that wait for one
        another.
        """
        slower = max(self.seconds_inside(cluster), self.seconds_between(cluster))
        return slower + self.messages * cluster.latency * 1e-6


def all_gather(size: float, cluster: ClusterConfig) -> Sent:
    """Every GPU has one of ``ranks`` parts of ``size`` bytes, and gets all; also a reduce-scatter,
    the other way round.

    In a ring a GPU passes on all parts but one. Of the hops out of the GPUs of a machine in one
    ring, one leaves it.
    """
    ranks = cluster.ranks
    passed = size * (ranks - 1) / ranks
    leaving = passed / cluster.gpus if cluster.nodes > 1 else 0.0
    return Sent(passed - leaving, leaving, ranks - 1)


def all_reduce(size: float, cluster: ClusterConfig) -> Sent:
    """``size`` bytes of every GPU summed for all: a reduce-scatter and an all-gather."""
    return all_gather(size, cluster).times(2)


def all_to_all(size: float, cluster: ClusterConfig) -> Sent:
    """Every GPU has ``size`` bytes, an equal part for each, one of which stays."""
    part = size / cluster.ranks
    return Sent(
        part * (cluster.gpus - 1),
        part * (cluster.ranks - cluster.gpus),
        1 if cluster.ranks > 1 else 0,
    )


def inside_node(size: float, cluster: ClusterConfig) -> Sent:
    """An all-gather, a reduce-scatter or an exchange of ``size`` bytes among the GPUs of each
    machine alone.
    """
    return Sent(size * (cluster.gpus - 1) / cluster.gpus, 0.0, cluster.gpus - 1)


def across_nodes(size: float, cluster: ClusterConfig) -> Sent:
    """The same among GPUs of different machines, one of each; all GPUs of a machine do so at
    once.
    """
    return Sent(0.0, size * (cluster.nodes - 1) / cluster.nodes, cluster.nodes - 1)
