"""Environment variables of wandb and trackio that decide where points go."""

from __future__ import annotations

from typing import Final

from arb_ternary.environment import Variable

WANDB_MODE: Final = Variable(
    "WANDB_MODE", "", "wandb's own: online, offline or disabled; empty: online if there is a key"
)
TRACKIO_SPACE_ID: Final = Variable(
    "TRACKIO_SPACE_ID", "", "trackio's own: the Hugging Face Space to write to; empty: this machine"
)
TRACKIO_SERVER_URL: Final = Variable(
    "TRACKIO_SERVER_URL", "", "trackio's own: the server to write to; empty: this machine"
)
WANDB: Final = (WANDB_MODE,)
TRACKIO: Final = (TRACKIO_SPACE_ID, TRACKIO_SERVER_URL)
