"""Time and memory of a loss from whole logits and in blocks of rows: forward and backward through
one head.

    python plugins/arb-ternary-text/studies/blocked_loss.py --vocabulary 32000 --head int8

Prints seconds of processor time and of the clock, the shortest of the repetitions, and the most
memory above what the process held before the first. Each way has a process of its own. Reads /proc,
so that it runs on Linux alone.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from arb_ternary.ternary.linear import TernaryLinear
from arb_ternary_text.models.blocked_loss import mean_cross_entropy
from arb_ternary_text.models.parts import FloatLinear

HEADS = ("int8", "float", "linear")


def held_mib(key: str) -> float:
    """Memory of this process, MiB: ``VmRSS`` now, ``VmHWM`` at most."""
    line = next(
        each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith(key)
    )
    return int(line.split()[1]) / 1024


def measure(options: argparse.Namespace) -> None:
    """One way, in this process."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype)
    head: nn.Module
    if options.head == "linear":
        head = FloatLinear(options.width, options.vocabulary).to(dtype)
    else:
        head = TernaryLinear(options.width, options.vocabulary, gradients=options.head)
    x = torch.randn(options.rows, options.width).to(dtype).requires_grad_()
    targets = torch.randint(options.vocabulary, (options.rows,))
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    before = held_mib("VmRSS")
    seconds = []
    for _ in range(options.repeat):
        x.grad = None
        head.zero_grad()
        clock = time.perf_counter()
        processor = time.process_time()
        if options.way == "whole":
            losses = F.cross_entropy(head(x).float(), targets, reduction="none")
            (losses.sum() / options.rows).backward()
            del losses
        else:
            mean_cross_entropy(head, x, targets).backward()
        seconds.append((time.process_time() - processor, time.perf_counter() - clock))
    of_processor, of_clock = (min(each) for each in zip(*seconds, strict=True))
    above = held_mib("VmHWM") - before
    print(
        f"{options.way:7} {of_processor:6.2f} s of processor, {of_clock:6.2f} s of clock, "
        f"{above:6.0f} MiB",
        flush=True,
    )


def main() -> None:
    """Both ways, or the one that is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument(
        "--head",
        choices=HEADS,
        default="int8",
        help="ternary with such gradients, or a float linear",
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--way", choices=("whole", "blocks"))
    options = parser.parse_args()
    if options.way is not None:
        measure(options)
        return
    for way in ("whole", "blocks"):
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--way", way], check=True)


if __name__ == "__main__":
    main()
