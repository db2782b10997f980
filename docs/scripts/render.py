"""Render the options of config classes as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from types import NoneType
from typing import Any, get_args

from arb_ternary.config.fields import shape_of
from arb_ternary.config.options import Rule
from arb_ternary.config.yaml_document import dump_inline

_ROLE = re.compile(r":[a-z]+:`~?([^`]+)`")
#: A star that is not the bullet of a list item.
_STARS = re.compile(r"(?<!^)(?<!\n)\*")


def prose(text: str) -> str:
    """Return reStructuredText as Markdown.

    Roles and literals become code spans; characters of formulas outside them are escaped.
    """
    spans = (
        _ROLE.sub(lambda match: f"`{match[1].rpartition('.')[2]}`", text)
        .replace("``", "`")
        .split("`")
    )
    return "`".join(
        span if index % 2 else _STARS.sub(r"\\*", span) for index, span in enumerate(spans)
    )


def type_text(t: Any) -> str:
    """Return the type of an option for a table cell."""
    plain = {
        int: "integer",
        float: "number",
        str: "text",
        bool: "true, false",
        NoneType: "null",
        None: "null",
    }
    if t in plain:
        return plain[t]
    match shape_of(t):
        case "literal":
            return " or ".join(f"`{dump_inline(value)}`" for value in get_args(t))
        case "union":
            return " or ".join(type_text(arm) for arm in get_args(t))
        case "list":
            return f"list of {type_text(get_args(t)[0])}"
        case "choice":
            return f"[{t.kind}]({t.kind}.md)"
        case "mapping" | "class":
            return "mapping"
    return "text"


def rules(validator: Any) -> Iterator[str]:
    """Return in words what validators demand beyond the type."""
    if isinstance(validator, Rule):
        yield validator.text
    elif hasattr(validator, "_validators"):
        for part in validator._validators:
            yield from rules(part)
    elif hasattr(validator, "compare_op"):
        yield f"{validator.compare_op} {validator.bound}"
    elif type(validator).__name__ == "_OptionalValidator":
        yield from rules(validator.validator)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table. Cells must not hold line breaks."""
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    lines += [f"| {' | '.join(' '.join(cell.split()) for cell in row)} |" for row in rows]
    return "\n".join(lines)
