"""Names of the estimated phases of training; see ``Telemetry.phase``."""

from __future__ import annotations

from typing import Final, Literal, get_args

Phase = Literal["unstable", "warm-up", "converging", "plateau", "early", "mid", "late"]
PHASES: Final[tuple[Phase, ...]] = get_args(Phase)
