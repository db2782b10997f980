"""What vision registers."""

from __future__ import annotations

from collections.abc import Mapping

from arb_ternary import hookimpl

ARB_API_VERSION = (1, 0)


@hookimpl
def arb_plugin_info() -> Mapping[str, str]:
    return {"summary": "vision: ternary ViT and ConvNet, image data, labels with augmentation, a captioner"}
