"""A process with llama.cpp's server, from the package ``xllamacpp`` (PyPI)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from arb_ternary_bench.child import answer


def serve(request: dict[str, Any], orders: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Serve a GGUF file until the orders end; answer with the address, once it is ready.

    Args:
        request: ``file``, ``sequences`` that are drawn together, ``context`` of each, ``threads``.
        orders: none is expected.
    """
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = request["file"]
    parameters.n_parallel = request["sequences"]
    parameters.n_ctx = request["sequences"] * request["context"]
    parameters.cpuparams.n_threads = request["threads"]
    parameters.cpuparams_batch.n_threads = request["threads"]
    parameters.n_gpu_layers = 0
    parameters.fit_params = False
    parameters.verbosity = 0
    parameters.hostnames = ["127.0.0.1"]
    parameters.port = request["port"]
    server = xllamacpp.Server(parameters)
    yield {"origin": server.listening_address}
    for _ in orders:
        pass


if __name__ == "__main__":
    answer(serve)
