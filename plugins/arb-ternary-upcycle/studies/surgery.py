"""Decoupled attention out of a real teacher's, nothing trained: this plugin's surgery beside other
rules.

Every variant is measured on the same held-out samples of the built-in text. What the teacher's
stream says of each block is kept in a folder, and variants that RESULT has already are not measured
again: it can be made in pieces::

    python plugins/arb-ternary-upcycle/studies/surgery.py MODEL.gguf --work FOLDER --out RESULT.json
    ... --only "geo 32" "MHA2MLA"

Rules for the planes that stay turned: those that turn fastest (``high``), slowest (``low``), evenly
spaced (``uniform``), of the largest products of norms (``norms``): Ji et al., MHA2MLA, 2025;
``joint``: this plugin's. Planes that are dropped are not turned (``C = 1``) or get this plugin's
constants (``fitted``). Fewer features: this plugin's joint and whitened SVD; ``plain``, the joint
SVD in the norm of the weights; ``independent``, one SVD of each head's queries and one of its keys.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from attrs import evolve, frozen
from torch import Tensor

from arb_ternary_bench.compare import machine_facts
from arb_ternary_text.data.shakespeare import ShakespeareConfig
from arb_ternary_text.data.shakespeare import build as shakespeare
from arb_ternary_text.models.block import Block
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_upcycle.calibration import calibration_tokens, held_out_tokens
from arb_ternary_upcycle.float_model import FloatModel
from arb_ternary_upcycle.float_model_writer import FloatModelWriter
from arb_ternary_upcycle.folding import without_preset
from arb_ternary_upcycle.surgery.blocks import Split, split_block
from arb_ternary_upcycle.surgery.factors import second_moment_root
from arb_ternary_upcycle.surgery.pairs import choose_planes, fit_constants, pair_moments
from arb_ternary_upcycle.surgery.phase import attention_inputs
from arb_ternary_upcycle.teacher import read_teacher


@frozen
class Variant:
    """What is done to queries and keys, see the module's docstring."""

    geo: int
    sem: int
    planes: str = "joint"
    constants: str = "fitted"
    features: str = "whitened"


VARIANTS = {
    "all planes": Variant(64, 1),
    "geo 32 + sem 32": Variant(32, 32),
    "geo 16 + sem 32": Variant(16, 32),
    "geo 16 + sem 16": Variant(16, 16),
    "8 of 32 planes, MHA2MLA high": Variant(16, 48, "high", "one"),
    "8 of 32 planes, MHA2MLA low": Variant(16, 48, "low", "one"),
    "8 of 32 planes, MHA2MLA uniform": Variant(16, 48, "uniform", "one"),
    "8 of 32 planes, MHA2MLA norms": Variant(16, 48, "norms", "one"),
    "8 of 32 planes, joint, C = 1": Variant(16, 48, constants="one"),
    "8 of 32 planes, joint, fitted": Variant(16, 48),
    "geo 16 + sem 32, joint SVD of weights": Variant(16, 32, features="plain"),
    "geo 16 + sem 32, independent SVDs": Variant(16, 32, features="independent"),
}


