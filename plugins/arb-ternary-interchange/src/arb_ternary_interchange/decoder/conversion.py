"""A published model becomes the model of a run: where its scales go, what stays float, and how the
weights get there.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import torch
from attrs import evolve, frozen
from torch import Tensor

from arb_ternary.errors import ConfigError, DataError
from arb_ternary_interchange.decoder.folding import fold_block
from arb_ternary_interchange.decoder.placement import Placement, check_shape, fill
from arb_ternary_interchange.decoder.published import PublishedModel, ScaledTrits
from arb_ternary_interchange.decoder.scales import Grouping, coarsest_grouping, split_scales
from arb_ternary_interchange.decoder.tensors import ENDS, DecoderShape, is_bias
from arb_ternary_interchange.fine_tuning import data_section
from arb_ternary_interchange.options import ImportConfig
from arb_ternary_interchange.protocols import ImportedModel
from arb_ternary_text.data.tokenizers import padded_to
from arb_ternary_text.models.architectures import PRESETS, preset_of
from arb_ternary_text.models.config import MAX_SCALE_EXPONENT, DecoderConfig

_USE_ROUND: Final = "Use `--scales round`, which takes the nearest power of two of each."
_INNER_NORMS: Final = ("output_norm", "hidden_norm", "query_norm", "key_norm")
#: Rows that are looked at together.
_ROWS: Final = 1024


@frozen
class _Matrix:
    """A matrix, as far as the conversion has to know it.

    Attributes:
        ternary: whether the decoder holds it as trits; the other attributes, those of
            :class:`.scales.Split`, are of interest only then.
    """

    ternary: bool
    grouping: Grouping = "tensor"
    remainder: float | None = 1.0
    error: float = 0.0
    has_row_factors: bool = True


def convert(published: PublishedModel, config: ImportConfig) -> ImportedModel:
    """Decide how a decoder holds a published model. Every tensor is looked at here, and read again
    when the model is filled.

    Scales that are not powers of two: with ``scales: fold`` they go into gains and eps as far as a
    norm can take them (:mod:`.folding`), so that the model computes the same; what no norm can take
    stays a float factor of its linear, or of its rows if these have different ones. With ``round``
    each becomes the nearest power of two, and gains stay as they are. With ``float`` each linear
    keeps its scale as a float factor.

    Float matrices: with ``float_sources: keep`` embedding, head or linears are float parts; if only
    some linears are ternary, all become float. With ``ternary`` they become trits by the absmean
    rule, with the residue of the rounding in the accumulators.

    Raises:
        DataError: a tensor is missing or of another shape than the options say, or is not finite.
        ConfigError: options contradict each other, or scales cannot be kept as ``scales`` says.
    """
    return _Conversion(published, config).result()


class _Conversion:
    """The decisions of one conversion, made step by step in :meth:`result`."""

    def __init__(self, published: PublishedModel, config: ImportConfig) -> None:
        self.published = published
        self.scales = config.scales
        self.float_sources = config.float_sources
        self.notes = list(published.unmapped)
        self.names = set(published.names())
        self.options: dict[str, Any] = {"architecture": published.architecture, **published.options}
        self.options.setdefault("tie_embeddings", "head" not in self.names)
        if self.options.get("group_size") == "tensor":
            self.options.setdefault("scale_rule", "frozen")
        # These options decide the sizes; how weights are held is decided later.
        self._leave_preset_if_unfit()
        self.config = self._decoder_config()
        if self.config.attention != "standard":
            raise ConfigError(
                f"model: attention {self.config.attention} exists in this program only, and no "
                f"format has its tensors",
                "Give the plugin's options `attention: standard`; a run of this program is "
                "continued with `--init-from`.",
            )
        if self.config.tied and "head" in self.names:
            self.names.discard("head")
            self.notes.append("head: left out, because the model's head is its embedding")
        self.matrices: dict[str, _Matrix] = {}
        self.vectors: dict[str, Tensor] = {}
        self.eps: dict[str, float] = {}
        self.factors: dict[str, float] = {}
        self.row_scales = False

    def result(self) -> ImportedModel:
        """Look at every tensor, decide, and return how the model is filled."""
        self._look_at_tensors()
        self._complete_biases()
        self._choose_dense()
        self._place_scales()
        self._place_logit_scale()
        self.options |= self._holding_options()
        self._decoder_config()
        size = self.published.vocabulary_size
        tokenizer = padded_to(self.published.tokenizer, size)
        placement = Placement(tuple(self.matrices), self.vectors, self.eps, self.factors)
        return ImportedModel(
            model={"name": "decoder", **self.options},
            vocabulary_size=size,
            attachments={"tokenizer": tokenizer},
            fill=partial(fill, self.published, placement),
            notes=tuple(self.notes),
            data=data_section(tokenizer, size),
        )

    # --- what the published model has

    def _leave_preset_if_unfit(self) -> None:
        """Write out what the architecture decides if the model has an option that is not in the
        architecture's preset.
        """
        try:
            DecoderConfig(**self.options)
        except (ValueError, TypeError):
            name = self.options.pop("architecture")
            preset = preset_of(name if name in PRESETS else None)
            decided = {
                "activation": preset.activation,
                "sub_norms": preset.sub_norms,
                "query_key_norm": preset.query_key_norm,
            }
            self.options = {**decided, **self.options}
            self.notes.append(
                f"the model is not quite of architecture {name}: other formats may not take it back"
            )

    def _decoder_config(self) -> DecoderConfig:
        try:
            return DecoderConfig(**self.options)
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"the model cannot be held by the decoder: {error.args[0]}"
            ) from error

    def _shape(self) -> DecoderShape:
        return DecoderShape(self.config, self.published.vocabulary_size)

    def _look_at_tensors(self) -> None:
        wanted = {}
        for path, shape in self._shape().tensors():
            if path in self.names:
                wanted[path] = shape
            elif not is_bias(path) or self._has_bias_beside(path):
                # Raised at once: the number of layers comes from the file, and may be any.
                raise DataError(f"{path}: not in the model, whose architecture and sizes need it")
        for path in sorted(self.names - set(wanted)):
            self.notes.append(f"{path}: left out, because the decoder has no such part")
        for path, shape in wanted.items():
            self._look_at(path, shape)

    def _has_bias_beside(self, path: str) -> bool:
        """Whether the published model has a bias in the same layer as the bias at ``path``."""
        layer = path.rpartition(".")[0]
        return any(f"{layer}.{name}" in self.names for name in ("query", "key", "value"))

    def _look_at(self, path: str, shape: tuple[int, ...]) -> None:
        found = self.published.read(path)
        check_shape(path, found, shape)
        if isinstance(found, ScaledTrits):
            if len(shape) == 1:
                raise DataError(f"{path}: ternary, and a gain or bias has to be float")
            split = split_scales(path, found)
            self.matrices[path] = _Matrix(
                True, split.grouping, split.remainder, split.error, split.row_factors is not None
            )
            return
        if not all(bool(torch.isfinite(part).all()) for part in torch.split(found, _ROWS)):
            raise DataError(f"{path}: a number is not finite")
        if len(shape) == 1:
            self.vectors[path] = found.to(torch.float64)
        else:
            self.matrices[path] = _Matrix(self.float_sources == "ternary", "row")

    def _complete_biases(self) -> None:
        """Add biases of 0 to the layers without biases if another layer has some."""
        if not any(is_bias(path) for path in self.vectors):
            return
        for path, shape in self._shape().tensors():
            if is_bias(path):
                self.vectors.setdefault(path, torch.zeros(shape, dtype=torch.float64))

    def _linears(self) -> list[str]:
        return [path for path in self.matrices if path not in ENDS]

    def _choose_dense(self) -> None:
        """Decide which ternary matrices the decoder can only hold as float ones."""
        floats = [path for path in self._linears() if not self.matrices[path].ternary]
        ternary = [path for path in self._linears() if self.matrices[path].ternary]
        if floats and ternary:
            for path in ternary:
                self._make_dense(path)
            self.notes.append(
                f"{len(ternary)} of {len(floats) + len(ternary)} linears are ternary and become "
                f"float, because {floats[0]} is float; float_sources: ternary makes all of them "
                f"ternary"
            )
        # An embedding has one exponent per row, and no norm before it or after it takes a factor.
        for path in ENDS if self.config.tied else ENDS[:1]:
            matrix = self.matrices.get(path)
            if matrix is None or not matrix.ternary:
                continue
            keeps_scale = self.scales != "round" and matrix.remainder != 1.0
            if keeps_scale or isinstance(matrix.grouping, int):
                self._make_dense(path)
                self.notes.append(
                    f"{path}: its scales are not powers of two, one per row; kept as a float part"
                )

    def _make_dense(self, path: str) -> None:
        self.matrices[path] = evolve(self.matrices[path], ternary=False)

    def _ternary(self) -> dict[str, _Matrix]:
        """Return the matrices that the decoder holds as trits."""
        return {path: matrix for path, matrix in self.matrices.items() if matrix.ternary}

    # --- where scales go

    def _place_scales(self) -> None:
        if self.scales == "round":
            self._note_rounding()
            return
        matrices = self._ternary()
        # If one linear has factors of rows, all of them do, and a remainder needs no other place.
        self.row_scales = any(matrix.remainder is None for matrix in matrices.values())
        remainders: dict[str, float] = {}
        for path, matrix in matrices.items():
            if self.row_scales and matrix.has_row_factors:
                continue
            if matrix.remainder is None:
                raise ConfigError(
                    f"{path}: its scales differ by more than powers of two, and no gain or factor "
                    f"takes them all",
                    _USE_ROUND,
                )
            if matrix.remainder != 1.0:
                remainders[path] = matrix.remainder
        if self.scales == "float":
            self.factors = remainders
        else:
            self._fold(remainders)
        if not self.row_scales:
            return
        if self.factors:
            raise ConfigError(
                f"{next(iter(self.factors))}: no norm takes its factor, and rows of other "
                f"linears have factors",
                _USE_ROUND,
            )
        self.notes.append(
            "rows have float factors, which are trained; `--scales round` makes them powers of two"
        )

    def _note_rounding(self) -> None:
        errors = {path: matrix.error for path, matrix in self._ternary().items()}
        worst = max(errors, key=errors.__getitem__, default="")
        if worst and errors[worst] > 0:
            self.notes.append(
                "scales are rounded to powers of two: the largest relative error is "
                f"{errors[worst]:.1%}, of {worst}"
            )

    def _fold(self, remainders: Mapping[str, float]) -> None:
        for number in range(self.config.layers):
            self._fold_block(f"blocks.{number}.", remainders)
        if "head" in remainders:
            self._multiply("final_norm", remainders["head"])
        if self.factors:
            self.notes.append(
                f"{len(self.factors)} float factors of linears are kept, which no norm of "
                f"architecture {self.published.architecture} takes; `--scales round` makes them "
                f"powers of two"
            )

    def _fold_block(self, prefix: str, remainders: Mapping[str, float]) -> None:
        config = self.config
        inside = {
            path.removeprefix(prefix): remainder
            for path, remainder in remainders.items()
            if path.startswith(prefix)
        }
        folded = fold_block(
            inside,
            config.feed_forward_activation,
            sub_norms=config.has_sub_norms,
            query_key_norm=config.has_query_key_norm,
        )
        for path, factor in (folded.gains | folded.biases).items():
            self._multiply(prefix + path, factor)
        for path, factor in folded.eps.items():
            self.eps[prefix + path] = factor * config.norm_eps
        for path, factor in folded.left.items():
            self.factors[prefix + path] = factor

    def _multiply(self, path: str, factor: float) -> None:
        if path in self.vectors:
            self.vectors[path] = self.vectors[path] * factor

    def _gains(self) -> dict[str, Tensor]:
        return {path: gain for path, gain in self.vectors.items() if not is_bias(path)}

    def _place_logit_scale(self) -> None:
        """Make the gain of the final norm the model's ``logit_scale`` if no other norm has a gain
        and this one is a power of two throughout.
        """
        gains = self._gains()
        final = gains.pop("final_norm")
        if any(_has_gain(gain) for gain in gains.values()) or "logit_scale" in self.options:
            return
        mantissa, exponent = torch.frexp(final[0])
        if float(mantissa) != 0.5 or not bool((final == final[0]).all()):
            return
        logit_scale = int(exponent) - 1
        if abs(logit_scale) <= MAX_SCALE_EXPONENT:
            self.options["logit_scale"] = logit_scale
            self.vectors["final_norm"] = torch.ones_like(final)

    # --- how weights are held

    def _holding_options(self) -> dict[str, Any]:
        """Return the options of the decoder that say how it holds its weights."""
        gains = self._gains()
        ternary = self._ternary()
        dense = self.matrices.keys() - ternary.keys()
        parts: list[str] = [path for path in ENDS if path in dense]
        if self.config.tied and "embedding" in dense:
            parts.append("head")
        if any(_has_gain(gain) for gain in gains.values()):
            parts.append("norms")
        if dense & set(self._linears()):
            parts.append("linears")
        inner = [gain for path, gain in gains.items() if path.endswith(_INNER_NORMS)]
        chosen: dict[str, Any] = {
            "float_parts": parts,
            "inner_gains": any(_has_gain(gain) for gain in inner),
            "stored_eps": bool(self.eps),
            "linear_scales": bool(self.factors),
            "row_scales": self.row_scales,
            "query_key_value_bias": any(is_bias(path) for path in self.vectors),
        }
        groupings = [matrix.grouping for path, matrix in ternary.items() if path != "embedding"]
        if groupings:
            size = self.options.get("group_size", coarsest_grouping(groupings))
            rule = "frozen" if size == "tensor" else self.options.get("scale_rule", "residual")
            chosen["group_size"] = size
            chosen["scale_rule"] = rule
        if "linears" in parts:
            chosen["activations"] = self.options.get("activations", "float")
        return {name: value for name, value in chosen.items() if value not in (False, [])}


def _has_gain(gain: Tensor) -> bool:
    return not bool((gain == 1).all())
