"""Options of the exporters ``gguf`` and ``hf`` and of both importers of these formats."""

from __future__ import annotations

from typing import Literal

from attrs import frozen
from attrs.validators import in_, instance_of, optional

from arb_ternary.config.options import Rule, option

#: How scales that are not powers of two are kept.
Scales = Literal["fold", "round", "float"]
#: How float matrices are kept.
FloatSources = Literal["keep", "ternary"]

_GGUF_TYPES = ("auto", "f32", "f16", "bf16", "tq1_0", "tq2_0", "q2_0", "q4_0")
_GGUF_FLOAT_TYPES = ("auto", "f32", "f16", "bf16", "q8_0")
_LAYOUTS = ("packed", "dense_w1a8", "dense")
_DTYPES = ("float32", "bfloat16")


@frozen(kw_only=True)
class ImportConfig:
    """What an import does with scales that are not powers of two, and with float matrices."""

    scales: Scales = option(
        "fold",
        "scales that are not powers of two: fold = exactly into gains of norms, round = to the "
        "nearest power of two, float = kept as a float factor of each linear",
        validator=in_(("fold", "round", "float")),
    )
    float_sources: FloatSources = option(
        "keep",
        "float matrices: keep = as float parts, ternary = rounded to trits, with the rest of the "
        "rounding in the votes",
        validator=in_(("keep", "ternary")),
    )


@frozen(kw_only=True)
class GgufConfig:
    """How weights are stored in a GGUF file."""

    type: Literal["auto", "f32", "f16", "bf16", "tq1_0", "tq2_0", "q2_0", "q4_0"] = option(
        "auto",
        "type of the ternary matrices, which has to hold each exactly; auto = for each matrix the "
        "smallest type that does. Float matrices are f16, bf16 or f32, the first that is exact, "
        "unless a float type is named here",
        validator=in_(_GGUF_TYPES),
    )
    float_type: Literal["auto", "f32", "f16", "bf16", "q8_0"] = option(
        "auto",
        "type to which float matrices (embedding, head, float linears) are rounded; auto = they "
        "stay exact, see type",
        validator=in_(_GGUF_FLOAT_TYPES),
    )


@frozen(kw_only=True)
class HfExportConfig:
    """How a folder for transformers is written."""

    layout: Literal["packed", "dense_w1a8", "dense"] = option(
        "dense_w1a8",
        "packed = 2 bits per weight, for one exponent per matrix; dense_w1a8 = 16 bits, for any "
        "exponents; both with int8 activations; dense = an ordinary float model",
        validator=in_(_LAYOUTS),
    )
    dtype: Literal["float32", "bfloat16"] | None = option(
        None,
        "dtype of float tensors, in which transformers computes; a ternary weight is exact in "
        "both; null = bfloat16 for dense_w1a8, else float32",
        validator=optional(in_(_DTYPES)),
    )
    tokenizer: bool = option(True, "write the run's tokenizer too", validator=instance_of(bool))
    shard_megabytes: int = option(
        5000,
        "most megabytes (10^6 bytes) of tensors in one file; the rest goes into further files",
        validator=Rule(
            "a whole number of at least 1",
            lambda value: type(value) is int and value >= 1,
            {"minimum": 1},
        ),
    )

    @property
    def float_dtype(self) -> str:
        """``dtype`` with its default filled in."""
        if self.dtype is not None:
            return self.dtype
        return "bfloat16" if self.layout == "dense_w1a8" else "float32"
