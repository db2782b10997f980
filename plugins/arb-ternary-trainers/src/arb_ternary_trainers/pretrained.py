"""The name ``ArbTernaryConfig``; importing this module registers its method in transformers."""

from __future__ import annotations

from arb_ternary.errors import EnvironmentProblem
from arb_ternary.plugins.discovery import install_command

try:
    from arb_ternary_trainers import quantization_config, quantizer  # noqa: F401
except ModuleNotFoundError as error:
    raise EnvironmentProblem(
        f"ArbTernaryConfig: needs a package that is not installed: {error.name}",
        install_command("transformers>=5.24"),
    ) from error

ArbTernaryConfig = quantization_config.ArbTernaryConfig
