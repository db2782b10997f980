"""The architecture under which other programs compute a decoder."""

from __future__ import annotations

from arb_ternary.errors import ConfigError
from arb_ternary_text.models.architectures import Architecture, departures, nearest_preset
from arb_ternary_text.models.config import DecoderConfig


def architecture_of(config: DecoderConfig, *, reglu2: bool = False) -> Architecture:
    """Return the architecture whose programs compute this decoder.

    Constant powers of two in front of updates and logits are allowed:
    :func:`.weights.exported_weight` multiplies the weights by them.

    Args:
        config: the decoder's options.
        reglu2: whether those programs compute ``relu(gate)^2 * up``. Transformers does; the graphs
            of llama.cpp use SiLU, whatever the model says.

    Raises:
        ConfigError: no architecture is this decoder; the message names the options in the way and
            the nearest preset.
    """
    best = config.architecture or nearest_preset(config)[0] or "llama"
    wrong = list(departures(config, best))
    if not reglu2 and config.feed_forward_activation == "reglu2":
        wrong.insert(0, ("activation", "swiglu"))
    if not wrong:
        return best
    options = ", ".join(f"{name}: {_shown(config, name)}" for name, _ in wrong)
    wanted = ", ".join(f"{name}: {value}" for name, value in wrong)
    raise ConfigError(
        f"model: no architecture of this format has {options}",
        f"The nearest preset is `architecture: {best}`, with {wanted}: train such a model, or "
        f"export to safetensors.",
    )


def _shown(config: DecoderConfig, name: str) -> str:
    resolved = {
        "activation": config.feed_forward_activation,
        "sub_norms": config.has_sub_norms,
        "query_key_norm": config.has_query_key_norm,
        "tie_embeddings": config.tied,
        "head_dim": config.key_features,
    }
    value = resolved.get(name, getattr(config, name))
    return str(value).lower() if isinstance(value, bool) else str(value)
