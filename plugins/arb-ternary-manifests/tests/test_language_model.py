"""Topologies of manifests as options of the decoder."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch

from arb_ternary.config.errors import Faulty, show_path
from arb_ternary.config.yaml_document import read_yaml
from arb_ternary_manifests.language_model import decoder_section
from arb_ternary_text.models.config import FLOAT_PARTS, DecoderConfig
from arb_ternary_text.models.decoder import Decoder

#: The system of the training guide's manifest "Llama to DBA", its variables written out.
GUIDE = """
model:
  type: TransformerModel
  topology:
    type: StackedTopology
    layers:
      - type: NestedTopology
        repeat: 16
        layers:
          - type: ResidualTopology
            layers:
              - type: RMSNormLayer
                d_model: 2048
              - type: AttentionLayer
                d_model: 2048
                n_heads: 32
                n_kv_heads: 8
                mode: decoupled      # DBA mode
                sem_dim: 128
                geo_dim: 256
                rope_enabled: true
          # ... FFN blocks ...
"""
#: Llama 3.2 1B, all of it.
LLAMA = """
model:
  type: TransformerModel
  tied_embeddings: true
  embedder: {type: token, vocab_size: 128256, d_model: 2048}
  topology:
    type: StackedTopology
    layers:
      - type: NestedTopology
        repeat: 16
        layers:
          - type: ResidualTopology
            layers:
              - {type: RMSNormLayer, d_model: 2048, eps: 0.00001, elementwise_affine: true}
              - type: AttentionLayer
                d_model: 2048
                n_heads: 32
                n_kv_heads: 8
                mode: gqa
                rope_enabled: true
                rope_base: 500000.0
                is_causal: true
                dropout_p: 0.0
          - type: ResidualTopology
            layers:
              - {type: RMSNormLayer, d_model: 2048, eps: 0.00001, elementwise_affine: true}
              - {type: SwiGLULayer, d_model: 2048, d_ff: 8192, bias: false}
      - {type: RMSNormLayer, d_model: 2048, eps: 0.00001, elementwise_affine: true}
