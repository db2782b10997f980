"""Sections of tiny runs by the kind of their samples, for tests that try registered components.

A masking strategy reads samples of one kind, and so does a model. A distribution that registers a
masking strategy for samples other than text adds a kind here. Components that no kind names read
text.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from attrs import evolve, frozen


@frozen
class KindOfData:
    """Samples of one kind, and models that read them.

    Attributes:
        data: the section of a source that needs no download; ``{text}`` in a value stands for a
            text file.
        models: sections of models, width 16 or less. If such models grow, the first one does.
        masking: strategies that read such samples.
        phase: options that make a phase take short steps, if it has them.
        grows: whether a phase may add blocks to the first model.
    """

    data: Mapping[str, Any]
    models: tuple[Mapping[str, Any], ...]
    masking: tuple[str, ...]
    phase: Mapping[str, Any]
    grows: bool = True


_TRANSFORMER: Final = {"width": 16, "layers": 1, "heads": 2, "group_size": 32}
_DECODER: Final = {"name": "decoder", **_TRANSFORMER, "max_length": 8}

#: Tokens are bytes, because masked objectives need an id that the text does not use.
TEXT: Final = KindOfData(
    data={"name": "text", "path": "{text}", "tokenizer": "bytes"},
    models=(_DECODER,),
    masking=(),
    phase={"batch_size": 2, "block_size": 8},
)
#: Plain texts as documents in rows, which need neither a template nor a tokenizer's file.
_CONVERSATIONS: Final = evolve(
    TEXT,
    data={
        "name": "chat",
        "train": str(Path(__file__).with_name("conversations.jsonl")),
        "tokenizer": "bytes",
    },
    masking=("answers",),
)
_TEXT_WITH_GAPS: Final = evolve(
    TEXT, models=({**_DECODER, "causal": False},), masking=("absorbing",)
)
_IMAGES: Final = KindOfData(
    data={"name": "digits"},
    models=(
        {"name": "vit", **_TRANSFORMER, "patch_size": 4},
        {"name": "convnet", "width": 8, "layers": 1, "group_size": 32},
    ),
    masking=("labels",),
    phase={"batch_size": 64},
)
_NOISY_IMAGES: Final = KindOfData(
    data={"name": "digits"},
    models=(
        {"name": "dit", **_TRANSFORMER, "patch_size": 4},
        {"name": "unet", "width": 8, "layers": 1, "group_size": 32},
    ),
    masking=("noise",),
    phase={"batch_size": 64},
    grows=False,
)
_IMAGES_WITH_TEXTS: Final = KindOfData(
    data={"name": "captioned"},
    models=(
        {"name": "captioner", **_TRANSFORMER, "image_layers": 1, "patch_size": 4, "max_length": 4},
    ),
    masking=("captions",),
    phase={"batch_size": 64},
    grows=False,
)

KINDS_OF_DATA: Final[Mapping[str, KindOfData]] = {
    "text": TEXT,
    "text with gaps": _TEXT_WITH_GAPS,
    "conversations": _CONVERSATIONS,
    "images": _IMAGES,
    "noisy images": _NOISY_IMAGES,
    "images with texts": _IMAGES_WITH_TEXTS,
}


def kind_of_masking(name: str) -> KindOfData:
    """Return the kind of data that the masking strategy ``name`` reads."""
    for kind in KINDS_OF_DATA.values():
        if name in kind.masking:
            return kind
    return TEXT


def kind_of_model(name: str) -> KindOfData:
    """Return the kind of data that the model ``name`` reads."""
    for kind in KINDS_OF_DATA.values():
        if any(model["name"] == name for model in kind.models):
            return kind
    return TEXT
