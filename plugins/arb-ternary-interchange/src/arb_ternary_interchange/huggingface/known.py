"""Keys and files of model folders that change nothing in a run.

An import uses a key or a file, or finds it here, or names it in its notes, because transformers may
compute something else with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from arb_ternary_interchange.inspection import printable

#: Keys of ``config.json`` that change nothing, by the reason.
HARMLESS_OF_CONFIG: Final[Mapping[str, tuple[str, ...]]] = {
    "names, versions, and how transformers runs the model": (
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_name_or_path",
        "architectures",
        "attn_implementation",
        "dtype",
        "finetuning_task",
        "problem_type",
        "task_specific_params",
        "tokenizer_class",
        "torch_dtype",
        "torchscript",
        "transformers_version",
        "use_bfloat16",
        "use_cache",
    ),
    "what a call returns": (
        "chunk_size_feed_forward",
        "id2label",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "return_dict",
        "return_dict_in_generate",
    ),
    "how weights were drawn and trained": (
        "attention_dropout",
        "initializer_range",
        "pretraining_tp",
        "tf_legacy_loss",
    ),
    "special tokens by role, and how texts are generated": (
        "bad_words_ids",
        "begin_suppress_tokens",
        "bos_token_id",
        "decoder_start_token_id",
        "diversity_penalty",
        "do_sample",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "eos_token_id",
        "exponential_decay_length_penalty",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "length_penalty",
        "max_length",
        "min_length",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "pad_token_id",
        "prefix",
        "remove_invalid_values",
        "repetition_penalty",
        "sep_token_id",
        "suppress_tokens",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
    ),
    "read where the class of the model has a window, within which the longest sequence stays": (
        "max_window_layers",
        "sliding_window",
    ),
    "read only with 'use_rms_norm', which is refused": ("quantization_config.rms_norm_eps",),
}
#: Values with which a key of ``config.json`` changes nothing. Null never does.
NEUTRAL_OF_CONFIG: Final[Mapping[str, tuple[object, ...]]] = {
    "add_cross_attention": (False,),
    "attention_bias": (False,),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "mlp_bias": (False,),
    "pruned_heads": ({},),
    "tie_encoder_decoder": (False,),
    "use_mrope": (False,),
    "use_sliding_window": (False,),
}
#: Keys of ``tokenizer_config.json`` that change nothing, by the reason.
HARMLESS_OF_TOKENIZER: Final[Mapping[str, tuple[str, ...]]] = {
    "names and places": (
        "auto_map",
        "backend",
        "is_local",
        "model_input_names",
        "name_or_path",
        "processor_class",
        "special_tokens_map_file",
        "tokenizer_file",
        "use_fast",
    ),
    "how texts become batches: a run reads one stream of tokens": (
        "max_length",
        "model_max_length",
        "pad_to_multiple_of",
        "padding",
        "padding_side",
        "stride",
        "truncation",
        "truncation_side",
        "truncation_strategy",
    ),
    "read as special tokens and template": ("add_bos_token", "add_eos_token", "chat_template"),
    "read by a template of an older program": ("use_default_system_prompt",),
    "how ids become text": (
        "clean_up_tokenization_spaces",
        "errors",
        "spaces_between_special_tokens",
    ),
    "read where a tokenizer is converted; its file is taken as it is": (
        "from_slow",
        "legacy",
        "sp_model_kwargs",
    ),
}
#: Values with which a key of ``tokenizer_config.json`` changes nothing.
NEUTRAL_OF_TOKENIZER: Final[Mapping[str, tuple[object, ...]]] = {
    "do_lower_case": (False,),
    "split_special_tokens": (False,),
}
#: Regular expressions of files that change nothing, and why.
HARMLESS_FILES: Final[Mapping[str, str]] = {
    r"\..*": "hidden files belong to other programs",
    r"(?i:readme|licen[cs]e|notice|copying|changelog|citation|\w*use_policy)(\..*)?": "about it",
    r"(?i:.*\.(md|pdf|png|jpe?g|gif|svg|webp))": "texts and pictures about the model",
    r"generation_config\.json|(additional_)?chat_templates?(\.\w+)?": (
        "how texts are generated; end tokens and the template are read"
    ),
    r".*\.py": "code, which is never run: a note names the code that 'auto_map' asks for",
    r"(?!adapter_).*\.(bin|ckpt|gguf|h5|msgpack|onnx|ot|pt|pth|tflite)(\.index\.json)?": (
        "the same weights in another form, or the state of a training"
    ),
    r"(trainer_state|(all|train|eval)_results)\.json": "the record of a training",
}
#: Files that make a tokenizer, or say something of it.
TOKENIZER_FILES: Final = (
    "added_tokens.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)

#: Names that a note has before it counts the rest.
_MOST_NAMED: Final = 5


def unknown_keys(
    values: Mapping[str, object],
    harmless: Mapping[str, tuple[str, ...]],
    neutral: Mapping[str, tuple[object, ...]],
) -> list[str]:
    """Return the keys of ``values`` that may change something.

    Args:
        values: the keys of a file that are not used, with their values.
        harmless: keys that change nothing, by the reason.
        neutral: values of keys with which these change nothing.
    """
    known = {key for keys in harmless.values() for key in keys}
    unknown = []
    for key, value in values.items():
        if key in known or value in neutral.get(key, ()):
            continue
        unknown.append(key)
    return unknown


def unknown_files(folder: Path, weights: Iterable[Path]) -> list[str]:
    """Return the names of the files of a folder that may change something.

    Args:
        folder: the folder; folders in it are not looked at.
        weights: the weight files that are read, and their index.
    """
    used = {"config.json", *TOKENIZER_FILES, *(path.name for path in weights)}
    unknown = []
    for name in sorted(path.name for path in folder.iterdir() if path.is_file()):
        if name in used or any(re.fullmatch(pattern, name) for pattern in HARMLESS_FILES):
            continue
        unknown.append(name)
    return unknown


def note_of(what: str, names: list[str]) -> tuple[str, ...]:
    """Return a note that ``what`` is true of ``names``; none if there are no names."""
    if not names:
        return ()
    shown = ", ".join(printable(name[:120]) for name in names[:_MOST_NAMED])
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return (f"{what}: {shown}{more}.",)
