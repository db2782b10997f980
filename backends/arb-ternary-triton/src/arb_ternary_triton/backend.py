"""The backend: its name, capabilities and kernels."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from attrs import field, frozen

from arb_ternary.backends.protocol import (
    FUSED_VOTES,
    NARROW_NOISE,
    NARROW_VOTES,
    ROW_SHARDS,
    KernelBackend,
    WeightShape,
)
from arb_ternary.environment import for_child
from arb_ternary.errors import EnvironmentProblem
from arb_ternary_triton import casting, flips, layout, products, rows, wire
from arb_ternary_triton.gpu import gpu_of
from arb_ternary_triton.launch import INTERPRETED
from arb_ternary_triton.tables import bucket_of, user_table

#: Kernels whose tile sizes are measured, by op.
_MEASURED: Final = {"linear": "linear", "linear_grad_input": "grad_input", "cast_votes": "votes"}


@frozen
class TritonBackend:
    """The Triton backend, compiled or interpreted as Triton was imported."""

    name: str = "triton"
    capabilities: frozenset[str] = frozenset({FUSED_VOTES, NARROW_NOISE, NARROW_VOTES, ROW_SHARDS})
    kernels: Mapping[str, Callable[..., object]] = field(factory=dict, repr=False)

    def compiled(self, op: str, rows: int, shape: WeightShape, integer: bool) -> dict[str, Any]:
        """Compile the kernel of an op for an H100 and return what it uses.

        ``arb backends roofline`` calls this. It compiles in a child process, since kernels that
        were made for the interpreter cannot be compiled.

        Raises:
            EnvironmentProblem: the kernel cannot be compiled.
        """
        sizes = (rows, shape.out_features, shape.in_features, shape.group_size)
        command = [sys.executable, "-m", "arb_ternary_triton.compiling", "--json"]
        command += ["--target", "sm_90a", "--call", op, *map(str, sizes)]
        command.append("int8" if integer else "bfloat16")
        done = subprocess.run(
            command,
            env=for_child(TRITON_INTERPRET="0"),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["no message"]
            raise EnvironmentProblem(
                f"the kernel of {op!r} cannot be compiled for sm_90a: {lines[-1]}"
            )
        (found,) = json.loads(done.stdout)
        return dict(found)

    def measured(
        self, op: str, rows: int, shape: WeightShape, integer: bool
    ) -> dict[str, Any] | None:
        """Return what was measured for an op on this machine's GPU, for ``arb backends explain``.

        Returns:
            ``seconds`` of a call and the ``shape`` M, N, K that it was measured on; None if nothing
            was measured.
        """
        kernel = _MEASURED.get(op)
        if kernel is None or INTERPRETED or not torch.cuda.is_available():
            return None
        kind = (kernel, "int8" if integer else "16 bits")
        if op == "linear" and rows == 1:
            kind = ("row", "int8" if integer else "float")
        bucket = bucket_of(rows, shape.out_features, shape.in_features)
        table = user_table(gpu_of(torch.cuda.current_device()))
        found = table.find(kind, bucket)
        return None if found is None else {"seconds": found.seconds, "shape": list(bucket)}


def build() -> KernelBackend:
    """Build the backend, with every required and optional op and the ops between ranks."""
    return TritonBackend(
        kernels={
            "pack": layout.pack,
            "unpack": layout.unpack,
            "pack_votes": layout.pack_votes,
            "unpack_votes": layout.unpack_votes,
            "quantize_rows": rows.quantize_rows,
            "rms_norm_quantize": rows.rms_norm_quantize,
            "quantize_gradient": rows.quantize_gradient,
            "quantize_gradients": rows.quantize_gradients,
            "quantize_several": rows.quantize_several,
            "linear": products.linear,
            "linear_grad_input": products.linear_grad_input,
            "embedding": products.embedding,
            "cast_votes": casting.cast_votes,
            "cast_scaled_votes": casting.cast_scaled_votes,
            "embedding_votes": casting.embedding_votes,
            "embedding_scaled_votes": casting.embedding_scaled_votes,
            "apply_votes": flips.apply_votes,
            "apply_scaled_votes": flips.apply_scaled_votes,
            "apply_exponent_votes": flips.apply_exponent_votes,
            "apply_together": flips.apply_together,
            "distributed.digits_to_bytes": wire.digits_to_bytes,
            "distributed.bytes_to_digits": wire.bytes_to_digits,
            "distributed.add_digits_": wire.add_digits_,
            "distributed.weight_rows": wire.weight_rows,
            "distributed.flip_list": wire.flip_list,
            "distributed.apply_flips_": wire.apply_flips_,
            "votes.sums_to_quanta": wire.sums_to_quanta,
        }
    )
