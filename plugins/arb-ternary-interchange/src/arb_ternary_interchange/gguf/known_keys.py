"""The keys of GGUF files that an import uses, and those that change nothing in a run.

Every other key is named in the notes of an import, because llama.cpp may compute something else
with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from arb_ternary_interchange.gguf.metadata import ArrayInFile, Metadata
from arb_ternary_interchange.gguf.model_keys import GROUP_SIZE
from arb_ternary_interchange.inspection import printable

#: Keys under the architecture's name that become options of the decoder, or are compared with them.
USED_OF_MODEL: Final = (
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "expert_count",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.attn_factor",
    "rope.scaling.factor",
    "rope.scaling.type",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_ext_factor",
)
#: Other keys that are used.
USED: Final = (
    GROUP_SIZE,
    "general.alignment",
    "general.architecture",
    "split.count",
    "tokenizer.chat_template",
    "tokenizer.ggml.add_bos_token",
    "tokenizer.ggml.add_eos_token",
    "tokenizer.ggml.bos_token_id",
    "tokenizer.ggml.eom_token_id",
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.merges",
    "tokenizer.ggml.model",
    "tokenizer.ggml.padding_token_id",
    "tokenizer.ggml.pre",
    "tokenizer.ggml.token_type",
    "tokenizer.ggml.tokens",
    "tokenizer.ggml.unknown_token_id",
)
#: Keys under the architecture's name that change nothing, and why.
HARMLESS_OF_MODEL: Final[Mapping[str, str]] = {
    "attention.layer_norm_epsilon": "only norms with a mean have it, and these models have none",
    "rope.scaling.finetuned": "says how the model was trained",
    "rope.scaling.original_context_length": "read for YaRN only, which is refused",
    "rope.scaling.yarn_beta_fast": "read for YaRN only, which is refused",
    "rope.scaling.yarn_beta_slow": "read for YaRN only, which is refused",
    "tensor_data_layout": "llama.cpp does not read it",
    "vocab_size": "the embedding has this many rows",
}
#: Regular expressions of other keys that change nothing, and why.
HARMLESS: Final[Mapping[str, str]] = {
    r"general\.(?!type$).*": "names, authors, licences and sources; tensors state their own types",
    r"quantize\.imatrix\..*": "how llama-quantize chose the weights that are in the file",
    r"split\.(no|tensors\.count)": "the place of a part; a file with other parts is refused",
    r"tokenizer\.chat_templates?(\..*)?": "further templates beside the one that is used",
    r"tokenizer\.ggml\.\w+_token_ids?": "tokens for tasks that are not done here",
    r"tokenizer\.ggml\.(add_space_prefix|precompiled_charsmap|remove_extra_whitespaces|scores)": (
        "read for tokenizers of sentencepiece, which a note names as a whole"
    ),
    r"tokenizer\.ggml\.token_type_count": "read for BERT only",
    r"tokenizer\.huggingface\.json": "a copy of the tokenizer, which llama.cpp does not read",
}
#: Values with which a key under the architecture's name changes nothing; with others the model
#: computes what the decoder cannot do.
NEUTRAL_OF_MODEL: Final[Mapping[str, tuple[object, ...]]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "attention.sliding_window": (0,),
    "attn_logit_softcapping": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "expert_used_count": (0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "pooling_type": (0,),
    "residual_scale": (0.0, 1.0),
    "rope.scaling.alpha": (0.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "use_parallel_residual": (False,),
}
#: The same for other keys.
NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "general.type": ("model",),
    "tokenizer.ggml.add_sep_token": (False,),
}
#: Values of ``hidden_activation`` by the activation that the decoder computes.
_ACTIVATIONS: Final = {"swiglu": "silu", "relu2": "relu2", "reglu2": "relu2"}

#: Unknown keys that a note names each; a further note counts the rest.
_MOST_NAMED: Final = 20
_MOST_CHARACTERS: Final = 80


def unused_keys(metadata: Metadata, architecture: str, activation: str) -> Iterator[str]:
    """Yield a sentence for each key that is neither used nor known to change nothing.

    Args:
        metadata: keys and values of a file.
        architecture: its architecture.
        activation: the activation of the decoder that is made of it.
    """
    neutral = {f"{architecture}.{name}": values for name, values in NEUTRAL_OF_MODEL.items()}
    neutral |= NEUTRAL
    neutral[f"{architecture}.hidden_activation"] = (_ACTIVATIONS[activation],)
    known = {f"{architecture}.{name}" for name in (*USED_OF_MODEL, *HARMLESS_OF_MODEL)}
    known |= {*USED, *neutral}
    for key, values in neutral.items():
        if key in metadata and metadata[key] not in values:
            yield f"{key} is {_shown(metadata[key])}, {_lack(key)}"
    unknown = []
    for key in metadata:
        if key in known or any(re.fullmatch(pattern, key) for pattern in HARMLESS):
            continue
        unknown.append(key)
    for key in unknown[:_MOST_NAMED]:
        name = printable(key[:_MOST_CHARACTERS])
        yield f"{name} is {_shown(metadata[key])}, a key that is not known here"
    if len(unknown) > _MOST_NAMED:
        yield f"{len(unknown) - _MOST_NAMED} further keys are not known here"


def _lack(key: str) -> str:
    """Return what is left out with a value of ``key`` that changes something."""
    if key.startswith("tokenizer."):
        return "but texts are read here without separators"
    if key.startswith("general."):
        return "but the file is read as a whole model"
    return "which the decoder cannot do"


def _shown(value: Any) -> str:
    if isinstance(value, ArrayInFile):
        return "a list"
    text = str(value)
    if len(text) > _MOST_CHARACTERS:
        text = f"{text[:_MOST_CHARACTERS]}..."
    return printable(text)
