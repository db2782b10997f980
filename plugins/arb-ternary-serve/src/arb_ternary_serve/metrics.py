"""Counts of the server in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from arb_ternary_serve.worker import ModelWorker

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
_GAUGES = {
    "waiting": "Sequences that wait for a seat or for memory",
    "running": "Sequences that are being continued",
    "blocks": "Blocks of keys and values",
    "free_blocks": "Blocks of keys and values that no sequence uses",
}
_COUNTERS = {
    "read": "Tokens of prompts that were read",
    "reused": "Tokens of prompts whose keys and values were found",
    "drawn": "Tokens that were drawn",
}


class Metrics:
    """The counts of the server.

    Attributes:
        requests: requests by endpoint and status.
        first_token: seconds from a request to its first token, by model.
    """

    def __init__(self, workers: Sequence[ModelWorker]) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "arb_requests", "Requests", ["endpoint", "status"], registry=self._registry
        )
        self.first_token = Histogram(
            "arb_time_to_first_token_seconds",
            "Seconds from a request to its first token",
            ["model"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._registry.register(_Loads(workers))

    def text(self) -> bytes:
        """Return all of it as text."""
        return generate_latest(self._registry)


class _Loads(Collector):
    """The loads of the engines of all models."""

    def __init__(self, workers: Iterable[ModelWorker]) -> None:
        self._workers = workers

    def collect(self) -> Iterator[Metric]:
        for name, text in _GAUGES.items():
            gauge = GaugeMetricFamily(f"arb_{name}", text, labels=["model"])
            for worker in self._workers:
                gauge.add_metric([worker.name], getattr(worker.load, name))
            yield gauge
        for name, text in _COUNTERS.items():
            counter = CounterMetricFamily(f"arb_tokens_{name}", text, labels=["model"])
            for worker in self._workers:
                counter.add_metric([worker.name], getattr(worker.load, name))
            yield counter
