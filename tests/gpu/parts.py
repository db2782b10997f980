"""What is to be found out on a machine with a GPU, in parts of less than ten minutes: ``make
gpu-offline``.

``facts`` says what the machine is and multiplies once; ``sanitizer`` takes a few training steps
under compute-sanitizer, where it is there; ``tests`` runs those that need a GPU; ``bytes`` trains
the exact configs on the device with torch's kernels and with those of every other backend that
works there; ``steps`` times training steps, and ``bench`` kernels. Each part leaves its files in
``--out``, ends with exit code 1 where something is wrong, and can be run alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Final

import torch
from attrs import frozen

ROOT: Final = Path(__file__).parents[2]
CONFIGS: Final = ROOT / "tests/composition/exact"
SHORT: Final = ROOT / "tests/gpu/short.py"
#: Seconds of a part, whose commands share them.
LIMIT: Final = 560
SHAPES: Final = "1024x1024,4096x4096,8192x16384"
SANITIZER: Final = "compute-sanitizer"
#: What the sanitizer ends with where it found something: no exit code of the program itself.
FOUND: Final = 86
ARB: Final = ("-m", "arb_ternary.cli.main")


@frozen(kw_only=True)
class Part:
    """A part that is being run.

    Attributes:
        out: folder for what it finds.
        device: ``cuda``, or ``cpu`` to try this program out.
        until: when it has to be done, by :func:`time.monotonic`.
        named: it was asked for by its name.
    """

    out: Path
    device: str
    until: float
    named: bool = False

    def run(
        self,
        name: str,
        *command: str,
        under: tuple[str, ...] = (),
        limit: float = LIMIT,
        **variables: str,
    ) -> int:
        """Run a command of Python with its output in ``out/name.log``, its end on the screen;
        returns its exit code.

        Args:
            under: a program that starts Python, with its options.
            limit: seconds that it may take; never more than are left of the part. The exit code is
                124 after these.
            variables: added to the environment.
        """
        left = max(1.0, min(limit, self.until - time.monotonic()))
        log = self.out / f"{name}.log"
        with log.open("w", encoding="utf-8") as file:
            try:
                code = subprocess.run(
                    [*under, sys.executable, *command],
                    cwd=ROOT,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    timeout=left,
                    check=False,
                    env=os.environ | variables,
                ).returncode
            except subprocess.TimeoutExpired:
                code = 124
        said = log.read_text(encoding="utf-8", errors="replace").splitlines()
        print(f"--- {name}: exit code {code}", *said[-25:], sep="\n", flush=True)
        return code

    def tell(self, name: str, found: dict[str, Any]) -> None:
        """Keep what was found in ``out/name.json``, and print it."""
        (self.out / f"{name}.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
        print(json.dumps(found, indent=1))

    def backends(self) -> list[str]:
        """Those beside torch's that work on the device, the preferred first."""
        from arb_ternary.backends.select import candidates

        found = candidates(self.device)
        return [
            one.name for one in found if one.usable and not one.last_resort and one.name != "torch"
        ]


def facts(part: Part) -> bool:
    """The machine, and one product of every backend that serves it against torch on the CPU."""
    from arb_ternary import TernaryLinear
    from arb_ternary.backends.select import candidates

    found: dict[str, Any] = {"python": sys.version, "torch": torch.__version__}
    device = part.device
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "capability": [properties.major, properties.minor]}
        found |= {
            "memory": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
        }
    x = torch.randn(5, 200)
    backends: dict[str, str] = {}
    for candidate in candidates(device):
        if not candidate.usable:
            backends[candidate.name] = f"cannot be used: {candidate.reason}"
            continue
        torch.manual_seed(0)
        layer = TernaryLinear(200, 24, group_size=32, gradients="int8", backend=candidate.name)
        wanted = TernaryLinear(200, 24, group_size=32, gradients="int8", backend="torch")
        wanted.set_trits(layer.trits())
        try:
            got = layer.to(device)(x.to(device))
            got.square().sum().backward()
        # whatever it is, it is to be told, and the other backends are tried
        except Exception as error:
            backends[candidate.name] = f"{type(error).__name__}: {error}"
            continue
        same = torch.equal(got.detach().cpu(), wanted(x).detach())
        backends[candidate.name] = (
            "works" if same else "multiplies, and another result than on the CPU"
        )
    found["backends"] = backends
    part.tell("facts", found)
    return all(said == "works" or said.startswith("cannot") for said in backends.values())


def sanitizer(part: Part) -> bool:
    """Training steps by every backend under compute-sanitizer's memcheck.

    torch's cache of memory is off meanwhile: it hides what is read or written past the end.
    """
    home = os.environ.get("CUDA_HOME")
    tool = shutil.which(SANITIZER) or (home and shutil.which(SANITIZER, path=f"{home}/bin"))
    if not tool:
        print(
            f"--- sanitizer: {SANITIZER} is neither in PATH nor in CUDA_HOME/bin: nothing was "
            f"checked",
            flush=True,
        )
        return not part.named
    backends = part.backends()
    if not backends:
        print(
            f"--- sanitizer: no backend beside torch works on {part.device}: nothing was checked",
            flush=True,
        )
        return False
    under = (
        tool,
        "--tool",
        "memcheck",
        "--target-processes",
        "application-only",
        "--error-exitcode",
        str(FOUND),
    )
    found = {}
    for number, backend in enumerate(backends):
        left = (part.until - time.monotonic()) / (len(backends) - number)
        command = [
            str(SHORT),
            "--backend",
            backend,
            "--device",
            part.device,
            "--seconds",
            f"{left / 2:.0f}",
        ]
        code = part.run(
            f"sanitizer-{backend}",
            *command,
            under=under,
            limit=left,
            PYTORCH_NO_CUDA_MEMORY_CACHING="1",
        )
        said = {
            0: "nothing found",
            FOUND: f"errors: see sanitizer-{backend}.log",
            124: "it took too long",
        }
        found[backend] = said.get(code, f"exit code {code}")
    part.tell("sanitizer", found)
    return all(said == "nothing found" for said in found.values())


