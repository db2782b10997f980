"""Models of the ladder on four times its tokens, of a larger text: does the distance to float32
fall?

    python plugins/arb-ternary-bench/studies/scale.py --work DIR --out RESULT.json

Votes of 8 bits, float32 and QAT read the same 8,388,608 bytes of the Python source of the torch
package (BSD licence, 46 MB with torch 2.13.0), a quarter of an epoch, with the settings that
``ladder.py`` found and no trial of their own. Float32 and QAT are compiled. A run whose result is
in ``--out`` is not repeated; every finished run is written at once. The width of 640 needs about
two hours of a core, the one of 320 one more. ``--widths 192 --ways votes8 orthogonal gains`` asks
whether what orthogonalised gradients are ahead by lasts while no token is read twice.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, Final

import torch
from ladder import WAYS, Setting, Source, Study, setting_at
from ladder_figures import draw_tokens, scale

from arb_ternary_bench.texts import python_source

LADDER: Final = Path(__file__).parents[1] / "results" / "ladder.json"
#: Widths, the larger first, and those that run if none is named.
WIDTHS: Final = (640, 320, 192)
LARGE: Final = WIDTHS[:2]
#: Optimizer steps of a run.
STEPS: Final = 4096
# : Ways, in this order, and whether they are compiled: votes are taken in the backend's own
# kernels, outside a graph.
COMPILED: Final = {
    "votes8": False,
    "float32": True,
    "qat": True,
    "orthogonal": False,
    "gains": False,
}
#: Those that run if none is named.
COMMON: Final = ("votes8", "float32", "qat")


def torch_source() -> Source:
    """The Python modules of the torch package, in the order of their paths."""
    text = python_source(Path(torch.__file__).parent, "**/*.py")
    return Source(f"Python source of torch {torch.__version__}", "BSD-3-Clause", text)


def settings(ladder: dict[str, Any]) -> dict[str, tuple[Setting, Setting]]:
    """What the ladder's trials chose at their two widths, by way."""
    return {
        way: (Setting(**pair[0]), Setting(**pair[1])) for way, pair in ladder["settings"].items()
    }


def main() -> None:
    """Run what is missing, draw the figure that is asked for, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--out", type=Path, required=True, help="the result, JSON")
    parser.add_argument(
        "--widths",
        nargs="+",
        type=int,
        choices=WIDTHS,
        default=LARGE,
        help="of the models (the larger)",
    )
    parser.add_argument(
        "--ways", nargs="+", choices=COMPILED, default=COMMON, help="of training (common ones)"
    )
    parser.add_argument("--figure", type=Path, help="PNG of the curves at the largest width")
    arguments = parser.parse_args()
    work: Path = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    chosen = settings(json.loads(LADDER.read_text(encoding="utf-8")))
    study = Study(work, arguments.out, torch_source(), STEPS)
    for width in arguments.widths:
        for way in arguments.ways:
            setting = setting_at(width, *chosen[WAYS[way]])
            study.final(way, width, 0, setting, compiled=COMPILED[way])
    if arguments.figure is not None:
        draw_tokens(study.result, arguments.figure)
    print(scale(study.result))


if __name__ == "__main__":
    main()
