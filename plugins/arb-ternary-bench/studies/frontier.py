"""One figure of all rules that were measured at size small: final loss over bits of training state.

    python plugins/arb-ternary-bench/studies/frontier.py docs/images/quality-frontier.png

The rules of ``results/quality-small.json`` had trials as long as their final runs; those of
``results/quality-survey.json``, which are not rivals of the default rule, had shorter ones.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from arb_ternary_bench.quality.figures import draw_frontier

RESULTS = Path(__file__).parents[1] / "results"


def main() -> None:
    """Merge the two studies, which differ in nothing but the length of trials, and draw."""
    studies: list[dict[str, Any]] = [
        json.loads((RESULTS / f"quality-{name}.json").read_text(encoding="utf-8"))
        for name in ("small", "survey")
    ]
    for what in ("size", "tokens", "seeds"):
        values = [study[what] for study in studies]
        if values[0] != values[1]:
            raise SystemExit(f"the studies differ in {what}: {values[0]} and {values[1]}")
    merged = {**studies[0], "rules": [rule for study in studies for rule in study["rules"]]}
    draw_frontier(merged, Path(sys.argv[1]))


if __name__ == "__main__":
    main()
