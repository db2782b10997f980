"""Figures of matplotlib as parts of a page: text stays text, and colours follow the page."""

from __future__ import annotations

import io
import re
from typing import Any, Final

from markupsafe import Markup

#: Variables of the page's style sheet by the colours in which figures are drawn.
_VARIABLES: Final = {
    "#0072b2": "--first",
    "#d55e00": "--second",
    "#009e73": "--third",
    "#cc79a7": "--fourth",
    "#e69f00": "--fifth",
    "#56b4e9": "--sixth",
    "#000000": "--ink",
    "#333333": "--ink",
    "#3d4451": "--ink",
    "#404040": "--ink",
    "#595959": "--soft",
    "#888888": "--soft",
    "#b2182b": "--bad",
    "#bfbfbf": "--line",
    "#e6e6e6": "--line",
    "#ebebeb": "--line",
    "#ffffff": "--paper",
}
#: What matplotlib says about a file unless it is told not to.
_FACTS: Final = ("Date", "Creator", "Format", "Type")
_COLOUR: Final = re.compile(r"#[0-9a-f]{6}(?=[;\"])")
_REFERENCE: Final = re.compile(r'(\bid="|url\(#|href="#)')
#: What the page's style sheet decides: the size in points, fonts, how lines are joined.
_DECIDED: Final = re.compile(
    r' (?:width|height)="[\d.]+pt"|font-family: [^;"]*;? ?|'
    r"<defs>\s*<style.*?</style>\s*</defs>\s*",
    re.DOTALL,
)


def to_svg(figure: Any, name: str, title: str) -> Markup:
    """Return a figure as an ``svg`` element.

    Args:
        figure: of matplotlib.
        name: of letters; it begins every id, so that ids on a page differ.
        title: what a screen reader says.
    """
    from matplotlib import rc_context

    file = io.StringIO()
    # With a salt, the same numbers give the same ids.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(file, format="svg", metadata=dict.fromkeys(_FACTS))
    drawn = file.getvalue()
    drawn = _DECIDED.sub("", drawn[drawn.index("<svg") :])
    drawn = _COLOUR.sub(lambda found: _variable(found[0]), drawn)
    drawn = _REFERENCE.sub(rf"\g<1>{name}-", drawn)
    label = Markup('<svg role="img" aria-label="{}"').format(title)
    # matplotlib has escaped the texts.
    return Markup(drawn.replace("<svg", label, 1))


def to_png(figure: Any) -> bytes:
    """Return a figure as a PNG file."""
    file = io.BytesIO()
    # Without the version of the library and the date, the same numbers give the same file.
    figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()


def _variable(colour: str) -> str:
    variable = _VARIABLES.get(colour)
    return colour if variable is None else f"var({variable})"
