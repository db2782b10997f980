"""The environment variable of the server. Imports nothing heavy."""

from __future__ import annotations

from typing import Final

from arb_ternary.environment import Variable

API_KEY: Final = Variable(
    "ARB_TERNARY_API_KEY",
    "",
    "key that requests to `arb serve` need, if --api-key-file is not given",
)
VARIABLES: Final = (API_KEY,)
