"""The page in headless Chromium: it asks for nothing, fits, and can be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from arb_ternary_train.report_page.page import write_page

#: Returns the texts of the page whose contrast is too low, with it, and the number of all texts.
CONTRAST = """() => {
  const channel = (value) => {
    const share = value / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  };
  const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const luminance = ([r, g, b]) =>
    0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const behind = (element) => {
    for (let each = element; each; each = each.parentElement) {
      const colour = parse(getComputedStyle(each).backgroundColor);
      if (colour.length === 3) return colour;
    }
    return [255, 255, 255];
  };
  const low = [];
  let count = 0;
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own) continue;
    const style = getComputedStyle(element);
    const ink = parse(element instanceof SVGElement ? style.fill : style.color);
    const [high, dark] = [luminance(ink), luminance(behind(element))].sort((a, b) => b - a);
    const contrast = (high + 0.05) / (dark + 0.05);
    count += 1;
    if (contrast < 4.5) low.push([element.textContent.trim().slice(0, 40), contrast]);
  }
  return [low, count];
}"""


@pytest.fixture
def pages(tiny: Any, make_run: Any, tmp_path: Path) -> list[Path]:
    """The page of one run, and one that compares three."""
    trained, _ = tiny.run("trained")
    (trained.path / "samples").mkdir()
    (trained.path / "samples" / "text.txt").write_text("a long line of text " * 40)
    metrics = [
        {"event": "train", "step": step, "phase": "", "loss": 3.0 - step, "flips": step}
        for step in (1, 2)
    ]
    others = [make_run("second", metrics), make_run(f"name-{'long' * 20}", metrics)]
    one = tmp_path / "one.html"
    write_page([trained.path], one)
    three = tmp_path / "three.html"
    write_page([trained.path, *(run.path for run in others)], three)
    return [one, three]


def test_page_asks_for_nothing_fits_and_can_be_read(pages: list[Path], chromium: Any) -> None:
    for scheme, width in (("light", 900), ("dark", 320)):
        context = chromium.new_context(
            viewport={"width": width, "height": 700}, color_scheme=scheme
        )
        for file in pages:
            page = context.new_page()
            console: list[str] = []
            requests: list[str] = []
            page.on("console", lambda message, seen=console: seen.append(message.text))
            page.on("pageerror", lambda error, seen=console: seen.append(str(error)))
            page.on("request", lambda request, seen=requests: seen.append(request.url))
            page.goto(file.as_uri())
            page.evaluate("document.querySelectorAll('details').forEach((each) => each.open = 1)")
            assert console == []
            assert [url for url in requests if not url.startswith("data:")] == [file.as_uri()]
            assert page.evaluate("document.documentElement.scrollWidth") == width
            assert page.locator("script").count() == 0
            assert page.locator("svg text").count() > 20
            low, count = page.evaluate(CONTRAST)
            assert low == []
            assert count > 100
        context.close()


def test_dark_and_light_differ(pages: list[Path], chromium: Any) -> None:
    shades = {}
    for scheme in ("light", "dark"):
        context = chromium.new_context(color_scheme=scheme)
        page = context.new_page()
        page.goto(pages[0].as_uri())
        shades[scheme] = page.evaluate(
            "[document.body, document.querySelector('svg path')].map((each) => "
            "[getComputedStyle(each).backgroundColor, getComputedStyle(each).fill])"
        )
        context.close()
    assert shades["light"][0][0] == "rgb(244, 246, 249)"
    assert shades["light"][1][1] == "rgb(255, 255, 255)"
    assert shades["dark"][0][0] == "rgb(18, 22, 27)"
    assert shades["dark"][1][1] == "rgb(27, 32, 39)"
