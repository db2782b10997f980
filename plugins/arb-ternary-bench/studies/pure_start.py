"""Where a short run of a pure model loses to one whose embedding and head are float: 1,000 steps of
1,024 tokens.

    python plugins/arb-ternary-bench/studies/pure_start.py --work DIR --out RESULT.json

Texts are the built-in one, the topics of Python's own ``help()`` and the source of Python's
standard library (both under the PSF licence, and on every machine with Python). ``--measure-on
choice`` takes losses on a part of the training text that is held aside, to choose settings by;
``validation`` on text that nothing else reads. A run whose result is in ``--work`` already is not
repeated, and every finished run is written at once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any, Final

from arb_ternary_bench.child import ChildRun
from arb_ternary_bench.compare import machine_facts
from arb_ternary_bench.result_file import read_result, write_result
from arb_ternary_bench.texts import divide_text, help_topics, library_source

BASE: Final = Path(__file__).with_name("pure_start.yaml")
#: Bytes of a text that is made here, at most.
LONGEST: Final = 4_000_000
#: Scaled votes of which those of embedding and head differ.
PARTED: Final = f"plugins=[{json.dumps(str(BASE.with_name('pure_start_votes.py')))}]"


def parted(**options: Any) -> tuple[str, ...]:
    """The overrides that give a run such votes."""
    return (PARTED, f"optimizer={json.dumps({'name': 'parted_votes', 'lr': 0.1, **options})}")


#: A decoder whose embedding and head are sums of ternary planes.
PLANES: Final = "plugins=" + json.dumps(
    [str(BASE.with_name(f"pure_start_{each}.py")) for each in ("votes", "planes")]
)


def planes(rates: dict[str, float] | None = None, **model: Any) -> tuple[str, ...]:
    """The overrides that give a run such a model, logits times 1."""
    votes: dict[str, Any] = {"name": "digit_votes", "lr": 0.1}
    votes |= {key: model.pop(key) for key in ("head_clip", "head_mean") if key in model}
    settings = {"name": "planes", "logit_scale": 0, **model}
    changes = [f"model.{key}={json.dumps(value)}" for key, value in settings.items()]
    factors = [f"phases.0.rate_factors={json.dumps(rates)}"] if rates else []
    return (PLANES, f"optimizer={json.dumps(votes)}", *changes, *factors)


_FLOAT: Final = {"name": "adamw", "lr": 0.006}


def rest(**model: Any) -> tuple[str, ...]:
    """The overrides of a run whose embedding and head are float, so that what is left are the
    linears.
    """
    ternary = {"name": "scaled_votes", "lr": 0.15}
    settings = {"name": "planes", "float_parts": ["embedding", "head"], "logit_scale": 0, **model}
    settings["embedding_scale_rule"] = "residual"
    changes = [f"model.{key}={json.dumps(value)}" for key, value in settings.items()]
    return (
        PLANES,
        f"optimizer={json.dumps({'name': 'split', 'ternary': ternary, 'float': _FLOAT})}",
        *changes,
    )


#: What is changed in the config.
VARIANTS: Final[dict[str, tuple[str, ...]]] = {
    "pure": (),
    "pure_zero_head": ("model.zero_head=true",),
    "float_head": (
        'model.float_parts=["head"]',
        "model.logit_scale=0",
        'optimizer={"name":"split","ternary":{"name":"scaled_votes","lr":0.1},"float":{"name":"adamw","lr":0.006}}',
    ),
    "float_embedding": (
        'model.float_parts=["embedding"]',
        "model.embedding_scale_rule=residual",
        'optimizer={"name":"split","ternary":{"name":"scaled_votes","lr":0.1},"float":{"name":"adamw","lr":0.006}}',
    ),
    "float_embedding_and_head": (
        'model.float_parts=["embedding","head"]',
        "model.embedding_scale_rule=residual",
        "model.logit_scale=0",
        'optimizer={"name":"split","ternary":{"name":"scaled_votes","lr":0.15},"float":{"name":"adamw","lr":0.006}}',
    ),
    "float_head_rate_0.15": (
        'model.float_parts=["head"]',
        "model.logit_scale=0",
        'optimizer={"name":"split","ternary":{"name":"scaled_votes","lr":0.15},"float":{"name":"adamw","lr":0.006}}',
    ),
    "vectors": (
        'model.float_parts=["norms"]',
        "model.inner_gains=true",
        "model.row_scales=true",
        "model.logit_scale=0",
        'optimizer={"name":"split","ternary":{"name":"scaled_votes","lr":0.1},"float":{"name":"adamw","lr":0.006}}',
    ),
    **{
        f"trit_vectors{name}": (
            "model.learned_norms=true",
            "model.inner_gains=true",
            "model.row_scales=true",
            "model.vector_trits=8",
            "model.logit_scale=0",
            *more,
        )
        for name, more in {
            "": (),
            "_16_faster": (
                'phases.0.rate_factors={"*row_trits":2,"*gains":2}',
                "model.vector_trits=16",
            ),
        }.items()
    },
    "rate_0.15": ("optimizer.lr=0.15",),
    **{
        f"head_{times:g}": (f'phases.0.rate_factors={{"head":{times}}}',)
        for times in (0.25, 0.5, 2.0, 4.0, 8.0)
    },
    **{
        f"embedding_{times:g}": (f'phases.0.rate_factors={{"embedding":{times}}}',)
        for times in (0.25, 0.5, 2.0, 4.0)
    },
    "logits_1": ("model.logit_scale=0",),
    "logits_4": ("model.logit_scale=2",),
    "logits_1_spread": ("model.logit_scale=0", "optimizer.spread=true"),
    "logits_1_spread_rate_0.07": (
        "model.logit_scale=0",
        "optimizer.spread=true",
        "optimizer.lr=0.07",
    ),
    **{f"head_clip_{clip:g}": parted(head_clip=clip) for clip in (1.5, 5.0, 10.0)},
    "head_mean": parted(head_mean="arithmetic"),
    "head_mean_clip_5": parted(head_mean="arithmetic", head_clip=5.0),
    "head_mean_clip_10": parted(head_mean="arithmetic", head_clip=10.0),
    "logits_0.5": ("model.logit_scale=-1",),
    "logits_1_head_2": ("model.logit_scale=0", 'phases.0.rate_factors={"head":2.0}'),
    "logits_1_head_4": ("model.logit_scale=0", 'phases.0.rate_factors={"head":4.0}'),
    "logits_1_head_mean_clip_10": (
        "model.logit_scale=0",
        *parted(head_mean="arithmetic", head_clip=10.0),
    ),
    "logits_1_head_clip_10": ("model.logit_scale=0", *parted(head_clip=10.0)),
    "logits_1_head_mean_clip_30": (
        "model.logit_scale=0",
        *parted(head_mean="arithmetic", head_clip=30.0),
    ),
    "logits_1_outward_0.2": ("model.logit_scale=0", *parted(outward=0.2)),
    "logits_1_outward_0.2_mean_clip_10": (
        "model.logit_scale=0",
        *parted(outward=0.2, head_mean="arithmetic", head_clip=10.0),
    ),
    "logits_1_dense_0.9": ("model.logit_scale=0", *parted(dense=0.9)),
    "logits_1_head_exponents": (
        "model.logit_scale=0",
        "model.scale_rule=residual",
        *parted(head_exponents=True),
    ),
    "logits_1_zero_head": ("model.logit_scale=0", "model.zero_head=true"),
    "planes_2_dither": planes(head_offsets=[0, -1], dither=True),
    "planes_2_dither_mean_clip_10": planes(
        head_offsets=[0, -1], dither=True, head_mean="arithmetic", head_clip=10.0
    ),
    "digits_2": planes({"head": 2.0}, head_offsets=[0, -1], digits=True),
    "digits_3": planes({"head": 2.0}, head_offsets=[1, 0, -1], digits=True),
    "head_bias": planes(head_bias=True),
    "rest": rest(),
    "rest_sparse": rest(linears_density=0.35),
    "rest_160x2": rest(width=160, layers=2, feed_forward=320),
    "rest_112x4": rest(width=112, layers=4, feed_forward=224),
    "rest_tied": rest(tie_embeddings=True),
    "rest_logits_2": rest(logit_scale=1),
    "rest_float": (
        'model.float_parts=["embedding","head","linears"]',
        "model.embedding_scale_rule=residual",
        "model.scale_rule=residual",
        "model.group_size=128",
        "model.logit_scale=0",
        'optimizer={"name":"adamw","lr":0.006}',
    ),
    "head_exponents": ("model.scale_rule=residual", *parted(head_exponents=True)),
}
TEXTS: Final = ("shakespeare", "topics", "library")


def _content(name: str) -> str:
    if name == "topics":
        return help_topics()
    return library_source(LONGEST)


def data_of(name: str, measured_on: str, folder: Path) -> dict[str, Any]:
    """The section ``data`` of a config: a text to train on and one to measure on."""
    if name == "shakespeare":
        return {"name": name, "tokenizer": "bytes", "tuning": measured_on == "choice"}
    files = divide_text(_content(name), folder, f"{name}-")
    paths = {"path": str(files["train"]), "validation": str(files[measured_on])}
    return {"name": "text", "tokenizer": "bytes", **paths}


def run(
    work: Path, text: str, variant: str, seed: int, steps: int, measured_on: str
) -> dict[str, Any]:
    """Losses of one run, which is made where it is not there yet: on the text measured on, and of
    some first steps.
    """
    directory = work / f"{text}-{measured_on}-{variant}-{seed}-{steps}"
    if not (directory / "result.json").exists():
        data = json.dumps(data_of(text, measured_on, work))
        shape = {"steps": steps, "eval_every": steps, "log_every": 10}
        overrides = [f"data={data}", f"seed={seed}", "threads=1"]
        overrides += [f"phases.0.{key}={value}" for key, value in shape.items()]
        child = ChildRun.start(BASE, directory, [*overrides, *VARIANTS[variant]], threads=1)
        if ended := child.wait().code:
            sys.exit(f"{directory}: the run ended with {ended}\n{child.log_tail()}")
    report = json.loads((directory / "result.json").read_text(encoding="utf-8"))
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = {
        each["step"]: each["loss"] for each in map(json.loads, lines) if each["event"] == "train"
    }
    return {
        "loss": report["validation_loss"],
        "state_bits_per_parameter": report["audit"]["state_bits_per_parameter"],
        "first_training_loss": losses[1],
        "training_losses": {
            step: statistics.fmean(losses[each] for each in range(step - 49, step + 1))
            for step in range(50, steps + 1, 50)
        },
    }


def table(runs: dict[str, dict[str, Any]]) -> str:
    """Mean and standard deviation over seeds, a line a text and a variant."""
    lines = ["| text | embedding and head | loss | seeds |", "|---|---|---:|---:|"]
    groups: dict[tuple[str, str], list[float]] = {}
    for found in runs.values():
        groups.setdefault((found["text"], found["variant"]), []).append(found["loss"])
    for (text, variant), losses in groups.items():
        spread = f" ± {statistics.stdev(losses):.4f}" if len(losses) > 1 else ""
        lines.append(
            f"| {text} | {variant} | {statistics.fmean(losses):.4f}{spread} | {len(losses)} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run what is missing, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--out", type=Path, required=True, help="the result, JSON")
    parser.add_argument("--steps", type=int, default=1000, help="of a run (default: %(default)s)")
    parser.add_argument("--texts", default=",".join(TEXTS), help="which (default: %(default)s)")
    parser.add_argument(
        "--variants", default=",".join(VARIANTS), help="which (default: %(default)s)"
    )
    parser.add_argument("--seeds", type=int, default=3, help="how many (default: %(default)s)")
    parser.add_argument("--measure-on", choices=("choice", "validation"), default="validation")
    arguments = parser.parse_args()
    work: Path = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    result = read_result(arguments.out, {"machine": machine_facts(), "runs": {}})
    for seed in range(arguments.seeds):
        for text in arguments.texts.split(","):
            for variant in arguments.variants.split(","):
                name = (
                    f"{text}, {arguments.measure_on}, {variant}, seed {seed}, {arguments.steps} "
                    "steps"
                )
                if name not in result["runs"]:
                    found = run(work, text, variant, seed, arguments.steps, arguments.measure_on)
                    facts = {
                        "text": text,
                        "variant": variant,
                        "seed": seed,
                        "steps": arguments.steps,
                    }
                    result["runs"][name] = {**facts, "measured_on": arguments.measure_on, **found}
                    write_result(arguments.out, result)
    chosen = {
        name: found
        for name, found in result["runs"].items()
        if (found["measured_on"], found["steps"]) == (arguments.measure_on, arguments.steps)
    }
    print(table(chosen))


if __name__ == "__main__":
    main()