def tests(part: Part) -> bool:
    """The tests that need a GPU; on the CPU a few of those that the interpreter serves."""
    on_gpu = part.device == "cuda"
    chosen = (
        ["-m", "gpu or (interpreted and not slow)"]
        if on_gpu
        else ["-m", "interpreted", "-k", "pack"]
    )
    folders = ["core/tests", "plugins/arb-ternary-testing", "backends/arb-ternary-triton"]
    if "tilelang" in part.backends():
        folders.append("backends/arb-ternary-tilelang")
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "--tb=short",
        "-n",
        "4",
        "--maxfail=40",
        "-W",
        "default",
    ]
    return part.run("tests", "-m", "pytest", *options, *chosen, *folders) == 0


def _trained(part: Part, config: str, backend: str, device: str, number: int) -> dict[str, str]:
    name = f"{config}-{backend}-{device}-{number}"
    command = [
        *ARB,
        "train",
        str(CONFIGS / f"{config}.yaml"),
        "-o",
        f"device={device}",
        "-o",
        f"backend={backend}",
    ]
    folder = part.out / "runs" / name
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier call
    code = part.run(name, *command, "--run-dir", str(folder), limit=120)
    last = sorted(folder.glob("checkpoints/step-*"))
    if code or not last:
        return {"failed": f"exit code {code}, number {number}"}
    kept = ("model.safetensors", "state.safetensors")
    return {name: hashlib.sha256((last[-1] / name).read_bytes()).hexdigest() for name in kept}


def training_bytes(part: Part) -> bool:
    """Exact runs: every backend's, twice, and torch's have the same bytes on the device; the CPU's
    are told beside.
    """
    backends = part.backends()
    if not backends:
        print(
            f"--- bytes: no backend beside torch works on {part.device}: nothing was compared",
            flush=True,
        )
        return False
    fine = True
    told = {}
    for config in sorted(path.stem for path in CONFIGS.glob("*.yaml")):
        device = part.device
        on_device = {"torch": _trained(part, config, "torch", device, 2)}
        for backend, number in product(backends, (1, 2)):
            on_device[f"{backend}, run {number}"] = _trained(part, config, backend, device, number)
        first, *others = on_device.values()
        same = "failed" not in first and all(hashes == first for hashes in others)
        on_cpu = _trained(part, config, "torch", "cpu", 1)
        told[config] = {
            "same bytes on the device": same,
            f"on {device}": on_device,
            "torch on the CPU": on_cpu,
        }
        fine &= same
    part.tell("bytes", told)
    return fine


def steps(part: Part) -> bool:
    """Training steps of decoders, without what torch compiles: that takes long."""
    on_gpu = part.device == "cuda"
    methods = [f"{backend}/int8" for backend in part.backends()]
    command = ["benchmarks/training.py", "--device", part.device, "--threads", "1"]
    command += ["--methods", ",".join([*methods, "bfloat16", "qat/bfloat16"])]
    command += ["--sizes", "512x8,1024x12" if on_gpu else "tiny"]
    command += ["--rounds", "1", "--steps", "16" if on_gpu else "2"]
    return part.run("steps", *command, "--out", str(part.out / "steps")) == 0


def bench(part: Part) -> bool:
    """Every kernel on a few shapes."""
    shapes = SHAPES if part.device == "cuda" else "64x128"
    command = ["benchmarks/kernels.py", "--device", part.device, "--seconds", "0.05"]
    command += ["--m", "1,16,512,2048", "--shapes", shapes]
    return part.run("bench", *command, "--out", str(part.out / "kernels")) == 0


PARTS: Final[dict[str, Callable[[Part], bool]]] = {
    "facts": facts,
    "sanitizer": sanitizer,
    "tests": tests,
    "bytes": training_bytes,
    "steps": steps,
    "bench": bench,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts that were named, all of them by default; ``arguments`` are those of the command
    line.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument(
        "--out", type=Path, default=ROOT / "runs/gpu", help="folder for what is found"
    )
    parser.add_argument(
        "--device", default="cuda", choices=["cuda", "cpu"], help="cpu: to try this program out"
    )
    chosen = parser.parse_args(arguments)
    if unknown := set(chosen.parts) - set(PARTS):
        parser.error(
            f"no part is called {', '.join(sorted(unknown))}: there are {', '.join(PARTS)}"
        )
    if chosen.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU here")
    out = chosen.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    wrong = []
    for name in chosen.parts or PARTS:
        part = Part(
            out=out, device=chosen.device, until=time.monotonic() + LIMIT, named=bool(chosen.parts)
        )
        if not PARTS[name](part):
            wrong.append(name)
    print(f"wrong: {', '.join(wrong)}" if wrong else "nothing is wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
