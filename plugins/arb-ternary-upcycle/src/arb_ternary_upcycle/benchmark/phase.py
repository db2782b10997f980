"""The phase ``benchmark``: teacher against student in quality, time and memory."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from attrs import define

from arb_ternary.config.fields import to_plain
from arb_ternary_train.evaluate import evaluation_mode
from arb_ternary_train.machine import processor_name
from arb_ternary_upcycle.benchmark.config import BenchmarkConfig
from arb_ternary_upcycle.benchmark.latency import measure_latency
from arb_ternary_upcycle.benchmark.memory import measure_memory
from arb_ternary_upcycle.once import OncePhase
from arb_ternary_upcycle.report.contents import MEASUREMENTS
from arb_ternary_upcycle.report.writing import write_report
from arb_ternary_upcycle.store import Store
from arb_ternary_upcycle.verification.fidelity import measure_fidelity
from arb_ternary_upcycle.verification.kv_cache import (
    student_bytes_per_token,
    teacher_bytes_per_token,
)
from arb_ternary_upcycle.verification.pair import Pair, held_out_batches, open_pair

if TYPE_CHECKING:
    from arb_ternary_train.context import TrainingContext


@define(eq=False)
class BenchmarkPhase(OncePhase):
    """Measures, and writes ``RUN/report``.

    Each measurement is kept in ``RUN/report/measurements`` once it is complete; after a kill only
    the others are made. Times and peaks are nowhere else: nothing that depends on the machine is in
    checkpoints and metrics.
    """

    name = "benchmark"

    config: BenchmarkConfig

    def work(self, context: TrainingContext) -> dict[str, float]:
        """Measure, write the report, and return the numbers that do not depend on the machine."""
        config = self.config
        pair = open_pair(context, config.teacher)
        measured = Store(
            context.directory / MEASUREMENTS,
            {
                "options": to_plain(config),
                "step": context.step,
                "teacher": pair.teacher.digest,
            },
        )
        measured.write_json("machine.json", _machine(context))
        cache = {
            "teacher_bytes_per_token": teacher_bytes_per_token(pair.teacher),
            "student_bytes_per_token": student_bytes_per_token(pair.student, pair.device),
        }
        measured.write_json("kv_cache.json", cache)
        metrics = {f"kv_cache_{name}": float(value) for name, value in cache.items()}
        if "perplexity" in config.measure:
            if "perplexity.json" not in measured:
                batches = held_out_batches(
                    context, config.batches, config.batch_size, config.block_size
                )
                measured.write_json("perplexity.json", measure_fidelity(pair, batches).to_json())
            metrics |= measured.json("perplexity.json")
            context.note(
                f"perplexity: {metrics['ppl_ratio']:.4g} times the teacher's, divergence "
                f"{metrics['divergence']:.4g}"
            )
        context.stop_if_requested()
        self._run_models(context, pair, measured)
        page = write_report(context.directory)
        context.note(f"{page}: the report")
        context.record("benchmark", metrics)
        return metrics

    def _run_models(self, context: TrainingContext, pair: Pair, measured: Store) -> None:
        """Measure what needs whole models, and is not measured yet."""
        kinds = [kind for kind in ("memory", "latency") if kind in self.config.measure]
        wanted = product(kinds, self.config.sizes)
        missing = [(kind, size) for kind, size in wanted if _file(kind, size) not in measured]
        if not missing:
            return
        reporter = context.logbook.reporter
        student = pair.student
        models = {"teacher": pair.teacher.decoder().to(pair.device).eval(), "student": student}
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
                        warmup=self.config.warmup_runs,
                        timed=self.config.timed_runs,
                        between=context.stop_if_requested,
                    )
                measured.write_json(_file(kind, size), {"rows": rows})
                reporter.step(number, {}, False)
                context.stop_if_requested()
        reporter.stop()


def _file(kind: str, size: tuple[int, int, int]) -> str:
    prompt, generation, batch = size
    return f"{kind}-{prompt}+{generation}x{batch}.json"


def _machine(context: TrainingContext) -> dict[str, Any]:
    gpu = torch.cuda.get_device_name(context.device) if context.device.type == "cuda" else None
    return {
        "device": str(context.device),
        "gpu": gpu,
        "processor": processor_name(torch.device("cpu")),
        "threads": torch.get_num_threads(),
        "backend": context.backend.name,
        "torch": torch.__version__,
    }
