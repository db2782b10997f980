"""Ternary convolutions of the cpu backend beside torch's float32 convolution, on shapes of small
networks of images.

    python plugins/arb-ternary-bench/studies/convolution.py --out
    plugins/arb-ternary-bench/results/convolution.json

Everything of a shape is timed in turns in one process: torch with channels first and with channels
last in memory, the kernel, the layer without gradients, and a training pass of both, forward,
backward to the input and to the weight (float gradients, or votes of int8 gradients). Results of
the ternary side are first compared with torch's. One thread is timed by what the processor spends
on it, which leaves out what others take on a machine that is not idle.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any, Final

import torch
from attrs import asdict, frozen
from torch import Tensor
from torch.nn.functional import conv2d, unfold

from arb_ternary.backends.select import get_backend
from arb_ternary_bench.kernels.bench import with_threads
from arb_ternary_bench.kernels.facts import bench_facts, load_average
from arb_ternary_bench.kernels.timing import Clock, Variant, measure, processor_clock
from arb_ternary_vision.convolution import TernaryConv2d

GOAL: Final = 1.5


@frozen
class Shape:
    """Kernels of 3 x 3 with padding 1 over square images."""

    batch: int
    channels: int
    outputs: int
    size: int
    stride: int

    @property
    def title(self) -> str:
        """As in the table."""
        return (
            f"{self.batch} x {self.channels} x {self.size} x {self.size}, {self.outputs}, "
            f"{self.stride}"
        )


SHAPES: Final = (
    Shape(128, 1, 16, 8, 1),
    Shape(128, 16, 32, 8, 1),
    Shape(128, 32, 64, 8, 2),
    Shape(128, 64, 64, 4, 1),
    Shape(64, 3, 16, 32, 1),
    Shape(64, 16, 16, 32, 1),
    Shape(64, 16, 32, 32, 2),
    Shape(64, 32, 32, 16, 1),
    Shape(64, 32, 64, 16, 2),
    Shape(64, 64, 64, 16, 1),
    Shape(64, 64, 64, 8, 1),
    Shape(1, 16, 16, 32, 1),
    Shape(1, 32, 32, 16, 1),
    Shape(1, 64, 64, 8, 1),
    Shape(1, 64, 64, 32, 1),
)


def own_clock(variant: Variant, i: int) -> float:
    """The time of a call that the processor spends on this thread."""
    start = time.thread_time_ns()
    variant.call(i)
    return (time.thread_time_ns() - start) * 1e-9


def variants_of(shape: Shape) -> list[Variant]:
    """What is timed for a shape."""
    torch.manual_seed(0)
    layer = TernaryConv2d(
        shape.channels,
        shape.outputs,
        3,
        stride=shape.stride,
        padding=1,
        gradients="int8",
        backend="cpu",
    )
    x = torch.randn(shape.batch, shape.channels, shape.size, shape.size)
    weight = layer.dense_weight().view(shape.outputs, shape.channels, 3, 3)
    last, weight_last = (tensor.to(memory_format=torch.channels_last) for tensor in (x, weight))
    window = (3, 3, 1, 1, 1, 1, shape.stride, shape.stride)
    kernel: Any = get_backend("cpu").kernels["convolve"]
    _check(layer, x, weight, shape.stride)

    def ternary(x: Tensor) -> Tensor:
        y: Tensor = kernel(x, layer.weight, layer.exponent, None, layer.shape, window)
        return y

    learning = weight.clone().requires_grad_()
    grad = torch.ones_like(layer(x))
    inputs = x.clone().requires_grad_()
    inputs_last = last.clone().requires_grad_()

    def float_pass(image: Tensor) -> None:
        y = conv2d(image, learning, None, shape.stride, 1)
        torch.autograd.grad(y, (image, learning), grad)

    def vote_pass(image: Tensor) -> None:
        torch.autograd.grad(layer(image), image, grad)

    def quietly(image: Tensor) -> None:
        with torch.no_grad():
            layer(image)

    return [
        Variant(name="torch", call=lambda _: conv2d(x, weight, None, shape.stride, 1)),
        Variant(
            name="torch, channels last",
            call=lambda _: conv2d(last, weight_last, None, shape.stride, 1),
        ),
        Variant(name="kernel", call=lambda _: ternary(x)),
        Variant(name="kernel, channels last", call=lambda _: ternary(last)),
        Variant(name="layer", call=lambda _: quietly(last)),
        Variant(name="torch trains", call=lambda _: float_pass(inputs)),
        Variant(name="torch trains, channels last", call=lambda _: float_pass(inputs_last)),
        Variant(name="layer trains", call=lambda _: vote_pass(inputs_last)),
    ]


def _check(layer: TernaryConv2d, x: Tensor, weight: Tensor, stride: int) -> None:
    """The ternary result is torch's of the same weight, but for the rounding of the patches."""
    wanted = conv2d(x, weight, None, stride, 1)
    largest = unfold(x, 3, 1, 1, stride).abs().amax(dim=1).view(x.shape[0], 1, *wanted.shape[2:])
    bound = largest / 254 * weight.abs().sum(dim=(1, 2, 3)).view(1, -1, 1, 1) + 1e-4
    if bool(((layer(x) - wanted).abs() > bound).any()):
        raise SystemExit("the ternary convolution is further from torch's than rounding explains")