@frozen(eq=False)
class Statistics:
    """What the teacher's stream says of one block."""

    moments: Tensor
    norms: Tensor
    root: Tensor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("teacher", help="a GGUF file, a folder of transformers or a run")
    parser.add_argument("--calibration-tokens", type=int, default=2048)
    parser.add_argument("--held-out-tokens", type=int, default=1024)
    parser.add_argument("--block-size", type=int, default=256)
    parser.add_argument("--ridge", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--work",
        type=Path,
        required=True,
        help="folder for the teacher and what is known of its blocks",
    )
    parser.add_argument("--only", nargs="*", help="variants whose names contain one of these texts")
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the result")
    arguments = parser.parse_args()
    teacher, source = stored(arguments.teacher, arguments.work)
    options = {
        "tokens": arguments.calibration_tokens,
        "block_size": arguments.block_size,
        "seed": arguments.seed,
    }
    calibration = calibration_tokens(source, **options)
    held_out = held_out_tokens(
        source, tokens=arguments.held_out_tokens, block_size=arguments.block_size
    )
    settings = {
        "teacher": Path(arguments.teacher).name,
        "calibration_tokens": calibration.numel(),
        "held_out_tokens": held_out[:, 1:].numel(),
        "block_size": arguments.block_size,
        "ridge": arguments.ridge,
        "seed": arguments.seed,
        "machine": machine_facts(),
    }
    losses: dict[str, float] = {}
    if arguments.out.exists():
        earlier = json.loads(arguments.out.read_text())
        if {name: earlier.get(name) for name in settings} != settings:
            raise SystemExit(f"{arguments.out}: made with other settings; name another file")
        losses = {"teacher": earlier["teacher_nll"]} | {
            name: v["nll"] for name, v in earlier["variants"].items()
        }
    know(teacher, calibration, arguments.work)
    wanted = [
        name
        for name in VARIANTS
        if not arguments.only or any(text in name for text in arguments.only)
    ]
    for name in ("teacher", *wanted):
        if name not in losses:
            losses[name] = measure(
                teacher, VARIANTS.get(name), held_out, arguments.ridge, arguments.work
            )
            before = losses["teacher"]
            variants = {
                each: {
                    "nll": round(losses[each], 5),
                    "perplexity_ratio": round(math.exp(losses[each] - before), 4),
                }
                for each in VARIANTS
                if each in losses
            }
            text = json.dumps(
                {**settings, "teacher_nll": round(before, 5), "variants": variants}, indent=1
            )
            arguments.out.write_text(text + "\n")
            print(name, losses[name], flush=True)


class Source:
    """The built-in text with the teacher's tokenizer, as calibration reads it."""

    def __init__(self, tokenizer: Path) -> None:
        self.data = shakespeare(ShakespeareConfig(tokenizer=str(tokenizer)))


def stored(name: str, folder: Path) -> tuple[FloatModel, Source]:
    """The teacher on disk, and the text."""
    if not (folder / "teacher" / "model.json").exists():
        teacher = read_teacher(name, "float32")
        writer = FloatModelWriter(
            folder / "teacher", teacher.config, teacher.model.vocabulary_size, teacher.tokenizer
        )
        for number, tensors in teacher.blocks():
            writer.write_block(number, tensors)
        writer.write_ends(teacher.ends())
        (folder / "tokenizer.json").write_text(json.dumps(teacher.tokenizer))
        writer.finish()
    return FloatModel.open(folder / "teacher"), Source(folder / "tokenizer.json")


@torch.no_grad()
def know(teacher: FloatModel, calibration: Tensor, folder: Path) -> None:
    """What the teacher's stream says of each block, in files; those that are there stay."""
    files = [folder / f"statistics-{number:05d}.pt" for number in range(teacher.config.layers)]
    if all(file.exists() for file in files):
        return
    streams = [teacher.embed(sample[None]) for sample in calibration]
    for number, file in enumerate(files):
        if not file.exists():
            found = statistics_of(streams, teacher.weights(f"blocks.{number}."), teacher.config)
            temporary = file.with_suffix(".writing")
            torch.save([found.moments, found.norms, found.root], temporary)
            temporary.replace(file)
        block = teacher.block(number)
        streams = [teacher.through(block, x) for x in streams]
    print("statistics are there", flush=True)


@torch.no_grad()
def measure(
    teacher: FloatModel, variant: Variant | None, held_out: Tensor, ridge: float, folder: Path
) -> float:
    """Loss of a variant, None being the teacher itself, nats a token."""
    config = teacher.config
    streams = [teacher.embed(sample[None, :-1]) for sample in held_out]
    for number in range(config.layers):
        if variant is None:
            block = teacher.block(number)
            streams = [teacher.through(block, x) for x in streams]
            continue
        target = evolve(
            without_preset(config),
            attention="decoupled",
            sem_dim=variant.sem,
            geo_dim=variant.geo,
            rotary_dim=config.value_features,
        )
        changed = Block(target).eval()
        statistics = Statistics(
            *torch.load(folder / f"statistics-{number:05d}.pt", weights_only=True)
        )
        made = block_of(
            variant, teacher.weights(f"blocks.{number}."), config, target, statistics, ridge
        )
        changed.load_state_dict(
            {key: made[key.removesuffix(".weight")] for key in changed.state_dict()}
        )
        streams = [run(target, changed, x) for x in streams]
    return loss_of(teacher, streams, held_out)


