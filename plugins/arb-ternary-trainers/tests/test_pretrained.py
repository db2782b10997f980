"""``from_pretrained`` and ``save_pretrained`` of transformers with ternary weights."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

import arb_ternary
import arb_ternary_trainers
from arb_ternary.errors import CheckpointError, EnvironmentProblem, UsageProblem
from arb_ternary.specs import resolve
from arb_ternary_interchange.export import export_model
from arb_ternary_interchange.huggingface.exporter import HfExporter
from arb_ternary_interchange.importing import find_source, import_model
from arb_ternary_interchange.options import HfExportConfig
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoder import Decoder

Config = arb_ternary.ArbTernaryConfig
TOKENS = torch.arange(24).view(2, 12)
BATCH = {"input_ids": TOKENS, "labels": TOKENS}
DOWN = "model.layers.1.mlp.down_proj"


def llama(tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 60,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 32,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=tied)).eval()


def step(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> None:
    model(**BATCH).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def same_state(model: PreTrainedModel, other: PreTrainedModel) -> bool:
    state = model.state_dict()
    others = other.state_dict()
    return state.keys() == others.keys() and all(
        torch.equal(tensor, others[name]) for name, tensor in state.items()
    )


@pytest.fixture
def float_folder(tmp_path: Path) -> Path:
    llama().save_pretrained(tmp_path / "float")
    return tmp_path / "float"


@pytest.fixture
def ternary_folder(tmp_path: Path) -> Path:
    model = llama()
    arb_ternary.ternarize(model, group_size=32)
    model.save_pretrained(tmp_path / "ternary")
    return tmp_path / "ternary"


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the ``config.json`` of a folder."""
    file = folder / "config.json"
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))


# --- our own folders


def test_training_goes_on_from_a_saved_model_with_the_same_bits(tmp_path: Path) -> None:
    model = llama()
    arb_ternary.ternarize(model, gradients="int8", vote_bits=4, group_size="row")
    optimizer = arb_ternary.make_optimizer(model, lr=0.5, float_lr=1e-2)
    step(model, optimizer)
    model.save_pretrained(tmp_path)
    back = AutoModelForCausalLM.from_pretrained(tmp_path)
    layer = back.get_submodule(DOWN).ternary
    assert (layer.gradients, layer.shape.vote_bits, layer.group_size) == ("int8", 4, "row")
    resumed = arb_ternary.make_optimizer(back, lr=0.5, float_lr=1e-2)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(3):
        step(model, optimizer)
        step(back, resumed)
    assert optimizer.last_outcome.flips > 0
    assert same_state(model, back)


@pytest.mark.parametrize("exclude", [(), ("lm_head",)])
def test_tied_embeddings_stay_tied(tmp_path: Path, exclude: tuple[str, ...]) -> None:
    model = llama(tied=True)
    arb_ternary.ternarize(model, exclude=exclude)
    model.save_pretrained(tmp_path / "ternary")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "ternary")
    back.tie_weights()
    embedding = back.get_input_embeddings()
    if exclude:
        assert back.lm_head.weight is embedding.weight
    else:
        assert back.lm_head.ternary is embedding.ternary

    arb_ternary.dense(back)
    assert back.lm_head.weight is embedding.weight
    back.tie_weights()
    back.save_pretrained(tmp_path / "dense")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    assert same_state(back, again)


def test_another_class_takes_the_layers_that_it_shares(ternary_folder: Path) -> None:
    whole = AutoModelForCausalLM.from_pretrained(ternary_folder)
    base = AutoModel.from_pretrained(ternary_folder)
    assert same_state(base, whole.model)
    classifier = AutoModelForSequenceClassification.from_pretrained(ternary_folder)
    assert same_state(classifier.model, whole.model)
    assert isinstance(classifier.score.weight, torch.nn.Parameter)


def test_dense_models_are_saved_as_ordinary_floats_and_round_to_the_same_trits(
    tmp_path: Path, ternary_folder: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(ternary_folder)
    state = model.state_dict()
    expected = {name: trits for name, trits in state.items() if name.endswith("ternary.weight")}
    dense = model.dequantize()
    dense.save_pretrained(tmp_path / "dense")
    assert "quantization_config" not in json.loads((tmp_path / "dense/config.json").read_text())
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    assert same_state(plain, dense)
    config = Config(group_size=32, vote_bits=2)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=config)
    state = again.state_dict()
    assert all(torch.equal(state[name], trits) for name, trits in expected.items())
    assert torch.equal(again.get_submodule(DOWN).weight, plain.get_submodule(DOWN).weight)


