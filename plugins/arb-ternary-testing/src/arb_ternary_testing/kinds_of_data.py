"""What a tiny run is made of, by what its samples are: for tests whose components come from the
registry.

A masking strategy reads samples of one kind, and a model too. Who registers a masking strategy for
samples that are no text adds a kind here; everything that is not named is text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from attrs import evolve, frozen


@frozen
class KindOfData:
    """Samples of one kind, and models that read them.

    Attributes:
        data: the section of a source that needs no download; ``{text}`` in a value stands for a
            text file.
        models: sections of models, width 16 or less; where such models grow, the first one does.
        masking: strategies that read such samples.
        phase: options of a phase that takes short steps, as far as it has them.
        grows: whether a phase may add blocks to the first model.
    """

    data: Mapping[str, Any]
    models: tuple[Mapping[str, Any], ...]
    masking: tuple[str, ...]
    phase: Mapping[str, Any]
    grows: bool = True


#: Bytes, because masked objectives need an id that the text does not use.
TEXT: Final = KindOfData(
    data={"name": "text", "path": "{text}", "tokenizer": "bytes"},
    models=(
        {
            "name": "decoder",
            "width": 16,
            "layers": 1,
            "heads": 2,
            "max_length": 8,
            "group_size": 32,
        },
    ),
    masking=(),
    phase={"batch_size": 2, "block_size": 8},
)

KINDS_OF_DATA: Final[Mapping[str, KindOfData]] = {
    "text": TEXT,
    "text with gaps": evolve(
        TEXT,
        models=tuple({**model, "causal": False} for model in TEXT.models),
        masking=("absorbing",),
    ),
    "images": KindOfData(
        data={"name": "digits"},
        models=(
            {
                "name": "vit",
                "width": 16,
                "layers": 1,
                "heads": 2,
                "patch_size": 4,
                "group_size": 32,
            },
            {"name": "convnet", "width": 8, "layers": 1, "group_size": 32},
        ),
        masking=("labels",),
        phase={"batch_size": 64},
    ),
    "noisy images": KindOfData(
        data={"name": "digits"},
        models=(
            {
                "name": "dit",
                "width": 16,
                "layers": 1,
                "heads": 2,
                "patch_size": 4,
                "group_size": 32,
            },
            {"name": "unet", "width": 8, "layers": 1, "group_size": 32},
        ),
        masking=("noise",),
        phase={"batch_size": 64},
        grows=False,
    ),
    "images with texts": KindOfData(
        data={"name": "captioned"},
        models=(
            {
                "name": "captioner",
                "width": 16,
                "layers": 1,
                "image_layers": 1,
                "heads": 2,
                "patch_size": 4,
                "max_length": 4,
                "group_size": 32,
            },
        ),
        masking=("captions",),
        phase={"batch_size": 64},
        grows=False,
    ),
}


def kind_of_masking(name: str) -> KindOfData:
    """What the masking strategy ``name`` reads."""
    return next((kind for kind in KINDS_OF_DATA.values() if name in kind.masking), TEXT)


def kind_of_model(name: str) -> KindOfData:
    """What the model ``name`` reads."""
    named = (
        kind for kind in KINDS_OF_DATA.values() if name in {model["name"] for model in kind.models}
    )
    return next(named, TEXT)
