"""How a folder's linears are packed: the ``quantization_config`` of its ``config.json``."""

from __future__ import annotations

from attrs import frozen

from arb_ternary_interchange.huggingface.json_file import Values


@frozen
class Quantization:
    """The BitNet quantisation of transformers.

    Attributes:
        divides: outputs are divided by ``weight_scale`` (``bitlinear``); else they are multiplied
            (``autobitlinear``).
        online: weights are float, and every pass makes them ternary: ``round(w / mean |w|)`` times
            ``mean |w|``.
        skipped: modules that stay float, by the names that transformers compares; None = its
            default, the head.
    """

    divides: bool
    online: bool
    skipped: tuple[str, ...] | None

    @property
    def description(self) -> str:
        """In words, for ``arb inspect``."""
        if self.online:
            return "mean |w| of each matrix, in every pass (autobitlinear, online)"
        return (
            f"one a matrix, "
            f"{'divided by (bitlinear)' if self.divides else 'multiplied with (autobitlinear)'}"
        )


def read_quantization(config: Values | None) -> Quantization | None:
    """The quantisation that a ``config.json`` names; None when it names none.

    Raises:
        DataError: it is another than BitNet's, or has a norm in every linear.
    """
    if config is None:
        return None
    config.word("quant_method", ("bitnet",), hint="Only BitNet's packed linears are ternary.")
    divides = (
        config.word("linear_class", ("bitlinear", "autobitlinear"), "bitlinear") == "bitlinear"
    )
    online = config.word("quantization_mode", ("offline", "online"), "offline") == "online"
    if config.boolean("use_rms_norm", False):
        raise config.wrong("use_rms_norm", "false: the decoder's linears have no norm of their own")
    # A bitlinear has packed weights in either mode.
    return Quantization(divides, online and not divides, config.words("modules_to_not_convert"))
