"""What all ranks must have alike before anything is made: programs, config, data, backend,
processor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from arb_ternary.config.errors import show_path
from arb_ternary.config.fields import leaves, to_plain
from arb_ternary_train.build import RunParts, versions_of
from arb_ternary_train.config import RunConfig
from arb_ternary_train.ranks.world import World


def agree_on_run(world: World, config: RunConfig, parts: RunParts) -> None:
    """Compare everything that decides the bytes of a run. Collective.

    Raises:
        ArbError: something differs; what, and which rank has which.
    """
    if world.size == 1:  # a fingerprint may take a while
        return
    world.agree("versions", versions_of(config, parts.backend.name))
    world.agree("config", flat(to_plain(config)))
    world.agree(
        "data",
        {"fingerprint": parts.data.fingerprint(), "vocabulary size": parts.data.vocabulary_size},
    )
    world.agree("backend", parts.backend.name)
    # Sums of floats depend on the instructions that add them, and float parts are computed by every
    # rank.
    world.agree("processor", _processor(parts.device))


def flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of a config by dotted path."""
    return {show_path(path): value for path, value in leaves(dict(tree))}


def _processor(device: torch.device) -> dict[str, str]:
    found = {"instructions": torch.backends.cpu.get_cpu_capability()}
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    return found