def test_models_can_be_copied_pickled_and_cast(ternary_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(ternary_folder)
    assert same_state(copy.deepcopy(model), model)
    assert same_state(pickle.loads(pickle.dumps(model)), model)
    assert model.half().lm_head.weight.dtype == torch.float16
    other = AutoModelForCausalLM.from_pretrained(ternary_folder, dtype=torch.bfloat16)
    assert other.get_submodule(DOWN).weight.dtype == torch.bfloat16
    assert other(TOKENS).logits.dtype == torch.bfloat16


# --- folders of BitNet


@pytest.fixture
def eager() -> Iterator[None]:
    """Switch compilation off: transformers compiles its BitNet linears, for minutes."""
    with torch.compiler.set_stance("force_eager"):
        yield


def decoder(**options: Any) -> Decoder:
    torch.manual_seed(0)
    sizes = {"width": 64, "layers": 2, "heads": 4, "kv_heads": 2, "feed_forward": 96}
    model = Decoder(DecoderConfig(**sizes, max_length=32, architecture="llama", **options), 60)
    return model.eval()


def exported(model: Decoder, folder: Path, layout: str) -> Path:
    metadata = {"name": "a-run", "step": 3, "model": {"name": "decoder"}, "versions": {}}
    dtype = None if layout == "packed" else "float32"
    HfExporter(HfExportConfig(layout=layout, dtype=dtype)).export(model, folder, metadata)
    return folder


@pytest.mark.parametrize("layout", ["packed", "dense_w1a8", "dense"])
def test_exported_trits_are_taken_bit_for_bit(tmp_path: Path, layout: str) -> None:
    options = {"group_size": "tensor", "scale_rule": "frozen"} if layout == "packed" else {}
    source = decoder(**{"group_size": 32, **options})
    down = source.blocks[1].feed_forward.down
    if layout != "packed":
        down.exponent += torch.randint(-1, 2, down.exponent.shape, dtype=torch.int8)
    folder = exported(source, tmp_path / layout, layout)
    # The layout dense is that of a float model, which does not say how large groups are.
    config = Config(group_size=32) if layout == "dense" else Config()
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=torch.float32
    )
    ternary = model.get_submodule(DOWN).ternary
    assert torch.equal(ternary.trits(), down.trits())
    expected = down.exponent.expand(ternary.exponent.shape)
    some = ternary.trits().abs().view(64, -1, 32).amax(2) if layout != "packed" else 1
    assert torch.equal(ternary.exponent * some, expected * some)
    with torch.no_grad():
        theirs = model(TOKENS).logits.log_softmax(-1)
        ours = source(TOKENS).log_softmax(-1)
    # The layout dense has no rounded activations.
    divergence = float((ours.exp() * (ours - theirs)).sum(-1).mean())
    assert divergence < (1e-3 if layout == "dense" else 1e-6)

    model.save_pretrained(tmp_path / "own")
    assert same_state(AutoModelForCausalLM.from_pretrained(tmp_path / "own"), model)


@pytest.mark.usefixtures("eager")
@pytest.mark.filterwarnings("ignore")  # of transformers about its own code
def test_scales_that_are_no_powers_of_two_are_kept_as_a_factor(tmp_path: Path) -> None:
    folder = exported(
        decoder(group_size="tensor", scale_rule="frozen"), tmp_path / "packed", "packed"
    )
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("weight_scale"):
            tensors[name] = tensor * 1.3
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    load = AutoModelForCausalLM.from_pretrained
    model = load(folder, quantization_config=Config(), dtype=torch.float32)
    reference = load(folder, dtype="auto")
    with torch.no_grad():
        ours = model(TOKENS).logits
        theirs = reference(TOKENS).logits.float()
    assert torch.allclose(ours, theirs, rtol=0, atol=0.02 * float(theirs.std()))
    assert float(model.get_submodule(DOWN).factor) == pytest.approx(1 / 1.3)

    optimizer = arb_ternary.make_optimizer(model, lr=1.0, float_lr=1e-3)
    for _ in range(2):
        step(model, optimizer)
    assert optimizer.last_outcome.flips > 0
    model.save_pretrained(tmp_path / "own")
    back = load(tmp_path / "own")
    assert same_state(back, model)
    weight = back.get_submodule(DOWN).weight.detach()
    arb_ternary.dense(back)
    assert torch.equal(back.get_submodule(DOWN).weight, weight)


