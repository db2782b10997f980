"""Render signatures, types and docstrings of the code as Markdown."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType, NoneType
from typing import Any, get_args

import attrs

from arb_ternary.config.fields import shape_of
from arb_ternary.config.options import Rule
from arb_ternary.config.yaml_document import dump_inline

#: The longest signature that stays on one line.
_WIDTH = 100
_SECTIONS = ("Args", "Attributes", "Raises", "Returns")
_ROLE = re.compile(r":[a-z]+:`~?([^`]+)`")
#: A star that is not the bullet of a list item.
_STARS = re.compile(r"(?<!^)(?<!\n)\*")
_ITEM = re.compile(r"(\*{0,2}[\w ,./\[\]]+):\s+(.*)")


def public_names(module: ModuleType) -> list[str]:
    """Return the public names that a module defines: constants, then classes, then functions."""
    known = {name: getattr(value, "__module__", None) for name, value in vars(module).items()}
    constants = {name for name in known if name.isupper()} - {"TYPE_CHECKING"}
    public = [name for name in known if name in constants or known[name] == module.__name__]
    order = sorted(public, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    return [name for name in order if not name.startswith("_")]


# --- signatures


def signature(name: str, function: Callable[..., Any], *, skip: Sequence[str] = ()) -> str:
    """Return ``name(arguments) -> result`` with the annotations of the source.

    A long signature takes several lines.
    """
    found = inspect.signature(function)
    parts: list[str] = []
    keyword_only = False
    for parameter in found.parameters.values():
        if parameter.name in skip:
            continue
        if parameter.kind is parameter.VAR_POSITIONAL:
            keyword_only = True
        elif parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            parts.append("*")
            keyword_only = True
        parts.append(_parameter(parameter))
    result = (
        ""
        if found.return_annotation is found.empty
        else f" -> {_annotation(found.return_annotation)}"
    )
    line = f"{name}({', '.join(parts)}){result}"
    if len(line) <= _WIDTH:
        return line
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){result}"


def _parameter(parameter: inspect.Parameter) -> str:
    prefix = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    text = prefix + parameter.name
    if parameter.annotation is not parameter.empty:
        text += f": {_annotation(parameter.annotation)}"
    if parameter.default is not parameter.empty:
        equals = " = " if parameter.annotation is not parameter.empty else "="
        text += f"{equals}{parameter.default!r}"
    return text


def _annotation(annotation: Any) -> str:
    if isinstance(annotation, str):
        return annotation
    return (
        annotation.__name__
        if isinstance(annotation, type)
        else str(annotation).replace("typing.", "")
    )


# --- docstrings


def docstring(found: object) -> str:
    """Return the docstring as Markdown.

    Sections become lists, indented blocks after ``::`` become code.
    """
    text = inspect.getdoc(found) or ""
    blocks: list[str] = []
    for heading, lines in _split_sections(text):
        body = "\n".join(lines).strip("\n")
        if not heading:
            blocks.append(_paragraphs(body))
        elif heading == "Returns":
            blocks.append(f"**Returns:** {prose(' '.join(body.split()))}")
        else:
            items = [f"- `{name}`: {prose(text)}" for name, text in _items(textwrap.dedent(body))]
            blocks.append("\n".join([f"**{heading}:**", "", *items]))
    return "\n\n".join(block for block in blocks if block)


def _split_sections(text: str) -> Iterator[tuple[str, list[str]]]:
    heading = ""
    lines = list[str]()
    for line in text.splitlines():
        stripped = line.rstrip()
        if stripped.endswith(":") and stripped[:-1] in _SECTIONS:
            yield heading, lines
            heading = stripped[:-1]
            lines = []
        elif heading and line and not line.startswith(" "):
            yield heading, lines
            heading = ""
            lines = [line]
        else:
            lines.append(line)
    yield heading, lines


def _items(body: str) -> Iterator[tuple[str, str]]:
    name = ""
    words = list[str]()
    for line in body.splitlines():
        match = _ITEM.fullmatch(line) if not line.startswith(" ") else None
        if match:
            if name:
                yield name, " ".join(words)
            name = match[1]
            words = [match[2]]
        else:
            words.append(line.strip())
    if name:
        yield name, " ".join(words)


def _paragraphs(text: str) -> str:
    out: list[str] = []
    in_code = False
    for block in re.split(r"\n{2,}", text):
        if in_code and block.startswith("    "):
            out.append(f"```\n{textwrap.dedent(block)}\n```")
            continue
        in_code = block.endswith("::")
        out.append(prose(block.removesuffix("::") + ":" if in_code else block))
    return "\n\n".join(out)


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


def attribute_list(cls: type[Any]) -> str:
    """Return the table of the fields of an attrs class: name, type in the source, default."""
    rows = []
    for field in attrs.fields(cls):
        default = "" if field.default is attrs.NOTHING else f"`{_default(field.default)}`"
        rows.append(
            (f"`{field.name}`", f"`{_annotation(field.type)}`".replace("|", "\\|"), default)
        )
    return table(("field", "type", "default"), rows)


def _default(default: Any) -> str:
    if isinstance(default, attrs.Factory):  # type: ignore[arg-type]
        return f"{default.factory.__name__}()"
    return repr(default)


# --- options


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
