"""Does another basis keep what a real teacher computes? Logits and losses before and after, in
float32 and bfloat16::

    OMP_NUM_THREADS=1 python plugins/arb-ternary-upcycle/studies/fold_rotate.py \\
        MODEL.gguf --out RESULT.json

Prints the largest and the mean difference of a logit, and the losses on held-out samples of the
built-in text.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from arb_ternary_bench.compare import machine_facts
from arb_ternary_text.data.shakespeare import ShakespeareConfig
from arb_ternary_text.data.shakespeare import build as shakespeare
from arb_ternary_train.seeding import derived_generator
from arb_ternary_upcycle.calibration import held_out_tokens
from arb_ternary_upcycle.float_model import FloatModel
from arb_ternary_upcycle.float_model_writer import FloatModelWriter
from arb_ternary_upcycle.folding import Basis, untied
from arb_ternary_upcycle.rotation import random_rotation
from arb_ternary_upcycle.stage_options import FloatDtype
from arb_ternary_upcycle.teacher import PretrainedModel, read_teacher


class Source:
    """The built-in text with the teacher's tokenizer."""

    def __init__(self, tokenizer: Path) -> None:
        self.data = shakespeare(ShakespeareConfig(tokenizer=str(tokenizer)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("teacher", help="a GGUF file, a folder of transformers or a run")
    parser.add_argument("--held-out-tokens", type=int, default=512)
    parser.add_argument("--block-size", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    arguments = parser.parse_args()
    teacher = read_teacher(arguments.teacher, "float32")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tokenizer.json").write_text(json.dumps(teacher.tokenizer))
        tokens = held_out_tokens(
            Source(folder / "tokenizer.json"),
            tokens=arguments.held_out_tokens,
            block_size=arguments.block_size,
        )
        models = {"teacher": written(folder / "teacher", teacher, None, "float32")}
        basis = Basis(
            teacher.config,
            fold=True,
            residual=random_rotation(
                teacher.config.width, derived_generator(arguments.seed, "residual")
            ),
            seed=arguments.seed,
        )
        for dtype in ("float32", "bfloat16"):
            models[f"prepared, {dtype}"] = written(folder / dtype, teacher, basis, dtype)
        models["teacher, bfloat16"] = written(folder / "rounded", teacher, None, "bfloat16")
        found = {each: list(logits_of(model, tokens)) for each, model in models.items()}
        # What float32 itself does to logits, beside which a difference is to be seen.
        exact = {
            each: list(logits_of(models[each], tokens, torch.float64))
            for each in ("teacher", "prepared, float32")
        }
    result = {
        "teacher": Path(arguments.teacher).name,
        "held_out_tokens": tokens[:, 1:].numel(),
        "seed": arguments.seed,
        "machine": machine_facts(),
        "models": {
            name: compared(found["teacher"], logits, tokens) for name, logits in found.items()
        },
        "computed_in_float64": {
            name: compared(exact["teacher"], logits, tokens) for name, logits in exact.items()
        },
        "teacher_in_float32_against_float64": compared(exact["teacher"], found["teacher"], tokens),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")


def written(
    folder: Path, teacher: PretrainedModel, basis: Basis | None, dtype: FloatDtype
) -> FloatModel:
    """The teacher on disk, in ``basis`` (None: in its own)."""
    config = teacher.config if basis is None else untied(teacher.config)
    writer = FloatModelWriter(
        folder, config, teacher.model.vocabulary_size, teacher.tokenizer, dtype
    )
    for number, tensors in teacher.blocks():
        writer.write_block(number, tensors if basis is None else basis.block(number, tensors))
    writer.write_ends(teacher.ends() if basis is None else basis.ends(teacher.ends()))
    return writer.finish()


@torch.no_grad()
def logits_of(
    model: FloatModel, tokens_NS: Tensor, dtype: torch.dtype = torch.float32
) -> Iterator[Tensor]:
    """Logits of each sample, ``[S, V]``, computed in ``dtype``."""
    streams = [model.embed(sample[None, :-1]).to(dtype) for sample in tokens_NS]
    for number in range(model.config.layers):
        block = model.block(number).to(dtype)
        streams = [model.through(block, x_1SD) for x_1SD in streams]
    head = model.head(streams[0].device).to(dtype)
    return (F.linear(model.normed(x_1SD), head)[0] for x_1SD in streams)


def compared(before: list[Tensor], after: list[Tensor], tokens_NS: Tensor) -> dict[str, float]:
    """How far logits are apart, and the loss."""
    apart = [(one - other).abs() for one, other in zip(before, after, strict=True)]
    losses = [
        F.cross_entropy(each, sample[1:]) for each, sample in zip(after, tokens_NS, strict=True)
    ]
    return {
        "largest_difference": float(torch.stack([each.max() for each in apart]).max()),
        "mean_difference": float(torch.stack([each.mean() for each in apart]).mean()),
        "largest_logit": float(torch.stack([each.abs().max() for each in after]).max()),
        "nll": round(float(torch.stack(losses).double().mean()), 5),
    }


if __name__ == "__main__":
    main()