def test_dense_models_reach_the_published_layout(tmp_path: Path) -> None:
    model = llama()
    arb_ternary.ternarize(model, group_size=32)
    expected = {
        name: layer.ternary.trits()
        for name, layer in model.named_modules()
        if name.endswith("_proj")
    }
    arb_ternary.dense(model)
    model.save_pretrained(tmp_path / "dense")
    import_model(find_source(str(tmp_path / "dense")), tmp_path / "run")
    export_model(tmp_path / "run", tmp_path / "hf", "hf", ["tokenizer=false", "layout=dense_w1a8"])
    published = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert published["quantization_config"]["quant_method"] == "bitnet"
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", quantization_config=Config())
    for name, trits in expected.items():
        assert torch.equal(back.get_submodule(name).ternary.trits(), trits)


def test_packed_weights_are_checked(tmp_path: Path) -> None:
    folder = exported(
        decoder(group_size="tensor", scale_rule="frozen"), tmp_path / "packed", "packed"
    )

    def load(**options: Any) -> None:
        AutoModelForCausalLM.from_pretrained(folder, quantization_config=Config(**options))

    with pytest.raises(UsageProblem, match="activations: 'float' was given"):
        load(activations="float")
    with pytest.raises(UsageProblem, match=r"exclude: .* was given"):
        load(exclude=["model.layers.0"])
    tensors = load_file(folder / "model.safetensors")
    scale = tensors.pop(f"{DOWN}.weight_scale")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{DOWN}: .* packed trits .* no weight_scale"):
        load()
    packed = tensors[f"{DOWN}.weight"]
    tensors[f"{DOWN}.weight_scale"] = scale
    tensors[f"{DOWN}.weight"] = packed[:8].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"{DOWN}: .*\[32, 96\] trits, .* \[64, 96\]"):
        load()


# --- options


def test_gptq_reads_texts_with_the_tokenizer_of_the_model(float_folder: Path) -> None:
    words = {word: index for index, word in enumerate(["?", *"abcdefghij"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(float_folder)
    text = "a b c d e f g h i j j i h g f e d c b a"
    twin = llama()
    ids = torch.tensor([[words[word] for word in text.split()]])
    arb_ternary.ternarize(twin, init="gptq", calibration=[{"input_ids": ids}])
    config = Config(init="gptq", calibration=[text])
    model = AutoModelForCausalLM.from_pretrained(float_folder, quantization_config=config)
    assert same_state(model, twin)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"group_size": 64}, "group_size: 64 was given, and the weights of the checkpoint have 32"),
        ({"vote_bits": 4}, "vote_bits: 4 was given, and the weights of the checkpoint have 8"),
        ({"exclude": ()}, r"exclude: \[\] was given, and .* have \['lm_head', '\*.lm_head'\]"),
        ({"include": ["model"]}, r"include: \['model'\] was given"),
        ({"calibration": [TOKENS]}, "calibration: the checkpoint has ternary weights"),
    ],
)
def test_options_that_contradict_the_checkpoint_are_refused(
    ternary_folder: Path, options: dict[str, Any], words: str
) -> None:
    config = Config(**options)
    with pytest.raises(UsageProblem, match=words):
        AutoModelForCausalLM.from_pretrained(ternary_folder, quantization_config=config)


