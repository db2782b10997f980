"""Starter configs: a few settings written out, every other option there as a comment with its default and its help."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, get_args

import attrs

from arb_ternary.config.describe import is_choice, is_sequence
from arb_ternary.config.fields import ConfigField, config_fields
from arb_ternary.config.structure import options_class
from arb_ternary.config.yaml_document import dump_inline
from arb_ternary.specs import DocumentSpec, StarterSpec, load_target

if TYPE_CHECKING:
    from arb_ternary.plugins.registry import Registry

__all__ = ["starter_config"]

#: Column of the help texts.
_COLUMN = 36
#: Columns that a line should keep to.
_WIDTH = 112


def starter_config(starter: StarterSpec, document: DocumentSpec, registry: Registry) -> str:
    """The text of a config file of the kind ``document``, with the settings of ``starter`` written out."""
    cls = load_target(f"document '{document.name}':", document.config)
    settings = load_target(f"starter '{starter.name}':", starter.target)
    lines = [
        f"# {starter.summary}",
        "#",
        "# Lines that begin with `# key:` are options at their defaults; uncomment one to change it.",
        f"# Check this file with `arb config validate`, run it with `{document.command}`.",
        "",
        *_Writer(registry).mapping(cls, settings, ""),
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
                default = "" if field.default is attrs.NOTHING else f" {dump_inline(field.default)}"
                yield from _lines(f"{indent}# {field.key}:{default}", field.help)

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
