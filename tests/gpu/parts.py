"""What is to be found out on a machine with a GPU, in parts of less than ten minutes: ``make gpu-offline``.

``facts`` says what the machine is and multiplies once; ``tests`` runs those that need a GPU; ``bytes`` trains the exact
configs with torch's kernels and with Triton's on the device; ``bench`` times the kernels. Each part leaves its files in
``--out``, ends with exit code 1 where something is wrong, and can be run alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

ROOT: Final = Path(__file__).parents[2]
CONFIGS: Final = ROOT / "tests/composition/exact"
#: Seconds of a command: a part is one command after another, and has ten minutes.
LIMIT: Final = 500
SHAPES: Final = "1024x1024,4096x4096,8192x16384"


def _run(out: Path, name: str, *command: str, limit: float = LIMIT) -> int:
    """Run a command with its output in ``out/name.log`` and the end of it on the screen; returns its exit code."""
    log = out / f"{name}.log"
    with log.open("w", encoding="utf-8") as file:
        try:
            code = subprocess.run(
                [sys.executable, *command], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, timeout=limit, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            code = 124
    said = log.read_text(encoding="utf-8", errors="replace").splitlines()
    print(f"--- {name}: exit code {code}", *said[-25:], sep="\n", flush=True)
    return code


def facts(out: Path, device: str) -> bool:
    """The machine, and one product of every backend that serves it against torch on the CPU."""
    from arb_ternary import TernaryLinear
    from arb_ternary.backends.select import candidates

    found: dict[str, Any] = {"python": sys.version, "torch": torch.__version__}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "capability": [properties.major, properties.minor]}
        found |= {"memory": properties.total_memory, "multiprocessors": properties.multi_processor_count}
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
        except Exception as error:  # whatever it is, it is to be told, and the other backends are tried
            backends[candidate.name] = f"{type(error).__name__}: {error}"
            continue
        same = torch.equal(got.detach().cpu(), wanted(x).detach())
        backends[candidate.name] = "works" if same else "multiplies, and another result than on the CPU"
    found["backends"] = backends
    (out / "facts.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(json.dumps(found, indent=1))
    return all(said == "works" or said.startswith("cannot") for said in backends.values())


def tests(out: Path, device: str) -> bool:
    """The tests that need a GPU; on the CPU a few of those that the interpreter serves."""
    chosen = ["-m", "gpu or (interpreted and not slow)"] if device == "cuda" else ["-m", "interpreted", "-k", "pack"]
    folders = ["core/tests", "plugins/arb-ternary-testing", "backends/arb-ternary-triton"]
    options = ["-q", "-p", "no:cacheprovider", "--tb=short", "-n", "4", "--maxfail=40", "-W", "default"]
    return _run(out, "tests", "-m", "pytest", *options, *chosen, *folders) == 0


def _trained(out: Path, config: str, backend: str, device: str, number: int) -> dict[str, str]:
    name = f"{config}-{backend}-{device}-{number}"
    command = ["-m", "arb_ternary.cli.main", "train", str(CONFIGS / f"{config}.yaml"), "-o", f"device={device}"]
    folder = out / "runs" / name
    code = _run(out, name, *command, "-o", f"backend={backend}", "--run-dir", str(folder), limit=120)
    last = sorted(folder.glob("checkpoints/step-*"))
    if code or not last:
        return {"failed": f"exit code {code}, number {number}"}
    parts = ("model.safetensors", "state.safetensors")
    return {part: hashlib.sha256((last[-1] / part).read_bytes()).hexdigest() for part in parts}


def training_bytes(out: Path, device: str) -> bool:
    """Exact runs: Triton's twice, and torch's, on the device, have the same bytes; those of the CPU are told beside."""
    fine, told = True, {}
    for config in sorted(path.stem for path in CONFIGS.glob("*.yaml")):
        runs = {
            f"{backend} on {where}, run {number}": _trained(out, config, backend, where, number)
            for backend, where, number in (
                ("torch", "cpu", 1),
                ("torch", device, 2),
                ("triton", device, 1),
                ("triton", device, 2),
            )
        }
        on_device = [hashes for name, hashes in runs.items() if not name.startswith("torch on cpu, run 1")]
        same = all(hashes == on_device[0] and "failed" not in hashes for hashes in on_device)
        told[config] = {"same bytes on the device": same, "runs": runs}
        fine &= same
    (out / "bytes.json").write_text(json.dumps(told, indent=1), encoding="utf-8")
    print(json.dumps(told, indent=1))
    return fine


def bench(out: Path, device: str) -> bool:
    """Every kernel on a few shapes."""
    shapes = SHAPES if device == "cuda" else "64x128"
    command = ["-m", "arb_ternary.cli.main", "bench", "kernels", "--device", device, "--seconds", "0.05"]
    more = ["--m", "1,16,512,2048", "--shapes", shapes, "--out", str(out / "kernels")]
    return _run(out, "bench", *command, *more) == 0


PARTS: Final[dict[str, Callable[[Path, str], bool]]] = {
    "facts": facts,
    "tests": tests,
    "bytes": training_bytes,
    "bench": bench,
}


def main() -> int:
    """Run the parts that were named, all of them by default."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--out", type=Path, default=ROOT / "runs/gpu", help="folder for what is found")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: to try this program out")
    chosen = parser.parse_args()
    if unknown := set(chosen.parts) - set(PARTS):
        parser.error(f"no part is called {', '.join(sorted(unknown))}: there are {', '.join(PARTS)}")
    if chosen.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU here")
    out = chosen.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    wrong = [name for name in chosen.parts or PARTS if not PARTS[name](out, chosen.device)]
    print(f"wrong: {', '.join(wrong)}" if wrong else "nothing is wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
