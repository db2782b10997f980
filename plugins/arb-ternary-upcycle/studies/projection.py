"""Projection to ternary of a real teacher, nothing trained: what each part of it is worth.

Calibration and held-out text are the built-in one. Every variant rounds all linears of the blocks,
one after another; embedding, norms and head stay float, and what enters linears is int8. Perplexity
and KL are those of other held-out samples than errors are measured on. ``errors`` rounds linears of
every block by least squares and by ``gptq_cd``, all on the teacher's own inputs, and compares the
errors of their outputs on held-out tokens. The result file is written after each, and keeps what it
had of others::

    OMP_NUM_THREADS=1 python plugins/arb-ternary-upcycle/studies/projection.py \\
        MODEL.gguf --out RESULT.json
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor, nn

from arb_ternary_bench.compare import machine_facts
from arb_ternary_text.data.shakespeare import ShakespeareConfig
from arb_ternary_text.data.shakespeare import build as shakespeare
from arb_ternary_text.models.block import Block
from arb_ternary_train.seeding import derived_generator
from arb_ternary_upcycle.calibration import calibration_tokens, held_out_tokens
from arb_ternary_upcycle.float_model import FloatModel
from arb_ternary_upcycle.float_model_writer import FloatModelWriter
from arb_ternary_upcycle.folding import Basis, untied
from arb_ternary_upcycle.projection.rounded import Rounded
from arb_ternary_upcycle.projection.sequential import Plan, SequentialProjection
from arb_ternary_upcycle.projection.solve import Recipe, project
from arb_ternary_upcycle.projection.statistics import InputStatistics
from arb_ternary_upcycle.projection.sublayers import linears_of, sublayers, watched
from arb_ternary_upcycle.rotation import random_rotation
from arb_ternary_upcycle.teacher import read_teacher


@frozen
class Variant:
    """A recipe; ``rotated``: of the stage that ``fold_rotate`` makes."""

    recipe: Recipe
    correction: bool
    rotated: bool = True
    activations: str = "int8"


VARIANTS = {
    "absmean, a row": Variant(Recipe(policy="absmean"), correction=False, rotated=False),
    "ls, groups of 128": Variant(
        Recipe(policy="ls", grouping=128), correction=False, rotated=False
    ),
    "gptq, groups of 128": Variant(
        Recipe(policy="gptq", grouping=128), correction=False, rotated=False
    ),
    "gptq, groups of 128, rotated": Variant(Recipe(policy="gptq", grouping=128), correction=False),
    "gptq, groups of 128, rotated, corrected": Variant(
        Recipe(policy="gptq", grouping=128), correction=True
    ),
    "gptq, a row, rotated, corrected": Variant(Recipe(policy="gptq"), correction=True),
    "gptq_cd, a row, rotated, corrected": Variant(Recipe(), correction=True),
    "gptq_cd, a row, rotated, corrected, float inputs": Variant(
        Recipe(), correction=True, activations="float"
    ),
    "gptq_cd, a row, rotated, corrected, damping 0.03": Variant(
        Recipe(damping=0.03), correction=True
    ),
    "gptq_cd, a matrix, rotated, corrected": Variant(Recipe(grouping="tensor"), correction=True),
}

#: Tokens of a held-out sample, whatever those of calibration have.
JUDGED: Final = 512


class Study:
    """The stages and the text."""

    def __init__(self, source: str, folder: Path, tokens: int, block_size: int, seed: int) -> None:
        teacher = read_teacher(source, "float32")
        (folder / "tokenizer.json").write_text(json.dumps(teacher.tokenizer))
        writer = FloatModelWriter(
            folder / "teacher", teacher.config, teacher.model.vocabulary_size, teacher.tokenizer
        )
        for number, tensors in teacher.blocks():
            writer.write_block(number, tensors)
        writer.write_ends(teacher.ends())
        self.teacher = writer.finish()
        config = self.teacher.config
        basis = Basis(
            config, True, random_rotation(config.width, derived_generator(seed, "residual")), seed
        )
        writer = FloatModelWriter(
            folder / "prepared", untied(config), self.teacher.vocabulary_size, teacher.tokenizer
        )
        for number in range(config.layers):
            writer.write_block(
                number, basis.block(number, self.teacher.weights(f"blocks.{number}."))
            )
        writer.write_ends(basis.ends(self.teacher.ends()))
        self.prepared = writer.finish()
        self.data = shakespeare(ShakespeareConfig(tokenizer=str(folder / "tokenizer.json")))
        self.folder = folder
        context: Any = self
        self.calibration = calibration_tokens(
            context, tokens=tokens, block_size=block_size, seed=seed
        )
        held_out = held_out_tokens(context, tokens=12288, block_size=JUDGED)[:, :JUDGED]
        # Every third sample is for errors, the others for perplexity; all are spread over the text.
        self.held_out = held_out[::3].reshape(-1, block_size)
        self.judged = torch.cat([held_out[1::3], held_out[2::3]])

    def measure(self, name: str, variant: Variant) -> dict[str, Any]:
        """Round everything, and compare with the teacher."""
        source = self.prepared if variant.rotated else self.teacher
        if not (variant.recipe.needs_inputs or variant.correction):
            return self.measure_without_inputs(name, variant, source)
        plan = Plan(
            recipe=variant.recipe,
            correction=variant.correction,
            activations=variant.activations,
            calibration=self.calibration,
            held_out=self.held_out,
        )
        work = self.folder / "work"
        work.mkdir(exist_ok=True)
        seconds = [time.perf_counter(), time.process_time()]
        projection = SequentialProjection(source, source, plan, work)
        projection.start(None)
        seconds = [time.perf_counter() - seconds[0], time.process_time() - seconds[1]]
        student = source.embed(self.judged)
        teacher = source.embed(self.judged)
        errors = []
        first = FirstTokens()
        for number in range(source.config.layers):
            before = (time.perf_counter(), time.process_time())
            rounded, found = projection.block(number)
            seconds[0] += time.perf_counter() - before[0]
            seconds[1] += time.process_time() - before[1]
            projection.forget(number + 1)
            errors += found
            student = through(source, with_trits(source.block(number), rounded), student)
            teacher = through(source, source.block(number), teacher)
            first.add(student, teacher)
            print(f"{name}: block {number + 1}, {seconds[1]:.0f} s of processor time", flush=True)
        return {
            **distances(source, student, teacher, self.judged),
            "seconds": round(seconds[0]),
            "processor_seconds": round(seconds[1]),
            "median_held_out_error": round(
                statistics.median(error.held_out for error in errors), 4
            ),
            "first_tokens": first.found,
        }

    def measure_without_inputs(
        self, name: str, variant: Variant, source: FloatModel
    ) -> dict[str, Any]:
        """As ``measure``, of a recipe that looks at weights alone."""
        seconds = 0.0
        student = source.embed(self.judged)
        teacher = source.embed(self.judged)
        for number in range(source.config.layers):
            block = source.block(number)
            before = time.process_time()
            rounded = {
                path: project(each.weight, variant.recipe)
                for path, each in linears_of(block).items()
            }
            seconds += time.process_time() - before
            teacher = through(source, block, teacher)
            student = through(source, with_trits(block, rounded), student)
            print(f"{name}: block {number + 1}", flush=True)
        return {
            **distances(source, student, teacher, self.judged),
            "processor_seconds": round(seconds),
        }

    @torch.no_grad()
    def compare_errors(self, every: int) -> dict[str, Any]:
        """Errors of rounding alone on held-out tokens, of ``ls`` and ``gptq_cd``, of each linear of
        some blocks.
        """
        source = self.prepared
        streams = [
            [source.embed(sample[None]) for sample in part]
            for part in (self.calibration, self.held_out)
        ]
        found: dict[str, dict[str, float]] = {}
        for number in range(source.config.layers):
            block = source.block(number)
            if number % every:
                streams = [[source.through(block, x) for x in part] for part in streams]
                continue
            groups = sublayers(block, partial(source.through, block, streams[0][0]))
            linears = linears_of(block)
            known = []
            for place, part in enumerate(streams):
                sums = [InputStatistics(linears[names[0]].in_features) for names in groups]
                with watched([linears[names[0]] for names in groups]) as seen:
                    for i, x in enumerate(part):
                        streams[place][i] = source.through(block, x)
                        for each, inputs in zip(sums, seen, strict=True):
                            each.add(inputs[0], inputs[0])
                known.append(sums)
            for names, calibration, held_out in zip(groups, *known, strict=True):
                for name in names:
                    weight = linears[name].weight
                    recipes = {
                        "ls, groups of 128": Recipe(policy="ls", grouping=128),
                        "gptq_cd, a row": Recipe(),
                    }
                    found[f"blocks.{number}.{name}"] = {
                        label: round(
                            held_out.rounding_error(
                                weight, project(weight, recipe, calibration.gram)
                            ),
                            4,
                        )
                        for label, recipe in recipes.items()
                    }
            print(f"errors: block {number + 1}", flush=True)
        shares = [each["gptq_cd, a row"] / each["ls, groups of 128"] for each in found.values()]
        return {
            "median_share_of_rms": round(statistics.median(shares), 4),
            "median_share_of_squares": round(statistics.median(share**2 for share in shares), 4),
            "linears": found,
        }


class FirstTokens:
    """How large the streams of the samples' first tokens are, behind the block where the teacher's
    are largest.

    Attributes:
        found: their mean size in the teacher and in units of the median token's; of each sample the
            student's over the teacher's size.
    """

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        self._largest = 0.0

    def add(self, student_NSD: Tensor, teacher_NSD: Tensor) -> None:
        """The streams behind the next block."""
        mine, theirs = (x[:, 0].norm(dim=-1) for x in (student_NSD, teacher_NSD))
        if float(theirs.mean()) > self._largest:
            self._largest = float(theirs.mean())
            shares = (mine / theirs).tolist()
            self.found = {
                "teacher_size": round(self._largest, 1),
                "in_medians": round(self._largest / float(teacher_NSD.norm(dim=-1).median()), 1),
                "student_over_teacher": sorted(round(each, 3) for each in shares),
            }


def with_trits(block: Block, rounded: dict[str, Rounded]) -> Block:
    """The block as the student computes it: int8 activations."""
    for name, module in linears_of(block).items():
        module.weight = nn.Parameter(rounded[name].dense(), requires_grad=False)
        module.activations = "int8"  # type: ignore[assignment]
    return block


def through(model: FloatModel, block: Block, x_NSD: Tensor) -> Tensor:
    """The stream behind a block, some sequences at a time."""
    return torch.cat([model.through(block, part) for part in torch.split(x_NSD, 4)])


@torch.no_grad()
def distances(
    model: FloatModel, student_NSD: Tensor, teacher_NSD: Tensor, tokens_NS: Tensor
) -> dict[str, float]:
    """Ratio of perplexities, KL and agreement of the likeliest token."""
    loss = []
    before = []
    divergence = []
    same = []
    for x, y, ids in zip(student_NSD, teacher_NSD, tokens_NS, strict=True):
        mine, theirs = (model.logits(z[None])[0].log_softmax(dim=-1) for z in (x, y))
        loss.append(F.nll_loss(mine[:-1], ids[1:]))
        before.append(F.nll_loss(theirs[:-1], ids[1:]))
        divergence.append((theirs.exp() * (theirs - mine)).sum(dim=-1).mean())
        same.append((mine.argmax(dim=-1) == theirs.argmax(dim=-1)).double().mean())
    nll, of_teacher, kl, top = (
        float(torch.stack(each).double().mean()) for each in (loss, before, divergence, same)
    )
    return {
        "perplexity_ratio": float(f"{math.exp(nll - of_teacher):.4g}"),
        "nll": round(nll, 4),
        "teacher_nll": round(of_teacher, 4),
        "kl": round(kl, 4),
        "same_first_token": round(top, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("teacher", help="a GGUF file, a folder of transformers or a run")
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the result")
    parser.add_argument("--only", nargs="*", help="variants by name, or errors")
    parser.add_argument("--tokens", type=int, default=8192, help="of calibration")
    parser.add_argument("--block-size", type=int, default=128, help="of calibration samples")
    parser.add_argument("--every", type=int, default=1, help="errors: of every so manieth block")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        study = Study(
            arguments.teacher, Path(folder), arguments.tokens, arguments.block_size, arguments.seed
        )
        for name in arguments.only or ["errors", *VARIANTS]:
            errors = name == "errors"
            found = (
                study.compare_errors(arguments.every)
                if errors
                else study.measure(name, VARIANTS[name])
            )
            # Read only now: another process may have added its own.
            result = (
                json.loads(arguments.out.read_text())
                if arguments.out.exists()
                else {"variants": {}}
            )
            if errors:
                result["errors"] = {"every": arguments.every, **found}
            else:
                result["variants"][name] = found
            result |= {
                "teacher": Path(arguments.teacher).name,
                "calibration_tokens": study.calibration.numel(),
                "judged_tokens": study.judged.numel(),
                "block_size": arguments.block_size,
                "seed": arguments.seed,
                "threads": torch.get_num_threads(),
                "machine": machine_facts(),
            }
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")
            print(json.dumps({name: found})[:600], flush=True)


if __name__ == "__main__":
    main()
