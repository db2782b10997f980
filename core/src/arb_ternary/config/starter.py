"""Starter configs: a few settings written out, every other option there as a comment with its default and its help."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, Final, get_args

import attrs
from attrs import frozen

from arb_ternary.config.describe import is_choice, is_sequence
from arb_ternary.config.fields import ConfigField, config_fields
from arb_ternary.config.plain import to_plain
from arb_ternary.config.structure import Registry, options_class
from arb_ternary.config.yaml_document import dump_inline
from arb_ternary.errors import UsageProblem, nearest
from arb_ternary_train.config import RunConfig

__all__ = ["TEMPLATES", "Template", "starter_config"]

#: Column of the help texts.
_COLUMN = 36
#: Columns that a line should keep to.
_WIDTH = 112


@frozen
class Template:
    """What a starter config is for, and the settings that it writes out."""

    summary: str
    settings: Mapping[str, Any]


def _decoder(**changes: Any) -> dict[str, Any]:
    return {"name": "decoder", "width": 128, "layers": 4, "heads": 4, "max_length": 128, **changes}


def _standard(**changes: Any) -> dict[str, Any]:
    return {"name": "standard", "steps": 1000, "batch_size": 16, "block_size": 128, "warmup_steps": 100, **changes}


_ALL_FLOAT: Final = ["embedding", "head", "norms", "linears"]

TEMPLATES: Final[Mapping[str, Template]] = {
    "small": Template(
        "A small pure-ternary decoder on Shakespeare: minutes on a laptop's CPU.",
        {
            "name": "small",
            "data": {"name": "shakespeare"},
            "model": _decoder(),
            "optimizer": {"name": "scaled_votes"},
            "phases": [_standard()],
            "checks": ["pure"],
        },
    ),
    "mixed": Template(
        "Ternary linears with float embedding, norms and head: votes for the former, AdamW for the latter.",
        {
            "name": "mixed",
            "data": {"name": "shakespeare"},
            "model": _decoder(float_parts=["embedding", "head", "norms"]),
            "optimizer": {"name": "split", "ternary": {"name": "scaled_votes"}, "float": {"name": "adamw", "lr": 4e-3}},
            "phases": [_standard()],
        },
    ),
    "exact": Template(
        "A small pure-ternary decoder whose ternary products are integers: the same bits on every backend.",
        {
            "name": "exact",
            "exact": True,
            "data": {"name": "shakespeare"},
            "model": _decoder(),
            "optimizer": {"name": "scaled_votes"},
            "phases": [_standard()],
            "checks": ["pure"],
        },
    ),
    "float": Template(
        "The same architecture in float32, trained by AdamW: the baseline to compare with.",
        {
            "name": "float",
            "data": {"name": "shakespeare"},
            "model": _decoder(activations="float", float_parts=_ALL_FLOAT),
            "optimizer": {"name": "adamw", "lr": 2e-3},
            "phases": [_standard()],
        },
    ),
}


def starter_config(template: str, registry: Registry) -> str:
    """The text of a starter config.

    Raises:
        UsageProblem: there is no such template.
    """
    found = TEMPLATES.get(template)
    if found is None:
        close = nearest(template, TEMPLATES)
        raise UsageProblem(
            f"no template is called '{template}'" + (f"; did you mean '{close}'?" if close else ""),
            hint="\n".join(f"{name}: {each.summary}" for name, each in TEMPLATES.items()),
        )
    lines = [
        f"# {found.summary}",
        "#",
        "# Lines that begin with `# key:` are options at their defaults; uncomment one to change it.",
        "# Check this file with `arb config validate`, run it with `arb train`.",
        "",
        *_Writer(registry).mapping(RunConfig, found.settings, ""),
    ]
    return "\n".join(lines) + "\n"


class _Writer:
    """Writes config classes as YAML with comments."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry

    def mapping(self, cls: type[Any] | None, settings: Mapping[str, Any], indent: str) -> Iterator[str]:
        for field in config_fields(cls) if cls is not None else ():
            if field.key in settings:
                yield from self.entry(field, settings[field.key], indent)
            else:
                default = field.default_choice or to_plain(field.default_for(None))
                yield from _lines(f"{indent}# {field.key}: {dump_inline(default)}", field.help)

    def entry(self, field: ConfigField, value: Any, indent: str) -> Iterator[str]:
        if is_choice(field.type):
            yield from _lines(f"{indent}{field.key}:", field.help)
            yield from self.component(field.type.kind, value, f"{indent}  ")
        elif is_sequence(field.type) and is_choice(get_args(field.type)[0]) and value:
            yield from _lines(f"{indent}{field.key}:", field.help)
            for item in value:
                first, *rest = self.component(get_args(field.type)[0].kind, item, f"{indent}    ")
                yield f"{indent}  - {first.lstrip()}"
                yield from rest
        elif attrs.has(field.type):
            yield from _lines(f"{indent}{field.key}:", field.help)
            yield from self.mapping(field.type, value, f"{indent}  ")
        else:
            yield from _lines(f"{indent}{field.key}: {dump_inline(value)}", field.help)

    def component(self, kind: str, value: Any, indent: str) -> Iterator[str]:
        settings = {"name": value} if isinstance(value, str) else value
        spec = self.registry.get(kind, settings["name"]).spec
        yield from _lines(f"{indent}name: {spec.name}", spec.summary)
        yield from self.mapping(options_class(spec), settings, indent)


def _lines(text: str, help_text: str) -> Iterator[str]:
    """A setting and its help beside it, continued below when it is long."""
    if not help_text:
        yield text
        return
    first, *rest = textwrap.wrap(help_text, _WIDTH - _COLUMN, break_long_words=False, break_on_hyphens=False)
    yield f"{text.ljust(_COLUMN)}  # {first}"
    yield from (f"{' ' * _COLUMN}  # {more}" for more in rest)