"""


def residual(layer: dict[str, Any], **norm: Any) -> dict[str, Any]:
    return {
        "type": "ResidualTopology",
        "layers": [{"type": "RMSNormLayer", "d_model": 32, **norm}, layer],
    }


def attention(**keys: Any) -> dict[str, Any]:
    return {"type": "AttentionLayer", "d_model": 32, "n_heads": 4, **keys}


def swiglu(**keys: Any) -> dict[str, Any]:
    return {"type": "SwiGLULayer", "d_model": 32, "d_ff": 64, **keys}


def system(*layers: dict[str, Any], **keys: Any) -> dict[str, Any]:
    stack = {"type": "StackedTopology", "layers": list(layers)}
    return {"model": {"type": "TransformerModel", "topology": stack, **keys}}


def test_topology_of_the_guide() -> None:
    # 128 semantic features over 32 heads are 4 per head, 256 geometric ones 8.
    assert decoder_section(read_yaml(GUIDE, "guide").data) == {
        "name": "decoder",
        "width": 2048,
        "layers": 16,
        "heads": 32,
        "kv_heads": 8,
        "attention": "decoupled",
        "sem_dim": 4,
        "geo_dim": 8,
        "rotary_dim": 64,
        "causal": True,
        "sub_norms": False,
        "activation": "swiglu",
        "float_parts": ["embedding", "head", "norms"],
    }


def test_llama_has_its_published_number_of_parameters() -> None:
    options = dict(decoder_section(read_yaml(LLAMA, "llama").data))
    assert options.pop("name") == "decoder"
    assert options["norm_eps"] == 1e-5
    assert options["rotary_base"] == 500000.0
    assert options.pop("learned_norms") is True
    assert options.pop("float_parts") == ["embedding", "head"]
    with torch.device("meta"):
        model = Decoder(DecoderConfig(**options, float_parts=FLOAT_PARTS), 128256)
    assert sum(parameter.numel() for parameter in model.parameters()) == 1_235_814_400


def test_equal_blocks_in_every_notation() -> None:
    one = [residual(attention()), residual(swiglu())]
    written = [
        system({"type": "NestedTopology", "repeat": 3, "layers": one}),
        system(*one, *one, *one),
        system(
            *one,
            {
                "type": "NestedTopology",
                "repeat": 2,
                "layers": [{"type": "SequentialTopology", "layers": one}],
            },
        ),
    ]
    found = [decoder_section(each) for each in written]
    assert found[0]["layers"] == 3
    assert found[0]["feed_forward"] == 64
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize(
    ("layer", "options"),
    [
        ({}, {}),
        ({"n_kv_heads": 2, "mode": "gqa"}, {"kv_heads": 2}),
        ({"attn_dim": 64}, {"head_dim": 16}),
        ({"head_dim": 16}, {"head_dim": 16}),
        ({"rope_base": 500.0, "local_window": 8}, {"rotary_base": 500.0, "sliding_window": 8}),
        ({"is_causal": False}, {"causal": False}),
        (
            {"mode": "decoupled", "sem_dim": 4, "geo_dim": 40, "n_kv_heads": 2},
            {"attention": "decoupled", "sem_dim": 1, "geo_dim": 10, "kv_heads": 2},
        ),
        (
            {
                "mode": "decoupled",
                "sem_dim": 12,
                "geo_dim": 8,
                "tie_qk": True,
                "null_attn": True,
                "decoupled_gate": True,
            },
            {
                "attention": "decoupled",
                "sem_dim": 3,
                "geo_dim": 2,
                "rotary_dim": 8,
                "tie_query_key": True,
                "null_key_value": True,
                "attention_gate": True,
            },
        ),
    ],
)
def test_attention_layers_become_options(layer: dict[str, Any], options: dict[str, Any]) -> None:
    usual = {
        "name": "decoder",
        "width": 32,
        "layers": 1,
        "heads": 4,
        "sub_norms": False,
        "activation": "swiglu",
        "feed_forward": 64,
        "causal": True,
        "float_parts": ["embedding", "head", "norms"],
    }
    assert decoder_section(system(residual(attention(**layer)), residual(swiglu()))) == {
        **usual,
        **options,
    }


def test_other_layers_become_options() -> None:
    head = [
        {"type": "RMSNormLayer", "d_model": 32},
        {"type": "LinearLayer", "d_in": 32, "d_out": 100},
    ]
    start = {"type": "EmbeddingLayer", "d_model": 32, "vocab_size": 100}
    glu = residual({"type": "GLULayer", "d_model": 32, "d_ff": 48})
    found = decoder_section(system(start, residual(attention()), glu, *head, tied_embeddings=False))
    assert found["feed_forward"] == 48
    assert found["tie_embeddings"] is False
    assert "norm_eps" not in found
    moe = residual({"type": "MoELayer", "d_model": 32, "d_ff": 16, "num_experts": 4, "top_k": 1})
    found = decoder_section(system(residual(attention()), moe))
    assert (found["experts"], found["experts_per_token"], found["feed_forward"]) == (4, 1, 16)


def test_further_decoder_options() -> None:
    written = system(residual(attention()), residual(swiglu()))
    found = decoder_section({**written, "decoder": {"group_size": "row", "max_length": 64}})
    assert (found["group_size"], found["max_length"]) == ("row", 64)


FLOATS = {"float_parts": ["embedding", "head", "norms"]}
DECOUPLED = {"width": 64, "attention": "decoupled", "sem_dim": 4, "geo_dim": 4}


@pytest.mark.parametrize(
    ("config", "section"),
    [
        ({}, FLOATS),
        ({"width": 64, "heads": 2}, {"width": 64, "heads": 2, **FLOATS}),
        ({"width": 64, "float_parts": []}, {"width": 64, "float_parts": []}),
        ({"learned_norms": True}, {"learned_norms": True, "float_parts": ["embedding", "head"]}),
        ({"model": DECOUPLED}, {**DECOUPLED, **FLOATS}),
        ({"name": "bitnet", "width": 64}, {"name": "bitnet", "width": 64}),
    ],
)
def test_plain_options_have_float_parts_by_default(
    config: dict[str, Any], section: dict[str, Any]
) -> None:
    assert decoder_section(config) == {"name": "decoder", **section}


ONE = [residual(attention()), residual(swiglu())]
AT = "model.topology.layers"
REPEATED = {"type": "NestedTopology", "repeat": 4096, "layers": ONE}
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no rotary positions": (
        system(residual(attention(rope_enabled=False))),
        f"{AT}[0].layers[1].rope_enabled",
        "has rotary positions",
    ),
    "gates of the input": (
        system(residual(attention(decoupled_gate_dynamic=True))),
        f"{AT}[0].layers[1].decoupled_gate_dynamic",
        "unknown key",
    ),
    "scaled positions": (
        system(residual(attention(rope_scaling={"type": "linear"}))),
        f"{AT}[0].layers[1].rope_scaling",
        "rotary_scaling",
    ),
    "dropout": (
        system(residual(attention(dropout_p=0.1))),
        f"{AT}[0].layers[1].dropout_p",
        "no dropout",
    ),
    "a dropout layer": (
        system(*ONE, {"type": "DropoutLayer", "p": 0.5}),
        f"{AT}[2].type",
        "has no DropoutLayer",
    ),
    "biases": (
        system(residual(attention(bias=True))),
        f"{AT}[0].layers[1].bias",
        "query_key_value_bias",
    ),
    "a recurrent layer": (
        system({"type": "LSTMLayer", "d_model": 32}),
        f"{AT}[0].type",
        "has no LSTMLayer",
    ),
    "another norm": (
        system(
            {
                "type": "ResidualTopology",
                "layers": [{"type": "LayerNormLayer", "d_model": 32}, attention()],
            }
        ),
        f"{AT}[0].layers[0].type",
        "has no LayerNormLayer",
    ),
    "a typing error": (system({"type": "AttentonLayer"}), f"{AT}[0].type", "has no AttentonLayer"),
    "another topology": (
        system({"type": "GraphTopology", "nodes": []}),
        f"{AT}[0].type",
        "has no GraphTopology",
    ),
    "unequal blocks": (
        system(*ONE, residual(attention(n_heads=2)), ONE[1]),
        f"{AT}[2].layers[1].n_heads",
        "is 2, and 4 in the first block",
    ),
    "one block without a feed-forward layer": (
        system(*ONE, ONE[0]),
        f"{AT}[2].layers[1]",
        "another has none",
    ),
    "feed-forward layers of two kinds": (
        system(*ONE, ONE[0], residual({"type": "MoELayer", "d_model": 32, "d_ff": 64})),
        f"{AT}[3].layers[1]",
        "a MoELayer, and the first block has a SwiGLULayer",
    ),
    "no residual update": (system(attention()), f"{AT}[0]", "no AttentionLayer here"),
    "the feed-forward layer first": (
        system(ONE[1], ONE[0]),
        f"{AT}[0].layers[1]",
        "no SwiGLULayer here",
    ),
    "a norm behind": (
        system(
            {
                "type": "ResidualTopology",
                "layers": [attention(), {"type": "RMSNormLayer", "d_model": 32}],
            }
        ),
        f"{AT}[0].layers",
        "must be an RMSNormLayer, then",
    ),
    "nothing after the head": (
        system(
            *ONE,
            {"type": "LinearLayer", "d_in": 32, "d_out": 9},
            {"type": "RMSNormLayer", "d_model": 32},
        ),
        f"{AT}[3]",
        "no RMSNormLayer here",
    ),
    "no block": (system({"type": "RMSNormLayer", "d_model": 32}), "model.topology", "has no block"),
    "no layers": (system(), AT, "must be a list of layers"),
    "no type": (system({"d_model": 32}), f"{AT}[0]", "with its 'type'"),
    "a key of a topology": (
        system({"type": "ResidualTopology", "layers": [], "skip": 1}),
        f"{AT}[0].skip",
        "unknown key",
    ),
    "a key of a layer": (
        system(residual(attention(head=3))),
        f"{AT}[0].layers[1].head",
        "unknown key",
    ),
    "repeat": (
        system({"type": "NestedTopology", "repeat": 0, "layers": ONE}),
        f"{AT}[0].repeat",
        "from 1 to 4096",
    ),
    "too many blocks": (
        system({**REPEATED, "layers": [REPEATED]}),
        f"{AT}[0].repeat",
        "more than 4096",
    ),
    "two widths": (
        system(ONE[0], residual(swiglu(d_model=64))),
        f"{AT}[1].layers[1].d_model",
        "must be 32",
    ),
    "two eps": (
        system(ONE[0], residual(swiglu(), eps=0.1)),
        f"{AT}[1].layers[0].eps",
        "the decoder has one",
    ),
    "gqa without heads": (
        system(residual(attention(mode="gqa"))),
        f"{AT}[0].layers[1]",
        "needs 'n_kv_heads'",
    ),
    "standard with groups": (
        system(residual(attention(n_kv_heads=2))),
        f"{AT}[0].layers[1].n_kv_heads",
        "use mode gqa",
    ),
    "sizes of decoupled attention": (
        system(residual(attention(sem_dim=8))),
        f"{AT}[0].layers[1].sem_dim",
        "mode decoupled",
    ),
    "no semantic size": (
        system(residual(attention(mode="decoupled"))),
        f"{AT}[0].layers[1]",
        "needs 'sem_dim'",
    ),
    "a semantic size that heads do not share": (
        system(residual(attention(mode="decoupled", sem_dim=10, geo_dim=8))),
        f"{AT}[0].layers[1].sem_dim",
        "a whole number for each of 4: 8 or 12, not 10",
    ),
    "an odd geometric size": (
        system(residual(attention(mode="decoupled", sem_dim=8, geo_dim=12))),
        f"{AT}[0].layers[1].geo_dim",
        "an even number for each of 4: 8 or 16, not 12",
    ),
    "attention twice as wide": (
        system(residual(attention(attn_dim=64, head_dim=16))),
        f"{AT}[0].layers[1].head_dim",
        "says what 'attn_dim' says",
    ),
    "a tied head that is there": (
        system(*ONE, {"type": "LinearLayer", "d_in": 32, "d_out": 9}, tied_embeddings=True),
        "model.tied_embeddings",
        "leave out the LinearLayer",
    ),
    "two vocabularies": (
        system(
            *ONE,
            {"type": "LinearLayer", "d_in": 32, "d_out": 9},
            embedder={"d_model": 32, "vocab_size": 8},
        ),
        f"{AT}[2].d_out",
        "is 9 token ids, and the embedding has 8",
    ),
    "two embeddings": (
        system({"type": "EmbeddingLayer", "d_model": 32}, *ONE, embedder={"d_model": 32}),
        f"{AT}[0]",
        "an embedder already",
    ),
    "an embedder of patches": (
        system(*ONE, embedder={"type": "patch", "d_model": 32}),
        "model.embedder.type",
        "must be 'token'",
    ),
    "another model": (
        {"model": {"type": "MLPModel", "topology": {}}},
        "model.type",
        "must be 'TransformerModel'",
    ),
    "what the decoder refuses": (
        system(residual(attention(n_heads=5))),
        "model.topology",
        "5 does not divide 32",
    ),
    "an option next to it": (
        {**system(*ONE), "decoder": {"group_size": 100}},
        "decoder.group_size",
        "must be",
    ),
    "an option twice": (
        {**system(*ONE), "decoder": {"heads": 4}},
        "decoder.heads",
        "says it already",
    ),
    "options in two places": (
        {"model": {"width": 32}, "decoder": {"heads": 4}},
        "decoder",
        "has no effect",
    ),
    "an option of the decoder": ({"width": "wide"}, "width", "must be a whole number"),
    "an unknown option": ({"model": {"witdh": 32}}, "model.witdh", "unknown key"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_layers_are_refused_at_their_path(name: str) -> None:
    config, path, message = REFUSED[name]
    before = deepcopy(config)
    with pytest.raises(Faulty) as error:
        decoder_section(config)
    found = {show_path(fault.path): fault.message for fault in error.value.faults}
    assert path in found, found
    assert message in found[path]
    assert config == before


def test_all_faults_of_layers_are_listed() -> None:
    broken = system(
        {"type": "LSTMLayer"},
        residual(attention(dropout_p=0.5, bias=True)),
        {"type": "RMSNormLayer", "d_model": 0},
    )
    with pytest.raises(Faulty) as error:
        decoder_section(broken)
    assert [show_path(fault.path) for fault in error.value.faults] == [
        f"{AT}[0].type",
        f"{AT}[1].layers[1].dropout_p",
        f"{AT}[1].layers[1].bias",
        f"{AT}[2].d_model",
    ]
    assert error.value.faults[0].hint == "The nearest type is AttentionLayer."
