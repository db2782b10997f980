"""Make the page of models and formats, by writing a small model of each kind in each format."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import attrs
import torch
from torch import nn

from render import prose, table

#: Options of models that need some.
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "bitnet_of": {"model": {"name": "vit", "float_parts": ["linears"]}}
}
#: Options of models that have them, so that the page is made in seconds.
SMALL: Mapping[str, Any] = {"width": 64, "layers": 1, "heads": 2}
VOCABULARY = 256
INTRODUCTION = """\
# Models and formats

A small model of each kind was written in each format of `arb export` and read again when this page
was made.

| in the table | what came back |
|---|---|
| every bit | the whole state: trits, exponents, accumulators, float parts |
| weights | each ternary matrix, with its exponents; vectors may have become floats |
| written | nothing here reads the file, or the model has no ternary matrix to compare with |
| no | it was refused; the second table says why |
"""


def formats_page(models: list[Any], exporters: list[Any], importers: list[Any]) -> str:
    """Return the page.

    Args:
        models: the registered models.
        exporters: the registered exporters.
        importers: the registered importers.
    """
    rows = []
    reasons: dict[tuple[str, str], list[str]] = {}
    for name, options in variants(models):
        architecture = options.get("architecture")
        model = f"`{name}`" if architecture is None else f"`{name}`, `{architecture}`"
        cells = []
        for exporter in exporters:
            cell, reason = outcome(name, options, exporter.spec)
            cells.append(cell)
            if reason:
                reasons.setdefault((f"`{exporter.name}`", reason), []).append(model)
        rows.append((model, *cells))
    refused = [(*key, "; ".join(found)) for key, found in sorted(reasons.items())]
    read = [(f"`{each.name}`", prose(each.spec.summary)) for each in importers]
    return "\n\n".join(
        [
            INTRODUCTION,
            "A preset of the option `architecture` stands after the name.",
            table(("model", *(f"`{each.name}`" for each in exporters)), rows),
            "## Why not",
            table(("format", "reason", "models"), refused),
            "## What `arb import` reads",
            table(("format", "what it reads"), read),
        ]
    )


def variants(models: list[Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and options of each model, once for each architecture that it knows."""
    from arb_ternary.config.structure import options_class

    for model in models:
        fields = attrs.fields_dict(attrs.resolve_types(options_class(model.spec)))
        small = {key: value for key, value in SMALL.items() if key in fields}
        given = {**small, **OPTIONS.get(model.name, {})}
        yield model.name, given
        if "architecture" in fields:
            literal, _ = get_args(fields["architecture"].type)
            for architecture in get_args(literal):
                yield model.name, {**given, "architecture": architecture}


def outcome(name: str, options: Mapping[str, Any], spec: Any) -> tuple[str, str]:
    """Return what becomes of a model in a format, and why it is refused; empty if it is not."""
    from arb_ternary.config.fields import to_plain
    from arb_ternary.errors import ArbError, UsageProblem
    from arb_ternary_interchange.components import named_exporter
    from arb_ternary_testing.component import make_choice
    from arb_ternary_train.model_source import open_model

    torch.manual_seed(0)
    choice = make_choice("model", name, options)
    model = choice.build(VOCABULARY)
    disturb(model)
    metadata = {
        "name": "model",
        "step": 0,
        "model": to_plain(choice, given=False),
        "vocabulary_size": VOCABULARY,
        "tokenizer": {"kind": "bytes"},
        "versions": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"model{spec.suffix}"
        try:
            named_exporter(spec.name).export(model, path, metadata)
        except ArbError as error:
            return "no", prose(error.what.removeprefix("model: "))
        try:
            back = open_model(path, device="cpu", accumulators=True).module
        except UsageProblem:
            return "written", ""
    return compared(model, back), ""


def disturb(model: nn.Module) -> None:
    """Change float parameters and accumulators, which are alike in every new model."""
    from arb_ternary.ternary.models import ternary_modules

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.rand_like(parameter))
    for _, module in ternary_modules(model):
        module.set_votes(torch.randint(-1, 2, module.trits().shape, dtype=torch.int8))


def compared(model: nn.Module, back: nn.Module) -> str:
    """Return what of a model is the same in the one that was read."""
    from arb_ternary.ternary.models import ternary_modules

    state = model.state_dict()
    found = back.state_dict()
    if state.keys() == found.keys() and all(torch.equal(state[key], found[key]) for key in state):
        return "every bit"
    mine = {name: each for name, each in ternary_modules(model) if each.trits().ndim == 2}
    theirs = dict(ternary_modules(back))
    if not mine:
        return "written"
    for name, module in mine.items():
        if not torch.equal(module.dense_weight(), theirs[name].dense_weight()):
            raise AssertionError(f"{name} is not what was written")
    return "weights"
