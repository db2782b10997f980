"""The text of a starter config: its settings, and all other options as comments if asked for."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, get_args

import attrs
from attrs import frozen

from arb_ternary.config.fields import config_fields, default_of, shape_of
from arb_ternary.config.options import HELP
from arb_ternary.config.structure import options_class
from arb_ternary.config.yaml_document import dump_inline
from arb_ternary.specs import DocumentSpec, StarterSpec, load_target

if TYPE_CHECKING:
    from arb_ternary.plugins.registry import Registry

#: Column of the help texts.
_COLUMN = 36
#: Column of the end of the lines.
_WIDTH = 112


def starter_config(
    starter: StarterSpec, document: DocumentSpec, registry: Registry, *, full: bool = False
) -> str:
    """Return the text of a config file of the kind ``document``.

    The settings of ``starter`` are written out, each with a line of help. With ``full``, the help
    is complete, and every other option is a comment with its default and its help.
    """
    cls = load_target(f"document '{document.name}':", document.config)
    settings = load_target(f"starter '{starter.name}':", starter.target)
    others = "# There are more options, at their defaults: `arb config new --full` explains them."
    if full:
        others = (
            "# Lines that begin with `# key:` are options at their defaults; uncomment one to "
            "change it."
        )
    lines = [
        f"# {starter.summary}",
        "#",
        others,
        f"# Check this file with `arb config validate`, run it with `{document.command}`.",
        "",
        *_Writer(registry, full).mapping(cls, settings),
    ]
    return "\n".join(lines) + "\n"


@frozen
class _Writer:
    """Writes the lines of options.

    Attributes:
        registry: where components come from.
        full: whether options that are not set are comments, and help is as long as it is.
    """

    registry: Registry
    full: bool

    def mapping(
        self, cls: type[Any] | None, settings: Mapping[str, Any], indent: str = ""
    ) -> Iterator[str]:
        """Yield the lines of the options of ``cls``."""
        for field in config_fields(cls) if cls is not None else ():
            key = str(field.alias)
            help_text = field.metadata.get(HELP, "")
            if key in settings:
                yield from self._setting(f"{indent}{key}:", field.type, settings[key], help_text)
            elif self.full:
                default = default_of(field)
                shown = "" if default is attrs.NOTHING else f" {dump_inline(default)}"
                yield from self._with_help(f"{indent}# {key}:{shown}", help_text)

    def _setting(self, text: str, t: Any, value: Any, help_text: str) -> Iterator[str]:
        """Yield the lines of a setting of the type ``t``; ``text`` is its indented key."""
        indent = " " * (len(text) - len(text.lstrip()))
        shape = shape_of(t)
        item = get_args(t)[0] if shape == "list" else None
        if shape == "choice":
            yield from self._with_help(text, help_text)
            yield from self._component(t, value, f"{indent}  ")
        elif shape == "class":
            yield from self._with_help(text, help_text)
            yield from self.mapping(t, value, f"{indent}  ")
        elif value and shape_of(item) == "choice":
            yield from self._with_help(text, help_text)
            for each in value:
                first, *rest = self._component(item, each, f"{indent}    ")
                yield f"{indent}  - {first.lstrip()}"
                yield from rest
        else:
            yield from self._with_help(f"{text} {dump_inline(value)}", help_text)

    def _component(self, t: Any, value: Any, indent: str) -> Iterator[str]:
        """Yield the lines of a component, given by its name or by a mapping."""
        settings = {"name": value} if isinstance(value, str) else value
        spec = self.registry.get(t.kind, settings["name"]).spec
        yield from self._with_help(f"{indent}name: {spec.name}", spec.summary)
        yield from self.mapping(options_class(spec), settings, indent)

    def _with_help(self, text: str, help_text: str) -> Iterator[str]:
        """Yield ``text`` with its help at the help column, continued below if it is long."""
        width = _WIDTH - _COLUMN
        if not self.full:
            help_text = textwrap.shorten(help_text.partition(";")[0], width, placeholder=" ...")
        if not help_text:
            yield text
            return
        first, *rest = textwrap.wrap(
            help_text, width, break_long_words=False, break_on_hyphens=False
        )
        yield f"{text.ljust(_COLUMN)}  # {first}"
        for line in rest:
            yield f"{' ' * _COLUMN}  # {line}"
