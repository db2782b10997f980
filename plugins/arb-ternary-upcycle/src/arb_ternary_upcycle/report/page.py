"""The report as one page: HTML that contains its figures and refers to nothing outside."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any, Final

from arb_ternary_upcycle.report.contents import Contents
from arb_ternary_upcycle.report.figures import COLOURS
from arb_ternary_upcycle.report.tables import Column, Table, shown

#: Tables of more rows are folded.
_LONG: Final = 16
#: Numbers at the top of the page that compare the models: table, column, and whether the teacher's
#: over the student's is shown, or the student's over the teacher's.
_COMPARED: Final[Mapping[str, tuple[str, str, bool]]] = {
    "Perplexity, times the teacher's": ("perplexity", "perplexity", False),
    "Weights smaller by": ("memory", "weight_bytes", True),
    "Keys and values smaller by": ("kv_cache", "bytes_per_token", True),
    "Decoding speed, times the teacher's": ("latency", "decode_tokens_per_second", False),
}
#: Attribute of a cell that is aligned to the left.
_TEXT: Final = ' class="text"'

_STYLE: Final = """
:root { --ink: #1d2430; --soft: #5c6675; --line: #e4e8ee; --paper: #fff; --back: #f4f6f9;
  --teacher: TEACHER; --student: STUDENT; --good: #1b7f4d; --bad: #b3261e; --reported: #8a5a00; }
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
.pill.reported { background: var(--reported); }
summary { cursor: pointer; color: var(--soft); font-size: 13.5px; }
details[open] summary { margin-bottom: 10px; }
pre { margin: 0; padding: 14px; background: var(--back); border-radius: 8px; overflow-x: auto;
  font-size: 12px; }
@media print { body { background: #fff; } section, .card { break-inside: avoid; } }
"""


def make_page(contents: Contents, figures: Mapping[str, bytes]) -> str:
    """Make the page; ``figures`` are PNG files by the names of tables, and ``training``."""
    name = escape(contents.name)
    facts = "".join(
        f"<div><dt>{escape(key)}</dt><dd>{escape(value)}</dd></div>"
        for key, value in contents.facts.items()
    )
    sections = [_section(table, figures.get(table.name)) for table in contents.tables]
    if "training" in figures:
        image = _image(figures["training"], "Losses over optimizer steps")
        sections.append(
            f"<section><h2>Training</h2><p>Loss after each step; thick: smoothed.</p>{image}"
            "</section>"
        )
    style = _STYLE.replace("TEACHER", COLOURS["teacher"]).replace("STUDENT", COLOURS["student"])
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{name}: teacher and student</title>
<style>{style}</style>
</head>
<body>
<main>
<header><h1>{name}</h1><p class="key"><b class="teacher">teacher</b>, the float model, and
<b class="student">student</b>, the ternary one.</p><dl>{facts}</dl></header>
<div class="cards">{"".join(_cards(contents))}</div>
{"".join(sections)}
<section><details><summary>config.yaml of the run</summary><pre>{escape(contents.config)}</pre>
</details></section>
</main>
</body>
</html>
"""


def _cards(contents: Contents) -> Iterator[str]:
    """Yield the numbers that people look for first, each with a title and a line below."""
    checks = contents.table("checks")
    if checks is not None:
        failed = [row["label"] for row in checks.rows if not row["passed"]]
        count = len(checks.rows)
        line = f"not: {', '.join(dict.fromkeys(failed))}" if failed else "all checks passed"
        yield _card("Limits kept", f"{count - len(failed)} of {count}", line)
    for title, (name, key, teacher_over_student) in _COMPARED.items():
        table = contents.table(name)
        if table is None:
            continue
        teacher = table.rows[0][key]
        student = table.rows[1][key]
        ratio = teacher / student if teacher_over_student else student / teacher
        kind = next(column.kind for column in table.columns if column.key == key)
        line = f"{shown(student, kind)}, the teacher {shown(teacher, kind)}"
        yield _card(title, f"x {ratio:.3g}", line)


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
    head = f"<h2>{escape(table.title)}</h2><p>{escape(table.note)}</p>"
    return f"<section>{head}{image}{body}</section>"


def _table(table: Table) -> str:
    head = "".join(
        f"<th{_TEXT if column.is_text else ''}>{escape(column.title)}</th>"
        for column in table.columns
    )
    body = ""
    for row, texts in zip(table.rows, table.cells(), strict=True):
        cells = zip(table.columns, texts, strict=True)
        body += f"<tr>{''.join(_cell(column, row, text) for column, text in cells)}</tr>"
    drawn = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll">{drawn}</div>'


def _cell(column: Column, row: Mapping[str, Any], text: str) -> str:
    if column.key == "model":
        return f'<td class="text model {escape(text)}">{escape(text)}</td>'
    if column.key == "passed":
        return f'<td class="text">{_pill(row)}</td>'
    return f"<td{_TEXT if column.is_text else ''}>{escape(text)}</td>"


def _pill(row: Mapping[str, Any]) -> str:
    if row["passed"]:
        return '<span class="pill good">passed</span>'
    kind = "bad" if row["fails_run"] else "reported"
    return f'<span class="pill {kind}">failed</span>'


def _image(png: bytes, title: str) -> str:
    data = base64.b64encode(png).decode("ascii")
    return f'<figure><img alt="{escape(title)}" src="data:image/png;base64,{data}"></figure>'