def test_options_that_agree_with_the_checkpoint_are_taken(ternary_folder: Path) -> None:
    config = Config(group_size=32, init="absmean", backend="torch")
    model = AutoModelForCausalLM.from_pretrained(ternary_folder, quantization_config=config)
    assert model.get_submodule(DOWN).ternary.chosen_backend == "torch"
    assert "backend" not in model.config.quantization_config.to_dict()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"quantization_config": {"quant_method": "arb_ternary", "init": "gptq"}},
            "no calibration",
        ),
        (
            {"device_map": {"model": "cpu", "lm_head": "disk"}, "quantization_config": Config()},
            "device_map: ternary weights learn on one device, .* on cpu, disk",
        ),
        ({"device_map": "meta", "quantization_config": Config()}, "device_map: .* on meta"),
    ],
)
def test_what_cannot_work_is_refused_before_weights_are_loaded(
    float_folder: Path, options: dict[str, Any], words: str
) -> None:
    (float_folder / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(UsageProblem, match=words):
        LlamaForCausalLM.from_pretrained(float_folder, **options)


def test_options_that_do_not_exist_are_named() -> None:
    with pytest.raises(UsageProblem, match="'load_in_8bit' is not one of its options"):
        Config(load_in_8bit=True)
    with pytest.raises(UsageProblem) as caught:
        Config(group_sise=32)
    assert caught.value.hint == "did you mean 'group_size'?"


def test_one_device_may_be_given_by_name(ternary_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(ternary_folder, device_map="auto")
    assert model.get_submodule(DOWN).ternary.weight.device.type == model.device.type


# --- checkpoints that cannot be read


def test_damaged_checkpoints_are_refused(tmp_path: Path, ternary_folder: Path) -> None:
    def load(**options: Any) -> None:
        AutoModelForCausalLM.from_pretrained(ternary_folder, **options)

    def changed(**values: Any) -> None:
        rewrite(ternary_folder, lambda config: config["quantization_config"].update(values))

    changed(format_version=2)
    with pytest.raises(CheckpointError, match=r"in version 2 of their format, .* reads version 1"):
        load()
    changed(format_version=1, group_size=64)
    with pytest.raises(CheckpointError, match="its ternary weight does not fit the model: size"):
        load()
    changed(group_size=32)
    file = ternary_folder / "model.safetensors"
    tensors = load_file(file)
    votes = tensors.pop(f"{DOWN}.ternary.votes")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f'{DOWN}: .* Missing key.*"votes"'):
        load()
    tensors[f"{DOWN}.ternary.votes"] = votes
    tensors["model.norm.ternary.weight"] = tensors.pop("model.norm.weight").byte()
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model.norm: .* a LlamaRMSNorm cannot have one"):
        load()

    shutil.copy(llama_file(tmp_path), file)
    with pytest.raises(CheckpointError, match="announces ternary weights, and it has none"):
        load()
    changed(quant_method="gptq")
    with pytest.raises(UsageProblem, match="the checkpoint is quantized by gptq"):
        load(quantization_config=Config())


def llama_file(tmp_path: Path) -> Path:
    llama().save_pretrained(tmp_path / "plain")
    return tmp_path / "plain" / "model.safetensors"


def test_tensors_without_values_are_refused(float_folder: Path) -> None:
    from arb_ternary_trainers.quantizer import ArbTernaryQuantizer

    with torch.device("meta"):
        model = llama()
    quantizer = ArbTernaryQuantizer(Config(), pre_quantized=False)
    with pytest.raises(CheckpointError, match=r"model.embed_tokens.weight: has no values .* other"):
        quantizer.postprocess_model(model)


# --- what save_pretrained and transformers cannot do


def test_layers_with_different_options_cannot_be_saved(tmp_path: Path) -> None:
    model = llama()
    arb_ternary.ternarize(model, include=["model.layers.0"], group_size=32)
    arb_ternary.ternarize(model, include=["model.layers.1"], group_size=64)
    with pytest.raises(UsageProblem, match=r"save_pretrained: group_size is 32 for .* and 64 for"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_ternary_embeddings_cannot_be_resized() -> None:
    model = llama()
    arb_ternary.ternarize(model)
    with pytest.raises(UsageProblem, match=r"cannot be resized: num_embeddings is 60, and .* 70"):
        model.resize_token_embeddings(70)
    assert same_state(model, copy.deepcopy(model))
    assert model(TOKENS).logits.shape[-1] == 60


def test_a_model_that_another_program_has_quantized_is_refused() -> None:
    model = llama()
    model.hf_quantizer = SimpleNamespace(quantization_config=SimpleNamespace(quant_method="awq"))
    with pytest.raises(UsageProblem, match="ternarize: the model is quantized by awq"):
        arb_ternary.ternarize(model)
    assert isinstance(model.get_submodule(DOWN).weight, torch.nn.Parameter)


def test_a_model_inside_another_module_is_saved_too(tmp_path: Path) -> None:
    outer = torch.nn.Sequential(llama())
    arb_ternary.ternarize(outer, exclude=("*.lm_head",))
    outer[0].save_pretrained(tmp_path)
    assert same_state(AutoModelForCausalLM.from_pretrained(tmp_path), outer[0])


def test_without_transformers_the_name_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    for name in ("pretrained", "quantizer"):
        monkeypatch.delitem(sys.modules, f"arb_ternary_trainers.{name}")
        monkeypatch.delattr(arb_ternary_trainers, name)
    with pytest.raises(EnvironmentProblem) as caught:
        resolve("arb_ternary_trainers.pretrained:ArbTernaryConfig")
    assert "not installed: transformers" in caught.value.what
    assert "transformers>=5.24" in caught.value.hint
