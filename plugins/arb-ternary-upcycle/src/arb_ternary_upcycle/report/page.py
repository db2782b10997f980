"""The report as one page: HTML that holds its figures and asks no network for anything."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any, Final

from arb_ternary_upcycle.report.contents import Contents
from arb_ternary_upcycle.report.figures import COLOURS
from arb_ternary_upcycle.report.tables import Table, shown

#: Tables of more rows are folded away.
_LONG: Final = 16

#: Table, and one sentence below its title.
_SECTIONS: Final[Mapping[str, str]] = {
    "perplexity": "Both models on the same held-out predictions. KL is the divergence of the "
    "student's distribution "
    "from the teacher's, nats a token; same choice: both find the same token the likeliest.",
    "latency": "Medians of passes in which teacher and student take turns. First token: from the "
    "ids of a prompt to the next id.",
    "memory": "Weights as they are computed from. Peak: weights, and the most that a pass takes "
    "besides, as far as the system tells it.",
    "kv_cache": "What each token of the context costs in every layer together.",
    "checks": "Each number beside its limit. A number at its limit passes.",
    "projection": "|difference| / |teacher's output| of every linear; of rounding alone: both "
    "weights on the same inputs.",
    "blockwise": "Distance of each block's output to the teacher's, before and after the block was "
    "trained.",
}

_STYLE: Final = """
:root { --ink: #1d2430; --soft: #5c6675; --line: #e4e8ee; --paper: #fff; --back: #f4f6f9;
  --teacher: TEACHER; --student: STUDENT; --good: #1b7f4d; --bad: #b3261e; --told: #8a5a00; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink); line-height: 1.5;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1040px; margin: 0 auto; padding: 36px 20px 60px; }
header h1 { margin: 0 0 6px; font-size: 30px; letter-spacing: -0.02em; overflow-wrap: anywhere; }
header p { margin: 0; color: var(--soft); }
.key b { font-weight: 600; }
.key b::before { content: ""; display: inline-block; width: 11px; height: 11px; border-radius: 3px;
  margin-right: 6px; }
.key b.teacher::before { background: var(--teacher); }
.key b.student::before { background: var(--student); }
dl { display: flex; flex-wrap: wrap; gap: 4px 26px; margin: 14px 0 26px; font-size: 13px;
  color: var(--soft); }
dl div { display: flex; gap: 6px; } dt::after { content: ":"; } dd { margin: 0; color: var(--ink); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(180px, 1fr)); gap: 14px;
  margin-bottom: 26px; }
.card, section { background: var(--paper); border: 1px solid var(--line); border-radius: 12px; }
.card { padding: 15px 18px 14px; }
.card h3 { margin: 0; min-height: 3em; font-size: 13px; font-weight: 500; color: var(--soft); }
.card strong { display: block; font-size: 27px; font-weight: 650; letter-spacing: -0.02em;
  margin: 2px 0; }
.card p { margin: 0; font-size: 13px; color: var(--soft); }
section { padding: 20px 22px 22px; margin-bottom: 18px; }
section h2 { margin: 0 0 2px; font-size: 19px; letter-spacing: -0.01em; }
section > p { margin: 0 0 14px; color: var(--soft); font-size: 13.5px; max-width: 78ch; }
figure { margin: 0 0 12px; } img { display: block; max-width: 100%; height: auto; margin: 0 auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13px;
  font-variant-numeric: tabular-nums; }
th { text-align: right; font-weight: 600; color: var(--soft); border-bottom: 2px solid var(--line);
  padding: 6px 9px;
  vertical-align: bottom; }
