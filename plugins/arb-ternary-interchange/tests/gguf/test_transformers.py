"""Transformers loads exported files of the architecture llama."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from arb_ternary_text.models.decoder import Decoder

TEXT = b"Once more unto the breach, dear friends"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["f32", "f16", "tq1_0", "tq2_0", "q4_0"])
@pytest.mark.filterwarnings("ignore")
def test_transformers_computes_the_same(
    make_decoder: Callable[..., Decoder], export: Callable[..., Path], ours: Any, kind: str
) -> None:
    transformers = pytest.importorskip("transformers")
    model = make_decoder("llama")
    path = export(model, kind)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    with torch.no_grad():
        found = torch.log_softmax(theirs(torch.tensor([list(TEXT)])).logits[0].double(), dim=-1)
    torch.testing.assert_close(found, ours(model, TEXT, "float"), atol=1e-4, rtol=0)
