"""Options of the exporters ``gguf`` and ``hf`` and of both importers of these formats."""

from __future__ import annotations

from typing import Literal

from attrs import frozen

from arb_ternary.config.options import Rule, option

Scales = Literal["fold", "round", "float"]
FloatSources = Literal["keep", "ternary"]
GgufType = Literal["auto", "f32", "f16", "bf16", "tq1_0", "tq2_0", "q2_0", "q4_0"]
GgufFloatType = Literal["auto", "f32", "f16", "bf16", "q8_0"]
Layout = Literal["auto", "packed", "dense_w1a8", "dense"]
FloatDtype = Literal["float32", "bfloat16"]


@frozen(kw_only=True)
class ImportConfig:
    """Options of the importers ``gguf`` and ``hf``."""

    scales: Scales = option(
        "fold",
        "scales that are not powers of two: fold = exactly into gains of norms, round = to the "
        "nearest power of two, float = kept as a float factor of each linear",
    )
    float_sources: FloatSources = option(
        "keep",
        "float matrices: keep = as float parts, ternary = rounded to trits, with the rest of the "
        "rounding in the votes",
    )


@frozen(kw_only=True)
class GgufConfig:
    """Options of the exporter ``gguf``."""

    type: GgufType = option(
        "auto",
        "type of the ternary matrices, which has to hold each exactly; auto = for each matrix the "
        "smallest type that does. Float matrices are f16, bf16 or f32, the first that is exact, "
        "unless a float type is named here",
    )
    float_type: GgufFloatType = option(
        "auto",
        "type to which float matrices (embedding, head, float linears) are rounded; auto = they "
        "stay exact, see type",
    )


@frozen(kw_only=True)
class HfExportConfig:
    """Options of the exporter ``hf``."""

    layout: Layout = option(
        "auto",
        "packed = 2 bits per weight, for one exponent per matrix; dense_w1a8 = 16 bits, for any "
        "exponents; both with int8 activations; dense = an ordinary float model; auto = "
        "dense_w1a8, or dense for a model with float linears",
    )
    dtype: FloatDtype | None = option(
        None,
        "dtype of float tensors, in which transformers computes; a ternary weight is exact in "
        "both; null = bfloat16 for dense_w1a8, else float32",
    )
    tokenizer: bool = option(True, "write the run's tokenizer too")
    shard_megabytes: int = option(
        5000,
        "most megabytes (10^6 bytes) of tensors in one file; the rest goes into further files",
        validator=Rule(
            "a whole number of at least 1",
            lambda value: value >= 1,
            {"minimum": 1},
        ),
    )

    @property
    def float_dtype(self) -> str:
        """``dtype`` with its default filled in."""
        if self.dtype is not None:
            return self.dtype
        return "bfloat16" if self.layout == "dense_w1a8" else "float32"
