"""Tables and their forms, with values that need escaping."""

from __future__ import annotations

import csv
import io
import re
from typing import Any

import pytest

from arb_ternary_train.report_page.tables import Column, Table, escape_latex, shown

HOSTILE = '\\a{b}_c & 50% of $x^2$ ~ #1 <script>alert("|")</script>'
TABLE = Table(
    "checks",
    "Checks",
    "A note.",
    (
        Column("label", "a_b & c", "text"),
        Column("value", "value"),
        Column("passed", "passed", "text"),
        Column("fails_run", "fails the run", "text"),
        Column("none", "-"),
    ),
    [
        {"label": HOSTILE, "value": 0.1 + 0.2, "passed": True, "fails_run": True},
        {
            "label": 'comma, "quote"\nline',
            "value": 1e-9,
            "passed": False,
            "fails_run": False,
            "none": None,
        },
    ],
)


def test_csv_has_full_values() -> None:
    rows = list(csv.reader(io.StringIO(TABLE.to_csv())))
    assert rows[0] == ["label", "value", "passed", "fails_run", "none"]
    assert rows[1] == [HOSTILE, "0.30000000000000004", "true", "true", ""]
    assert rows[2] == ['comma, "quote"\nline', "1e-09", "false", "false", ""]
    assert float(rows[1][1]) == TABLE.rows[0]["value"]


def test_latex_escapes_special_characters() -> None:
    """Every command becomes its character again, and none is left unescaped."""
    escaped = escape_latex(HOSTILE)
    commands = {
        "textbackslash": "\\",
        "textasciitilde": "~",
        "textasciicircum": "^",
        "textless": "<",
        "textgreater": ">",
        "textbar": "|",
        "textquotedbl": '"',
    }
    back = re.sub(r"\\(?:([a-z]+)\{\}|(.))", lambda m: commands[m[1]] if m[1] else m[2], escaped)
    assert back == HOSTILE
    bare = re.sub(r"\\[a-z]+\{\}|\\[&%$#_{}]", "", escaped)
    assert not set(bare) & set('&%$#_{}~^\\<>|"')
    text = TABLE.to_latex()
    assert r"a\_b \& c & value & passed & fails the run & - \\" in text
    assert text.count(r"\\") == 1 + len(TABLE.rows)
    assert r"\begin{tabular}{lrllr}" in text


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (None, "number", "-"),
        ("nan", "number", "nan"),
        (float("inf"), "bytes", "inf"),
        (True, "text", "yes"),
        (0.05, "number", "0.05"),
        (2.0, "number", "2"),
        (1234.5678, "number", "1,235"),
        (0.123456, "number", "0.1235"),
        (1e-9, "number", "1e-09"),
        (0, "number", "0"),
        (1234567, "count", "1,234,567"),
        (512, "bytes", "512 B"),
        (1536, "bytes", "1.5 KiB"),
        (3 * 2**30, "bytes", "3 GiB"),
        (0.0123, "seconds", "12.3 ms"),
        (2.5, "seconds", "2.5 s"),
        (0.00004, "seconds", "40 us"),
        (0.3891, "share", "38.9 %"),
    ],
)
def test_values_are_shown_with_four_figures_and_a_unit(value: Any, kind: Any, text: str) -> None:
    assert shown(value, kind) == text
