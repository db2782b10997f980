"""The phase ``benchmark``: teacher against student in quality, time and memory."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from arb_ternary.config.fields import to_plain
from arb_ternary.protocols.runs import PhaseResult
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_train.evaluate import evaluation_mode
from arb_ternary_upcycle.benchmark.config import BenchmarkConfig
from arb_ternary_upcycle.benchmark.latency import measure_latency
from arb_ternary_upcycle.benchmark.measurements import Measurements
from arb_ternary_upcycle.benchmark.memory import measure_memory
from arb_ternary_upcycle.report.writing import write_report
from arb_ternary_upcycle.verification.fidelity import measure_fidelity
from arb_ternary_upcycle.verification.kv_cache import (
    student_bytes_per_token,
    teacher_bytes_per_token,
)
from arb_ternary_upcycle.verification.pair import Pair, held_out_batches, open_pair

if TYPE_CHECKING:
    from arb_ternary_train.context import TrainingContext


class BenchmarkPhase:
    """Measures, and writes ``RUN/report``.

    Each part is kept in ``RUN/report/measurements.json`` once it is whole; after a kill only the
    others are measured. Times and peaks are there alone: nothing that depends on the machine gets
    into checkpoints and metrics.
    """

    name = "benchmark"

    def __init__(self, config: BenchmarkConfig) -> None:
        self.config = config
        self._metrics: dict[str, float] | None = None

    def run(self, context: TrainingContext) -> PhaseResult:
        """Measure what has not been measured of this model; see ``Phase``."""
        if self._metrics is None:
            self._metrics = self._measure(context)
            context.record("benchmark", self._metrics)
            context.mark_progress()
        context.save_checkpoint()
        return PhaseResult(steps=0, metrics=self._metrics)

    def _measure(self, context: TrainingContext) -> dict[str, float]:
        """Measure, and write the report; the numbers that do not depend on the machine."""
        config = self.config
        pair = open_pair(context, config.teacher)
        options = to_plain(config)
        origin = {"options": options, "step": context.step, "teacher": pair.teacher.model.digest}
        measured = Measurements(context.directory, origin)
        measured.add("machine", _machine(context))
        cache = {
            "teacher_bytes_per_token": teacher_bytes_per_token(pair.teacher.model),
            "student_bytes_per_token": student_bytes_per_token(pair.student.model, pair.device),
        }
        measured.add("kv_cache", cache)
        metrics = {f"kv_cache_{name}": float(value) for name, value in cache.items()}
        if "perplexity" in config.measure:
            if "perplexity" not in measured:
                batches = held_out_batches(
                    context, config.batches, config.batch_size, config.block_size
                )
                measured.add("perplexity", measure_fidelity(pair, batches).to_json())
            metrics |= {name: float(value) for name, value in measured["perplexity"].items()}
            context.note(
                f"perplexity: {metrics['ppl_ratio']:.4g} times the teacher's, divergence "
                f"{metrics['divergence']:.4g}"
            )
        context.stop_if_requested()
        if missing := self._missing(measured):
            self._measure_passes(context, pair, measured, missing)
        write_report(context.directory)
        context.note(f"{context.directory / 'report' / 'report.html'}: the report")
        return metrics

    def _missing(self, measured: Measurements) -> list[tuple[str, tuple[int, int, int]]]:
        wanted = [
            (kind, size)
            for kind in ("memory", "latency")
            if kind in self.config.measure
            for size in self._sizes
        ]
        return [(kind, size) for kind, size in wanted if _key(kind, size) not in measured]

    @property
    def _sizes(self) -> list[tuple[int, int, int]]:
        return self.config.sizes

    def _measure_passes(
        self,
        context: TrainingContext,
        pair: Pair,
        measured: Measurements,
        missing: list[tuple[str, tuple[int, int, int]]],
    ) -> None:
        config = self.config
        reporter = context.logbook.reporter
        student = pair.student.model
        models: dict[str, Decoder] = {
            "teacher": pair.teacher.model.decoder().to(pair.device),
            "student": student,
        }
        reporter.start(self.name, len(missing), 0)
        with evaluation_mode(student):
            for number, (kind, size) in enumerate(missing, start=1):
                if kind == "memory":
                    rows = [
                        measure_memory(name, model, size, pair.device)
                        for name, model in models.items()
                    ]
                else:
                    rows = measure_latency(
                        models,
                        size,
                        warmup=config.warmup_runs,
                        timed=config.timed_runs,
                        device=pair.device,
                        between=context.stop_if_requested,
                    )
                measured.add(_key(kind, size), rows)
                reporter.step(number, {}, False)
                context.stop_if_requested()
        reporter.stop()

    def state_dict(self) -> dict[str, Any]:
        """The numbers, once all are measured; what has been measured until then is on disk."""
        return {"metrics": self._metrics}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        self._metrics = state["metrics"]


def _key(kind: str, size: tuple[int, int, int]) -> str:
    prompt, generation, batch = size
    return f"{kind} {prompt}+{generation} x {batch}"


def _machine(context: TrainingContext) -> dict[str, Any]:
    gpu = torch.cuda.get_device_name(context.device) if context.device.type == "cuda" else None
    return {
        "device": str(context.device),
        "gpu": gpu,
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "backend": context.backend.name,
        "torch": torch.__version__,
    }


def _processor() -> str:
    """Its name on Linux, its kind elsewhere."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text(encoding="utf-8").splitlines() if facts.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def build(config: BenchmarkConfig) -> BenchmarkPhase:
    """Factory of the phase ``benchmark``."""
    return BenchmarkPhase(config)
