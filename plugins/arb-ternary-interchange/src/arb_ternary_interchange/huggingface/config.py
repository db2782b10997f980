"""Options of the exporter and the importer ``hf``."""

from __future__ import annotations

from typing import Literal

from attrs import frozen
from attrs.validators import in_, instance_of, optional

from arb_ternary.config.options import Rule, option


@frozen(kw_only=True)
class HfExportConfig:
    """How a model folder is written."""

    layout: Literal["packed", "dense_w1a8", "dense"] = option(
        "dense_w1a8",
        "packed = 2 bits a weight, for one exponent a matrix; dense_w1a8 = 16 bits, for any; both "
        "with int8 activations; dense = an ordinary float model",
        validator=in_(("packed", "dense_w1a8", "dense")),
    )
    dtype: Literal["float32", "bfloat16"] | None = option(
        None,
        "of float tensors, and of what transformers computes with; a ternary weight is exact in "
        "both; null = bfloat16 for dense_w1a8, else float32",
        validator=optional(in_(("float32", "bfloat16"))),
    )
    tokenizer: bool = option(True, "write the run's tokenizer too", validator=instance_of(bool))
    shard_megabytes: int = option(
        5000,
        "most megabytes of tensors in a file, 10^6 bytes each; what is more goes to further files",
        validator=Rule(
            "a whole number of at least 1",
            lambda value: type(value) is int and value >= 1,
            {"minimum": 1},
        ),
    )

    @property
    def float_dtype(self) -> str:
        """``dtype``, with its default filled in."""
        return self.dtype or ("bfloat16" if self.layout == "dense_w1a8" else "float32")
