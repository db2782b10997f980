"""The parts of a report: what packages contribute to its page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import field, frozen

from arb_ternary_train.report_page.tables import Table


@frozen
class Card:
    """A number that people look for first.

    Attributes:
        title: what it is.
        figure: the number.
        note: a line below it.
    """

    title: str
    figure: str
    note: str = ""


@frozen(eq=False)
class Figure:
    """A figure.

    Attributes:
        name: of letters and ``-``; no two figures of a section have the same.
        title: what it shows.
        drawing: the figure of matplotlib.
    """

    name: str
    title: str
    drawing: Any


@frozen
class Attachment:
    """Something to read, see or hear.

    Attributes:
        title: its heading.
        text: its text, if it is one.
        address: a ``data:`` address of its content otherwise.
        kind: ``text``, ``image`` or ``audio``.
        folded: show only the title until the reader asks for more.
    """

    title: str
    text: str = ""
    address: str = ""
    kind: str = "text"
    folded: bool = False


@frozen(eq=False)
class Section:
    """A section of the page; what is empty is not shown.

    Attributes:
        title: its heading.
        note: a sentence or two below the heading.
        figures: drawn first.
        tables: below them. A table with the section's title has no heading of its own.
        attachments: below them.
    """

    title: str
    note: str = ""
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    attachments: Sequence[Attachment] = ()


@frozen(eq=False)
class Contribution:
    """What a package adds to the page of a run.

    Attributes:
        cards: numbers at the top.
        facts: short lines about the run, by their headings.
        sections: after those that every run has.
    """

    cards: Sequence[Card] = ()
    facts: Mapping[str, str] = field(factory=dict)
    sections: Sequence[Section] = ()
