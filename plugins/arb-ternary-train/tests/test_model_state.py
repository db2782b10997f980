"""The state of a model, module by module, equals that of ``state_dict``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from arb_ternary.counters.hashing import MICRO
from arb_ternary.ternary.linear import TernaryLinear
from arb_ternary.ternary.models import ternary_modules
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_train.model_state import ModelState, load_parts


def decoder(seed: int, **options: Any) -> nn.Module:
    torch.manual_seed(seed)
    model = Decoder(
        DecoderConfig(width=40, layers=2, heads=2, max_length=8, group_size=32, **options), 50
    )
    for number, (_, module) in enumerate(ternary_modules(model)):
        votes = torch.randint(
            -1, 2, (module.shape.out_features, module.shape.in_features), dtype=torch.int8
        )
        module.set_votes(votes)
        module.control[MICRO] = seed + number
    return model


class Hooked(nn.Module):
    """A module that customises its state dict and that of its child."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_state_dict_post_hook(_without_bias)
        self.register_load_state_dict_post_hook(lambda _m, keys: keys.missing_keys.clear())


def _without_bias(_module: nn.Module, found: dict[str, Any], prefix: str, _: Any) -> None:
    del found[prefix + "inner.bias"]


MODELS = {
    "pure": {},
    "with gains and norms": {"learned_norms": True, "query_key_norm": True},
    "float parts": {"float_parts": ("embedding", "head", "norms"), "tie_embeddings": True},
    "experts": {"experts": 2},
    "four bits": {"vote_bits": 4},
    "two bits": {"vote_bits": 2},
    "vectors of trits": {"row_scales": True, "learned_norms": True, "vector_trits": 4},
    "correlation": {"embedding_scale_rule": "correlation"},
}


@pytest.mark.parametrize("name", MODELS)
def test_the_parts_are_the_state_dict_and_load_as_it_does(name: str) -> None:
    model = decoder(1, **MODELS[name])
    wanted = model.state_dict()
    parts = [dict(part) for part in ModelState(model).parts()]
    found = {key: tensor for part in parts for key, tensor in part.items()}
    assert list(found) == list(wanted)
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    assert sum(bool(part) for part in parts) > 8
    outlines = dict(ModelState(model).outlines())
    assert {key: (t.dtype, t.shape) for key, t in outlines.items()} == {
        key: (t.dtype, t.shape) for key, t in wanted.items()
    }

    other = decoder(2, **MODELS[name])
    load_parts(other, wanted)
    assert all(torch.equal(tensor, wanted[key]) for key, tensor in other.state_dict().items())


def test_a_module_with_hooks_is_asked_for_all_that_is_in_it() -> None:
    model = nn.Sequential(Hooked(), TernaryLinear(8, 8))
    assert list(dict(ModelState(model).outlines())) == list(model.state_dict())
    assert "0.inner.bias" not in model.state_dict()
    other = nn.Sequential(Hooked(), TernaryLinear(8, 8))
    bias = other[0].inner.bias.clone()  # type: ignore[union-attr]
    load_parts(other, model.state_dict())
    assert torch.equal(other[0].inner.weight, model[0].inner.weight)  # type: ignore[union-attr]
    assert torch.equal(other[0].inner.bias, bias)  # type: ignore[union-attr]


def test_a_tensor_of_another_shape_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
        load_parts(model, {"0.weight": torch.zeros(3, 2), "0.bias": torch.zeros(2)})
