"""Random models of transformers: what becomes ternary, and that they learn and come back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

import arb_ternary

SIZES = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}
TOKENS = torch.arange(24).view(2, 12)
PIXELS = torch.linspace(-1, 1, 2 * 3 * 16 * 16).view(2, 3, 16, 16)


def llama(**options: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=1, **options))


def qwen3() -> PreTrainedModel:
    return Qwen3ForCausalLM(
        Qwen3Config(**SIZES, num_key_value_heads=1, head_dim=16, tie_word_embeddings=True)
    )


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=60, n_embd=32, n_layer=2, n_head=2, n_positions=16)
    )


def bert() -> PreTrainedModel:
    return BertForMaskedLM(BertConfig(**SIZES))


def vit() -> PreTrainedModel:
    sizes = {name: SIZES[name] for name in SIZES if "vocab" not in name and "position" not in name}
    return ViTForImageClassification(ViTConfig(**sizes, image_size=16, patch_size=8, num_labels=5))


def whisper() -> PreTrainedModel:
    config = WhisperConfig(
        vocab_size=60,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_mel_bins=8,
        max_source_positions=8,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=3,
    )
    return WhisperForConditionalGeneration(config)


def t5() -> PreTrainedModel:
    config = T5Config(
        vocab_size=60, d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2,
        decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


LANGUAGE = {"input_ids": TOKENS, "labels": TOKENS}
CASES: Mapping[str, tuple[Callable[[], PreTrainedModel], Mapping[str, torch.Tensor]]] = {
    "llama": (llama, LANGUAGE),
    "qwen3": (qwen3, LANGUAGE),
    "gpt2": (gpt2, LANGUAGE),
    "bert": (bert, LANGUAGE),
    "t5": (t5, LANGUAGE),
    "vit": (vit, {"pixel_values": PIXELS, "labels": torch.tensor([1, 3])}),
    "whisper": (
        whisper,
        {"input_features": torch.linspace(-1, 1, 2 * 8 * 16).view(2, 8, 16), "labels": TOKENS},
    ),
}
#: Matrices that stay float with the default options, and why.
LEFT = {
    "llama": {"lm_head.weight": "excluded by 'lm_head'"},
    "qwen3": {
        "model.embed_tokens.weight": "it is also lm_head.weight, which is left: excluded by "
        "'lm_head'"
    },
    "gpt2": {
        "transformer.wte.weight": "it is also lm_head.weight, which is left: excluded by 'lm_head'"
    },
    "bert": {},
    "t5": {"shared.weight": "it is also lm_head.weight, which is left: excluded by 'lm_head'"},
    "vit": {
        "vit.embeddings.cls_token": "a parameter of ViTEmbeddings itself, not of a linear, an "
        "embedding or a convolution",
        "vit.embeddings.position_embeddings": "a parameter of ViTEmbeddings itself, not of a "
        "linear, an embedding or a convolution",
    },
    "whisper": {
        "model.decoder.embed_positions.weight": "WhisperPositionalEmbedding has a forward of its "
        "own",
    },
}


def made(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = CASES[name][0]()
    return model.eval()


@pytest.mark.parametrize("name", CASES)
def test_every_matrix_is_replaced_or_named_with_the_reason(name: str) -> None:
    model = made(name)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if p.dim() > 1}
    report = arb_ternary.ternarize(model)
    replaced = {f"{each.name}.weight": each.shape for each in report.replaced}
    left = {each.name: each.shape for each in report.left}
    assert replaced | left == shapes
    assert not replaced.keys() & left.keys()
    assert {each.name: each.reason for each in report.left} == LEFT[name]
    stay = {name: tuple(p.shape) for name, p in model.named_parameters() if p.dim() > 1}
    assert stay == left


@pytest.mark.parametrize("name", CASES)
def test_random_models_of_transformers_learn_and_become_dense_again(name: str) -> None:
    model = made(name)
    keys = list(model.state_dict())
    batch = CASES[name][1]
    arb_ternary.ternarize(model, exclude=(), activations="float")
    twin = copy.deepcopy(model)
    arb_ternary.dense(twin)
    assert list(twin.state_dict()) == keys
    with torch.no_grad():
        expected = model(**batch)
        dense = twin(**batch)
    assert torch.allclose(expected.logits, dense.logits, rtol=1e-4, atol=1e-5)

    optimizer = arb_ternary.make_optimizer(model, lr=0.5, float_lr=1e-2)
    votes = {module: module.logical_votes() for module in optimizer.rule.modules}
    losses = []
    for _ in range(20):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        model.zero_grad()
        losses.append(loss.item())
    assert optimizer.last_outcome.flips > 0
    assert losses[-1] < losses[0] - 0.3
    for module, before in votes.items():
        assert not torch.equal(module.logical_votes(), before)


@pytest.mark.parametrize("exclude", [None, ()], ids=["default", "all"])
@pytest.mark.parametrize("name", CASES)
def test_float_checkpoints_load_ternary_and_come_back_from_save_pretrained(
    tmp_path: Path, name: str, exclude: tuple[str, ...] | None
) -> None:
    twin = made(name)
    twin.save_pretrained(tmp_path / "float")
    options = {"group_size": 32} if exclude is None else {"group_size": 32, "exclude": exclude}
    arb_ternary.ternarize(twin, **options)
    config = arb_ternary.ArbTernaryConfig(**options)
    model = type(twin).from_pretrained(tmp_path / "float", quantization_config=config)
    assert_same(model, twin)

    batch = CASES[name][1]
    optimizer = arb_ternary.make_optimizer(model, lr=0.5, float_lr=1e-2)
    model(**batch).loss.backward()
    optimizer.step()
    model.save_pretrained(tmp_path / "ternary", max_shard_size="20KB")
    assert len(list((tmp_path / "ternary").glob("*.safetensors"))) > 1
    back = type(model).from_pretrained(tmp_path / "ternary")
    assert_same(model, back)
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, back(**batch).logits)


def test_layers_that_transformers_keeps_in_float32_stay_so(tmp_path: Path) -> None:
    made("t5").half().save_pretrained(tmp_path / "float")
    load = T5ForConditionalGeneration.from_pretrained
    config = arb_ternary.ArbTernaryConfig(exclude=())
    model = load(tmp_path / "float", quantization_config=config, dtype=torch.float16)
    model.save_pretrained(tmp_path / "ternary")
    back = load(tmp_path / "ternary", dtype=torch.float16)
    feed_forward = back.encoder.block[0].layer[1].DenseReluDense
    assert (feed_forward.wi.weight.dtype, feed_forward.wo.weight.dtype) == (
        torch.float16,
        torch.float32,
    )
    with torch.no_grad():
        assert torch.equal(model(**LANGUAGE).logits, back(**LANGUAGE).logits)


def assert_same(model: PreTrainedModel, other: PreTrainedModel) -> None:
    """Compare everything that is saved: trits, exponents, accumulators and float parameters."""
    state = model.state_dict()
    others = other.state_dict()
    assert state.keys() == others.keys()
    for key, tensor in state.items():
        assert torch.equal(tensor, others[key]), key


def test_gpt2_layers_with_transposed_weights_are_those_of_transformers() -> None:
    model = made("gpt2")
    layer = model.transformer.h[0].attn.c_attn
    kind = type(layer)
    weight = layer.weight.detach().clone()
    arb_ternary.ternarize(model)
    assert layer.weight.shape == weight.shape == (32, 96)
    assert layer.ternary.shape.out_features == 96
    assert (layer.weight - weight).norm() < 0.6 * weight.norm()
    arb_ternary.dense(model)
    assert type(layer) is kind
    assert isinstance(layer.weight, nn.Parameter)
    assert layer.weight.is_contiguous()


def test_generation_with_a_cache_works() -> None:
    model = made("llama")
    arb_ternary.ternarize(model, exclude=(), activations="float")
    twin = copy.deepcopy(model)
    arb_ternary.dense(twin)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(TOKENS)
    written = model.generate(TOKENS, attention_mask=mask, **options)
    assert torch.equal(written, twin.generate(TOKENS, attention_mask=mask, **options))


def test_save_pretrained_writes_a_tied_head_once(tmp_path: Path) -> None:
    model = made("qwen3")
    arb_ternary.ternarize(model, exclude=())
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == model.state_dict().keys()
    assert not any(name.startswith("lm_head") for name in saved)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
def test_gradient_checkpointing_of_transformers_casts_votes_once() -> None:
    votes = []
    for how in (None, False, True):
        model = made("llama").train()
        arb_ternary.ternarize(model, gradients="int8")
        optimizer = arb_ternary.make_optimizer(model, "sign_votes")
        if how is not None:
            options = {"use_reentrant": how}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        model(**LANGUAGE, use_cache=False).loss.backward()
        modules = optimizer.rule.modules
        assert {module.casts for module in modules} == {1}
        votes.append(torch.cat([module.logical_votes().flatten() for module in modules]))
    assert torch.equal(votes[0], votes[1])
    assert torch.equal(votes[0], votes[2])
