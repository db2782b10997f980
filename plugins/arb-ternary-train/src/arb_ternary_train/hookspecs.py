"""The hooks of training, which other plugins can implement."""

from __future__ import annotations

from collections.abc import Sequence

from arb_ternary.hookspecs import hookspec


@hookspec
def arb_register_model_readers() -> Sequence[str]:
    """Register readers of models that other programs have written.

    A reader is a target, ``"module:function"``. The function takes a file, a folder or an address
    as the user wrote it. It returns a ``arb_ternary_train.model_source.ModelSource``, or raises an
    ``ArbError`` if it cannot. The readers are asked one after another. The distribution
    ``arb-ternary-interchange`` registers one that reads whatever an importer reads: for another
    format register an importer.

    Called once, when the plugins are loaded. None or an empty sequence means that the plugin has no
    reader.
    """
    return ()


@hookspec
def arb_register_report_sections() -> Sequence[str]:
    """Register what a plugin adds to the page of ``arb report``.

    An entry is a target, ``"module:function"``. The function takes the
    ``arb_ternary_train.directory.RunDirectory`` of a run. It returns a
    ``arb_ternary_train.report_page.sections.Contribution``, or None for runs that have nothing of
    the plugin. What it returns is shown after the sections that every run has.

    Called once, when the plugins are loaded. None or an empty sequence means that the plugin adds
    nothing.
    """
    return ()