def run(threads: tuple[int, ...], seconds: float) -> dict[str, Any]:
    """Every shape with each number of threads."""
    facts = bench_facts(["cpu"])
    rows = []
    for count in threads:
        clock: Clock = own_clock if count == 1 else processor_clock
        with with_threads(count):
            for shape in SHAPES:
                found = measure(variants_of(shape), seconds, clock)
                micros = {name: round(timing.least * 1e6, 1) for name, timing in found.items()}
                rows.append(
                    {
                        "threads": count,
                        "shape": asdict(shape),
                        "title": shape.title,
                        "least_us": micros,
                    }
                )
                print(count, shape.title, micros, flush=True)
    return {"machine": facts, "load_average_at_the_end": load_average(), "rows": rows}


def ratios(least: dict[str, float]) -> dict[str, float]:
    """How many times as fast as torch: the kernel and the layer, and a training pass."""
    best = min(least["torch"], least["torch, channels last"])
    return {
        "first": least["torch"] / least["kernel"],
        "best": best / min(least["kernel"], least["kernel, channels last"]),
        "layer": best / least["layer"],
        "trains": min(least["torch trains"], least["torch trains, channels last"])
        / least["layer trains"],
    }


def table(result: dict[str, Any]) -> str:
    """Least times and how they compare, as Markdown; what misses the goal is in italics."""
    lines = [
        "| images, outputs, stride | threads | torch µs | channels last | kernel µs | channels "
        "last | x torch | x best | layer: x best | training: x best |",
        "|---|" + "---:|" * 9,
    ]
    for row in result["rows"]:
        least = row["least_us"]
        names = ("torch", "torch, channels last", "kernel", "kernel, channels last")
        factors = [
            f"{value:.2f}" if value >= GOAL else f"*{value:.2f}*"
            for value in ratios(least).values()
        ]
        cells = [
            row["title"],
            str(row["threads"]),
            *(f"{least[name]:,.0f}" for name in names),
            *factors,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    machine = result["machine"]
    note = (
        "3 x 3 taps, padding 1; images are batch x channels x height x width. Least times. "
        f"{machine['processor']}, torch {machine['torch']} ({machine['torch_cpu_capability']}), "
        f"load average {machine['load_average']} at the start and "
        f"{result['load_average_at_the_end']} at the end."
    )
    return "\n".join([*lines, "", note])


def main() -> None:
    """Measure and write, or print the table of a result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="result, JSON")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=0.3, help="for each variant of a shape")
    arguments = parser.parse_args()
    result = run(tuple(arguments.threads), arguments.seconds)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))


if __name__ == "__main__":
    main()
