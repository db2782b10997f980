"""Writes reports: one page of HTML that refers to nothing outside, for one or several runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from attrs import evolve
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from arb_ternary.errors import ArbError
from arb_ternary.plugins.manager import manager
from arb_ternary.specs import load_target
from arb_ternary_train.directory import RunDirectory, check_regular, reason_of
from arb_ternary_train.durable import replacing
from arb_ternary_train.hookspecs import arb_register_report_sections
from arb_ternary_train.report_page.contents import (
    make_cards,
    make_closing_sections,
    make_facts,
    make_sections,
)
from arb_ternary_train.report_page.drawing import to_svg
from arb_ternary_train.report_page.runs import ReportedRun, read_runs
from arb_ternary_train.report_page.sections import Card, Contribution, Section

#: Tables of more rows are folded.
_LONG: Final = 16

Contributor = Callable[[RunDirectory], Contribution | None]


def write_page(paths: Sequence[Path], destination: Path) -> None:
    """Write the report of run directories to ``destination``, which is replaced as a whole.

    Raises:
        ArbError: a path is no run, something in a run is damaged, or the page cannot be written.
    """
    page = make_page(read_runs(paths))
    check_regular(destination)
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        with replacing(destination) as new:
            new.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ArbError(
            f"{destination}: the report cannot be written: {reason_of(error)}",
            "Free some space or choose another file; then repeat the command.",
        ) from error


def make_page(runs: Sequence[ReportedRun]) -> str:
    """Return the page of runs.

    Raises:
        ArbError: something in a run is damaged.
    """
    single = len(runs) == 1
    cards: list[Card] = []
    facts: dict[str, str] = {}
    sections = make_sections(runs)
    if single:
        cards += make_cards(runs[0])
        facts |= make_facts(runs[0])
    for run in runs:
        for contribution in _contributions(run.directory):
            if single:
                cards += contribution.cards
                facts |= contribution.facts
                sections += contribution.sections
                continue
            for section in contribution.sections:
                sections.append(evolve(section, title=f"{run.name}: {section.title}"))
    sections += make_closing_sections(runs)

    names = [run.name for run in runs]
    title = names[0] if single else f"{len(runs)} runs: {', '.join(names)}"
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template = environment.get_template("page.html")
    return template.render(
        title=title,
        cards=cards,
        facts=facts,
        sections=[section for section in sections if _has_content(section)],
        figures=_draw(sections),
        long=_LONG,
    )


def _contributions(run: RunDirectory) -> Iterator[Contribution]:
    """Yield what packages add to the page of a run."""
    for _, target in manager().registry.results(arb_register_report_sections.__name__):
        contribute: Contributor = load_target("report sections", target)
        found = contribute(run)
        if found is not None:
            yield found


def _has_content(section: Section) -> bool:
    has_rows = any(table.rows for table in section.tables)
    return bool(section.note or section.figures or section.attachments or has_rows)


def _draw(sections: Sequence[Section]) -> dict[str, Markup]:
    """Return the figures by title of the section and name of the figure."""
    drawn = {}
    for number, section in enumerate(sections):
        for figure in section.figures:
            key = f"{section.title}/{figure.name}"
            drawn[key] = to_svg(figure.drawing, f"s{number}-{figure.name}", figure.title)
    return drawn
