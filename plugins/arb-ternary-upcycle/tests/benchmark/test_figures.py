"""The figures of upcycling: what is drawn of which numbers."""

from __future__ import annotations

from arb_ternary_train.report_page.drawing import to_png
from arb_ternary_train.report_page.tables import Column, Table
from arb_ternary_upcycle.report.contents import Contents
from arb_ternary_upcycle.report.figures import draw_figures


def test_nothing_is_drawn_of_nothing() -> None:
    assert draw_figures(Contents("empty", {}, [], {}, [])) == {}


def test_figures_of_projection_and_blocks() -> None:
    columns = tuple(Column(name, name) for name in ("name", "held_out"))
    rows = [
        {"name": f"blocks.{block}.{name}", "held_out": 0.1 * block}
        for block in range(3)
        for name in ("attention.query", "feed_forward.down")
    ]
    errors = Table("projection", "", "", columns, [*rows, {"name": "head", "held_out": 0.3}])
    blocks = Table(
        "blockwise",
        "",
        "",
        (),
        [{"block": 0, "l1_first": 2.0, "l1": 1.0}, {"block": 1, "l1_first": "nan"}],
    )
    drawn = draw_figures(Contents("n", {}, [errors, blocks], {}, []))
    assert all(to_png(each).startswith(b"\x89PNG") for each in drawn.values())
    assert drawn.keys() == {"projection", "blockwise"}
    lost = Table("blockwise", "", "", (), [{"block": 0, "l1_first": "nan", "l1": "nan"}])
    assert (
        draw_figures(
            Contents("n", {}, [Table("projection", "", "", columns, rows[:0]), lost], {}, [])
        )
        == {}
    )


def test_the_legend_hides_no_bar() -> None:
    rows = [{"model": name, "perplexity": 14.0} for name in ("teacher", "student")]
    table = Table("perplexity", "", "", (), rows)
    figure = draw_figures(Contents("n", {}, [table], {}, []))["perplexity"]
    figure.draw_without_rendering()
    (legend,) = [*figure.legends, *filter(None, (axes.get_legend() for axes in figure.axes))]
    box = legend.get_window_extent()
    drawn = [bar for axes in figure.axes for bar in axes.patches]
    texts = [text for axes in figure.axes for text in axes.texts]
    assert len(drawn) == len(texts) == 2
    assert not any(box.overlaps(each.get_window_extent()) for each in (*drawn, *texts))
