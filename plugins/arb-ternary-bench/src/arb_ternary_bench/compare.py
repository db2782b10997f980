"""Several configs trained side by side: the same seeds, one after the other in turn, one table.

Every run is a process of its own, so that its peak memory is its own; the configs take turns seed
by seed (A B A B), so that a machine whose speed drifts is as kind to one as to the other. Ratios
are against the first config.
"""

from __future__ import annotations

import os
import platform
import statistics
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from attrs import frozen

from arb_ternary.errors import ArbError, ConfigError
from arb_ternary_bench.child import ChildRun


@frozen
class Compared:
    """What the runs of one config gave.

    Attributes:
        name: the config's file name without its ending.
        config: its path.
        validation_losses: nats a token on all validation tokens, by seed.
        tokens_per_second: training speed, by seed.
        peak_bytes: largest resident memory of the process, by seed.
        parameters: learnable numbers.
        state_bits_per_parameter: persistent training state, counted from the tensors.
        state_bytes: the same in bytes.
        float_parameters: of the model.
        tokens: trained on.
        bigram_entropy: of the validation tokens, nats a token.
        unigram_entropy: likewise.
    """

    name: str
    config: str
    validation_losses: tuple[float, ...]
    tokens_per_second: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    parameters: int
    state_bits_per_parameter: float
    state_bytes: int
    float_parameters: int
    tokens: int
    bigram_entropy: float
    unigram_entropy: float

    @property
    def loss(self) -> float:
        """Mean validation loss."""
        return statistics.fmean(self.validation_losses)

    @property
    def spread(self) -> float:
        """Standard deviation of the validation loss over seeds; 0 for one seed."""
        return statistics.stdev(self.validation_losses) if len(self.validation_losses) > 1 else 0.0

    @property
    def speed(self) -> float:
        """Median tokens a second."""
        return statistics.median(self.tokens_per_second)

    def to_json(self) -> dict[str, Any]:
        """Plain numbers."""
        return {
            "name": self.name,
            "config": self.config,
            "validation_losses": list(self.validation_losses),
            "validation_loss_mean": self.loss,
            "validation_loss_stdev": self.spread,
            "tokens_per_second": list(self.tokens_per_second),
            "peak_bytes": list(self.peak_bytes),
            "parameters": self.parameters,
            "float_parameters": self.float_parameters,
            "state_bytes": self.state_bytes,
            "state_bits_per_parameter": self.state_bits_per_parameter,
            "tokens": self.tokens,
            "unigram_entropy": self.unigram_entropy,
            "bigram_entropy": self.bigram_entropy,
        }


def machine_facts() -> dict[str, Any]:
    """Processor, cores, system and library versions, for the record beside any figure."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.partition(":")[2].strip()
            for line in info.read_text().splitlines()
            if line.startswith("model name")
        ]
        model = names[0] if names else model
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "arb-ternary-core": version("arb-ternary-core"),
    }


def compare(
    configs: Sequence[Path],
    seeds: Sequence[int],
    overrides: Sequence[str] = (),
    *,
    say: Callable[[str], None] = lambda _: None,
) -> list[Compared]:
    """Train every config with every seed.

    Args:
        configs: config files; their names must differ.
        seeds: override the configs' own.
        overrides: further ``path=value`` overrides of every config.
        say: told of every finished run.

    Raises:
        ArbError: a run failed; its output is the hint.
    """
    results: dict[Path, list[tuple[dict[str, Any], int]]] = {config: [] for config in configs}
    with tempfile.TemporaryDirectory(prefix="arb-compare-") as folder:
        for seed in seeds:
            for config in configs:
                directory = Path(folder) / f"{config.stem}-{seed}"
                report, peak = _train(config, directory, [*overrides, f"seed={seed}"])
                results[config].append((report, peak))
                say(
                    f"{config.stem}, seed {seed}: validation loss {report['validation_loss']:.4f}, "
                    f"{report['tokens_per_second']:,.0f} tokens/s, {peak / 2**20:,.0f} MiB"
                )
    return [_summary(config, runs) for config, runs in results.items()]


def _train(config: Path, directory: Path, overrides: Sequence[str]) -> tuple[dict[str, Any], int]:
    """Train in a process of its own; the report, and the most memory that the process held, in
    bytes.
    """
    child = ChildRun.start(config, directory, overrides)
    ended = child.wait()
    if ended.code:
        raise ArbError(f"{config}: the run ended with {ended.code}", child.log_tail())
    report = child.report()
    if report["validation_loss"] is None:
        raise ConfigError(
            f"{config}: phases.eval_every: 0 leaves nothing to compare",
            "Give the last phase another value.",
        )
    return report, ended.peak_bytes


def _summary(config: Path, runs: Sequence[tuple[dict[str, Any], int]]) -> Compared:
    last, _ = runs[-1]
    audit = last["audit"]
    return Compared(
        name=config.stem,
        config=config.name,
        validation_losses=tuple(report["validation_loss"] for report, _ in runs),
        tokens_per_second=tuple(report["tokens_per_second"] for report, _ in runs),
        peak_bytes=tuple(peak for _, peak in runs),
        parameters=audit["parameters"],
        state_bits_per_parameter=audit["state_bits_per_parameter"],
        state_bytes=audit["state_bytes"],
        float_parameters=audit["float_parameters"],
        tokens=last["tokens"],
        bigram_entropy=last["bigram_entropy"],
        unigram_entropy=last["unigram_entropy"],
    )
