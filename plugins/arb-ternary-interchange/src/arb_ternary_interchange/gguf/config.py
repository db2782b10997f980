"""Options of the GGUF exporter and importer."""

from __future__ import annotations

from typing import Literal

from attrs import frozen
from attrs.validators import in_

from arb_ternary.config.options import option


@frozen(kw_only=True)
class GgufConfig:
    """How weights are stored in a GGUF file."""

    type: Literal["auto", "f32", "f16", "bf16", "tq1_0", "tq2_0", "q2_0", "q4_0"] = option(
        "auto",
        "type of the ternary matrices, which has to hold each exactly; auto = for each the "
        "smallest that does. Float "
        "matrices are f16, bf16 or f32, the first that is exact, unless a float type is named here",
        validator=in_(("auto", "f32", "f16", "bf16", "tq1_0", "tq2_0", "q2_0", "q4_0")),
    )
    float_type: Literal["auto", "f32", "f16", "bf16", "q8_0"] = option(
        "auto",
        "type to which float matrices (embedding, head, float linears) are rounded; auto = they "
        "stay exact, see type",
        validator=in_(("auto", "f32", "f16", "bf16", "q8_0")),
    )