td { text-align: right; padding: 6px 9px; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
tr:last-child td { border-bottom: 0; }
th:first-child, td:first-child { padding-left: 2px; }
.text { text-align: left; }
.model { font-weight: 600; } .model.teacher { color: var(--teacher); }
.model.student { color: var(--student); }
.pill { display: inline-block; padding: 1px 9px; border-radius: 999px; font-size: 12px;
  font-weight: 600; color: #fff; }
.pill.good { background: var(--good); } .pill.bad { background: var(--bad); }
.pill.told { background: var(--told); }
summary { cursor: pointer; color: var(--soft); font-size: 13.5px; }
details[open] summary { margin-bottom: 10px; }
pre { margin: 0; padding: 14px; background: var(--back); border-radius: 8px; overflow-x: auto;
  font-size: 12px; }
@media print { body { background: #fff; } section, .card { break-inside: avoid; } }
"""


def make_page(contents: Contents, figures: Mapping[str, bytes]) -> str:
    """The page; ``figures`` are PNG files by the names of tables, and ``training``."""
    name = escape(contents.name)
    facts = "".join(
        f"<div><dt>{escape(key)}</dt><dd>{escape(value)}</dd></div>"
        for key, value in contents.facts.items()
    )
    cards = "".join(_card(*card) for card in _cards(contents))
    order = ("perplexity", "checks", "latency", "memory", "kv_cache", "projection", "blockwise")
    sections = [
        _section(table, figures.get(table.name))
        for each in order
        if (table := contents.table(each)) is not None
    ]
    if "training" in figures:
        image = _image(figures["training"], "Losses over optimizer steps")
        sections.append(
            f"<section><h2>Training</h2><p>Loss after each step; thick: "
            f"smoothed.</p>{image}</section>"
        )
    style = _STYLE.replace("TEACHER", COLOURS["teacher"]).replace("STUDENT", COLOURS["student"])
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{name}: teacher and "
        f"student</title>\n<style>{style}</style>\n</head>\n<body>\n<main>\n"
        f'<header><h1>{name}</h1><p class="key"><b class="teacher">teacher</b>, the float model, '
        f"and "
        f'<b class="student">student</b>, the ternary one.</p><dl>{facts}</dl></header>\n'
        f'<div class="cards">{cards}</div>\n'
        + "\n".join(sections)
        + "\n<section><details><summary>config.yaml of the run</summary><pre>"
        + f"{escape(contents.config)}</pre></details>"
        "</section>\n</main>\n</body>\n</html>\n"
    )


def _cards(contents: Contents) -> Iterator[tuple[str, str, str]]:
    """Title, figure and one line of the numbers that people look for first."""
    if (rows := _both(contents.table("perplexity"))) is not None:
        teacher, student = rows
        values = [shown(row["perplexity"], "number") for row in rows]
        yield (
            "Perplexity, of the teacher's",
            _times(student["ratio"]),
            f"{values[1]}, the teacher {values[0]}",
        )
    if (table := contents.table("checks")) is not None:
        failed = [row for row in table.rows if not row["passed"]]
        count = len(table.rows)
        yield "Limits kept", f"{count - len(failed)} of {count}", _named(failed)
    if (rows := _both(contents.table("memory"))) is not None:
        teacher, student = rows
        ratio = teacher["weight_bytes"] / student["weight_bytes"]
        values = [shown(row["weight_bytes"], "bytes") for row in rows]
        yield "Weights smaller by", f"{ratio:.3g} x", f"{values[1]}, the teacher {values[0]}"
    if (rows := _both(contents.table("kv_cache"))) is not None:
        teacher, student = rows
        values = [shown(row["bytes_per_token"], "bytes") for row in rows]
        ratio = teacher["bytes_per_token"] / student["bytes_per_token"]
        yield (
            "Keys and values smaller by",
            f"{ratio:.3g} x",
            f"{values[1]}, the teacher {values[0]}",
        )
    if (rows := _both(contents.table("latency"))) is not None:
        teacher, student = rows
        ratio = student["decode_tokens_per_second"] / teacher["decode_tokens_per_second"]
        values = [shown(row["decode_tokens_per_second"], "number") for row in rows]
        yield (
            "Decoding speed, of the teacher's",
            _times(ratio),
            f"{values[1]} tokens/s, the teacher {values[0]}",
        )


def _both(table: Table | None) -> Sequence[Mapping[str, Any]] | None:
    """The first rows of teacher and student."""
    return None if table is None or len(table.rows) < 2 else table.rows[:2]


def _times(ratio: Any) -> str:
    return f"x {ratio:.3g}" if isinstance(ratio, int | float) else f"x {ratio}"


def _named(failed: Sequence[Mapping[str, Any]]) -> str:
    names = list(dict.fromkeys(str(row["label"]) for row in failed))
    return f"not: {', '.join(names)}" if names else "all checks passed"


def _card(title: str, figure: str, line: str) -> str:
    return (
        f'<div class="card"><h3>{escape(title)}</h3>'
        f"<strong>{escape(figure)}</strong><p>{escape(line)}</p></div>"
    )


def _section(table: Table, figure: bytes | None) -> str:
    image = "" if figure is None else _image(figure, table.title)
    body = _table(table)
    if len(table.rows) > _LONG:
        body = f"<details><summary>all {len(table.rows)} rows</summary>{body}</details>"
    head = f"<h2>{escape(table.title)}</h2><p>{escape(_SECTIONS[table.name])}</p>"
    return f"<section>{head}{image}{body}</section>"


def _table(table: Table) -> str:
    head = "".join(
        f"<th{_TEXT if column.is_text else ''}>{escape(column.title)}</th>"
        for column in table.columns
    )
    keys = [column.key for column in table.columns]
    rows = [
        "".join(_cell(key, row, text) for key, text in zip(keys, cells, strict=True))
        for row, cells in zip(table.rows, table.cells(), strict=True)
    ]
    body = "".join(f"<tr>{cells}</tr>" for cells in rows)
    drawn = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll">{drawn}</div>'


def _cell(key: str, row: Mapping[str, Any], text: str) -> str:
    if key == "model":
        return f'<td class="text model {escape(text)}">{escape(text)}</td>'
    if key == "passed":
        kind, word = (
            ("good", "passed")
            if row["passed"]
            else ("bad" if row["fails_run"] else "told", "failed")
        )
        return f'<td class="text"><span class="pill {kind}">{word}</span></td>'
    return f"<td{_TEXT if key in _LEFT else ''}>{escape(text)}</td>"


#: What sets a cell to the left, and the keys of such cells.
_TEXT: Final = ' class="text"'
_LEFT: Final = frozenset({"label", "what", "relation", "name", "reason", "fails_run"})


def _image(png: bytes, title: str) -> str:
    data = base64.b64encode(png).decode("ascii")
    return f'<figure><img alt="{escape(title)}" src="data:image/png;base64,{data}"></figure>'
