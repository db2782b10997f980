"""Register the components of arb-ternary-vision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from arb_ternary import hookimpl
from arb_ternary.specs import (
    DataSpec,
    GeneratorSpec,
    MaskingSpec,
    ModelSpec,
    StarterSpec,
    TrackerSpec,
)

ARB_API_VERSION = (1, 0)


@hookimpl
def arb_plugin_info() -> Mapping[str, str]:
    return {"summary": "vision: ternary ViT, ConvNet and captioner, image data, augmentation"}


@hookimpl
def arb_register_datasets() -> Sequence[DataSpec]:
    return (
        DataSpec(
            name="digits",
            target="arb_ternary_vision.data.digits:build",
            config="arb_ternary_vision.data.digits:DigitsConfig",
            libraries=("scikit-learn",),
            summary="1,797 handwritten digits of 8 x 8 pixels, part of scikit-learn",
        ),
        DataSpec(
            name="captioned",
            target="arb_ternary_vision.data.captioned:build",
            config="arb_ternary_vision.data.captioned:CaptionedConfig",
            summary="labelled images, each with a text about it",
        ),
        DataSpec(
            name="images",
            target="arb_ternary_vision.data.image_folder:build",
            config="arb_ternary_vision.data.image_folder:ImagesConfig",
            libraries=("pillow",),
            summary="a folder with one sub-folder of images per class",
        ),
        DataSpec(
            name="image_arrays",
            target="arb_ternary_vision.data.arrays:build",
            config="arb_ternary_vision.data.arrays:ArraysConfig",
            summary="images and labels in .npy files or .npz archives",
        ),
    )


@hookimpl
def arb_register_masking() -> Sequence[MaskingSpec]:
    return (
        MaskingSpec(
            name="labels",
            target="arb_ternary_vision.masking.labels:build",
            config="arb_ternary_vision.masking.config:LabelsConfig",
            libraries=("kornia",),
            summary="predicts the class of an image; images may be augmented",
        ),
        MaskingSpec(
            name="captions",
            target="arb_ternary_vision.masking.captions:build",
            config="arb_ternary_vision.masking.config:LabelsConfig",
            libraries=("kornia",),
            summary="predicts the next character of the text about an image; images may be "
            "augmented",
        ),
    )


@hookimpl
def arb_register_models() -> Sequence[ModelSpec]:
    return (
        ModelSpec(
            name="vit",
            target="arb_ternary_vision.models.vit:build",
            config="arb_ternary_vision.models.vit_config:VitConfig",
            summary="vision transformer of ternary linears and norms",
        ),
        ModelSpec(
            name="convnet",
            target="arb_ternary_vision.models.convnet:build",
            config="arb_ternary_vision.models.convnet_config:ConvnetConfig",
            summary="residual network of ternary convolutions",
        ),
        ModelSpec(
            name="captioner",
            target="arb_ternary_vision.models.captioner:build",
            config="arb_ternary_vision.models.captioner_config:CaptionerConfig",
            summary="ternary decoder that writes a text about an image",
        ),
    )


@hookimpl
def arb_register_trackers() -> Sequence[TrackerSpec]:
    return (
        TrackerSpec(
            name="confusion_matrix",
            target="arb_ternary_vision.trackers:build_confusion_matrix",
            config="arb_ternary_vision.trackers:ConfusionConfig",
            summary="a figure of which classes are mistaken for which, at every evaluation",
        ),
    )


@hookimpl
def arb_register_generators() -> Sequence[GeneratorSpec]:
    return (
        GeneratorSpec(
            name="classify",
            target="arb_ternary_vision.cli.classify:classify",
            masking=("labels",),
            summary="classifies images with a model that was trained with the masking labels",
        ),
        GeneratorSpec(
            name="caption",
            target="arb_ternary_vision.cli.caption:caption",
            masking=("captions",),
            summary="writes texts about images",
        ),
    )


@hookimpl
def arb_register_starters() -> Sequence[StarterSpec]:
    return (
        StarterSpec(
            name="digits",
            target="arb_ternary_vision.starters:DIGITS",
            summary="A small pure-ternary convolutional network on handwritten digits. Trains in a "
            "minute on a laptop's CPU.",
        ),
    )