def run(config: DecoderConfig, block: Block, x_1SD: Tensor) -> Tensor:
    """The stream after a block of another kind than the teacher's."""
    from arb_ternary_text.models.attention import make_positions

    y_1SD: Tensor = block(
        x_1SD, make_positions(config, x_1SD, start=0, total=x_1SD.size(1), window=None)
    )
    return y_1SD


def loss_of(teacher: FloatModel, streams: list[Tensor], held_out: Tensor) -> float:
    """The loss of streams after the last block."""
    losses = [
        F.cross_entropy(teacher.logits(x)[0], s[1:]) for x, s in zip(streams, held_out, strict=True)
    ]
    return float(torch.stack(losses).double().mean())


def statistics_of(
    streams: list[Tensor], tensors: Mapping[str, Tensor], config: DecoderConfig
) -> Statistics:
    """Moments of pairs, products of norms, and the second moment of the inputs."""
    normed_NSD = attention_inputs(streams, tensors, config)
    query, key = (F.linear(normed_NSD, tensors[f"attention.{name}"]) for name in ("query", "key"))

    def length(x_NSE: Tensor, heads: int) -> Tensor:
        parts = x_NSE.view(-1, heads, 2, config.value_features // 2)
        return parts.square().sum(dim=2).sqrt().mean(dim=0)

    of_query = (
        length(query, config.heads)
        .view(config.key_heads, -1, config.value_features // 2)
        .sum(dim=1)
    )
    norms_GP = of_query * length(key, config.key_heads)
    return Statistics(
        pair_moments(query, key, config), norms_GP, second_moment_root(normed_NSD.flatten(0, 1))
    )


def block_of(
    variant: Variant,
    tensors: Mapping[str, Tensor],
    config: DecoderConfig,
    target: DecoderConfig,
    statistics: Statistics,
    ridge: float,
) -> dict[str, Tensor]:
    """The tensors of one block of a variant."""
    groups = config.key_heads
    planes = config.value_features // 2
    count = variant.geo // 2
    rules: dict[str, Callable[[], Tensor]] = {
        "joint": lambda: choose_planes(statistics.moments, groups, count, ridge),
        "norms": lambda: statistics.norms.topk(count, dim=-1).indices.sort(dim=-1).values,
        "high": lambda: torch.arange(count).repeat(groups, 1),
        "low": lambda: torch.arange(planes - count, planes).repeat(groups, 1),
        "uniform": lambda: torch.arange(0, planes, planes // count).repeat(groups, 1),
    }
    kept = rules[variant.planes]()
    constants = torch.ones(config.heads, planes, dtype=torch.complex128)
    if variant.constants == "fitted":
        constants = fit_constants(statistics.moments, kept, ridge)
    root = (
        torch.eye(config.width, dtype=torch.float64)
        if variant.features == "plain"
        else statistics.root
    )
    made = split_block(
        tensors,
        config,
        target,
        Split(kept, constants, root),
        torch.zeros(variant.sem, config.width),
    )
    if variant.features == "independent":
        made |= independent(tensors, config, kept, variant.sem)
    return made


def independent(
    tensors: Mapping[str, Tensor], config: DecoderConfig, kept: Tensor, rank: int
) -> dict[str, Tensor]:
    """Semantic parts by a truncated SVD of each head's queries, and one of its keys, each in a
    basis of its own.
    """
    head_dim = config.value_features
    planes = torch.arange(config.value_features // 2)
    found: dict[str, list[Tensor]] = {"query": [], "key": []}
    for name, heads in (("query", config.heads), ("key", config.key_heads)):
        for head, rows in enumerate(tensors[f"attention.{name}"].view(heads, head_dim, -1)):
            dropped = planes[~torch.isin(planes, kept[head * config.key_heads // heads])]
            _, values, right = torch.linalg.svd(
                rows[torch.cat((dropped, dropped + head_dim // 2))].double()
            )
            found[name].append((values[:rank, None] * right[:rank]).float())
    scale = math.sqrt(rank / head_dim)
    return {
        "attention.query_semantic": torch.cat(found["query"]) * scale,
        "attention.key_semantic": torch.cat(found["key"]),
    }


if __name__ == "__main__":
    main()
