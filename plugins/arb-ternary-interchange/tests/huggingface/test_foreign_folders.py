"""Folders as other programs write them: every key, file and tensor is used, harmless, or named."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import sentencepiece
import tokenizers
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers

from arb_ternary.errors import DataError, EnvironmentProblem
from arb_ternary.plugins.discovery import install_command
from arb_ternary_interchange.gguf.pre_tokenizers import PRE_TOKENIZERS
from arb_ternary_interchange.huggingface import tokenizer_conversion
from arb_ternary_interchange.huggingface.folder import fetched
from arb_ternary_interchange.huggingface.importer import HfImporter
from arb_ternary_interchange.huggingface.known import (
    HARMLESS_FILES,
    HARMLESS_OF_CONFIG,
    HARMLESS_OF_TOKENIZER,
    NEUTRAL_OF_CONFIG,
    NEUTRAL_OF_TOKENIZER,
)
from arb_ternary_interchange.huggingface.model import HfModel
from arb_ternary_interchange.huggingface.model_config import ModelConfig, read_model_config
from arb_ternary_interchange.huggingface.tokenizer_files import read_tokenizer
from arb_ternary_interchange.huggingface.tokenizer_settings import read_settings
from arb_ternary_interchange.options import ImportConfig
from arb_ternary_text.data.tokenizers import from_json
from arb_ternary_text.models.decoder import Decoder

#: How Qwen 2 splits a text.
QWEN = next(
    known.definition["pretokenizers"][0]["pattern"]["Regex"]
    for known in PRE_TOKENIZERS
    if known.name == "qwen2"
)

Make = Callable[..., Decoder]
Export = Callable[..., Path]

IDS = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(3))
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
}
TEXTS = (
    "<|im_start|>user\nTo be, or  not to be?<|im_end|>\n<|endoftext|>",
    " the thing that theirs <tool> is 1234\tna\u00efve e\u0301\n\n  x",
)


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    result = model.eval()(IDS)
    return result if isinstance(result, torch.Tensor) else result.logits


def write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    write(path, {**json.loads(path.read_text()), **changes})


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    """Save a random float model of transformers; keyword arguments are of its config."""

    def save(**options: Any) -> Path:
        import transformers

        torch.manual_seed(0)
        known = {key: value for key, value in CONFIG.items() if key != "model_type"}
        config = transformers.LlamaConfig(**{**known, **options}, initializer_range=0.1)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
        return tmp_path / "model"

    return save


def their_logits(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    return logits(AutoModelForCausalLM.from_pretrained(folder))


# --- meaning


LINEAR = {"rope_type": "linear", "factor": 4.0}
DEFAULT = {"rope_type": "default", "rope_theta": 20000.0}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("keys", "scaling", "named"),
    [
        ({"rope_parameters": DEFAULT, "rope_scaling": LINEAR}, 4.0, True),
        ({"rope_parameters": DEFAULT, "rope_scaling": LINEAR, "rope_theta": 3e4}, 4.0, True),
        ({"rope_parameters": {**LINEAR, "factor": 2.0}, "rope_scaling": {}}, 2.0, False),
        ({"rope_parameters": None, "rope_scaling": {**LINEAR, "type": "dynamic"}}, 4.0, False),
    ],
)
def test_rope_scaling_beside_rope_parameters_is_taken_as_transformers_does(
    saved: Callable[..., Path], load: Any, keys: dict[str, Any], scaling: float, named: bool
) -> None:
    folder = saved()
    change_config(folder, **keys)
    model, found = load(folder)
    assert model.config.rotary_scaling == scaling
    assert float((logits(model) - their_logits(folder)).abs().max()) < 1e-5
    assert any("rope_parameters.rope_theta" in note for note in found.notes) == named


@pytest.mark.filterwarnings("ignore")
def test_a_head_that_differs_from_the_embedding_is_kept(
    saved: Callable[..., Path], load: Any
) -> None:
    folder = saved(tie_word_embeddings=False)
    change_config(folder, tie_word_embeddings=True)
    model, found = load(folder)
    assert not model.config.tied
    assert float((logits(model) - their_logits(folder)).abs().max()) < 1e-5
    (note,) = found.notes
    assert "lm_head.weight differs from model.embed_tokens.weight" in note


@pytest.mark.filterwarnings("ignore")
def test_a_stored_head_that_is_the_embedding_stays_tied(
    saved: Callable[..., Path], load: Any
) -> None:
    folder = saved(tie_word_embeddings=True)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model, found = load(folder)
    assert model.config.tied
    assert found.notes == ()
    assert float((logits(model) - their_logits(folder)).abs().max()) < 1e-5


@pytest.mark.filterwarnings("ignore")
def test_the_single_weight_file_counts_beside_an_index(
    saved: Callable[..., Path], load: Any
) -> None:
    folder = saved()
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    other = {name: 2 * tensor for name, tensor in tensors.items()}
    shard = "model-00001-of-00001.safetensors"
    safetensors.torch.save_file(other, folder / shard, metadata={"format": "pt"})
    write(folder / "model.safetensors.index.json", {"weight_map": dict.fromkeys(other, shard)})
    model, found = load(folder)
    assert float((logits(model) - their_logits(folder)).abs().max()) < 1e-5
    assert found.notes == (f"Files that are not used: {shard}, model.safetensors.index.json.",)


# --- tokenizers


@pytest.fixture(scope="module")
def trained() -> dict[str, Any]:
    """Return the content of a tokenizer.json: merges of bytes, without added tokens."""
    tokenizer = Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the thing that is theirs is to be or not to be"] * 9, trainer)
    return dict(json.loads(tokenizer.to_str()))


def lay_out(folder: Path, trained: dict[str, Any], model_type: str) -> int:
    """Write ``vocab.json``, ``merges.txt`` and a ``config.json``; return the number of tokens."""
    model = trained["model"]
    folder.mkdir(exist_ok=True)
    write(folder / "vocab.json", model["vocab"])
    lines = ["#version: 0.2", *(" ".join(pair) for pair in model["merges"])]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    write(folder / "config.json", {**CONFIG, "model_type": model_type})
    return len(model["vocab"])


@pytest.fixture
def convert_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers convert tokenizers in this process, which has imported it."""
    monkeypatch.setattr(tokenizer_conversion, "_run", tokenizer_conversion.write_answer)


def compare_ids(folder: Path, model_type: str) -> None:
    """Compare with the tokenizer that transformers makes of the folder."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    found = read_tokenizer(folder, model_type)
    assert found.state is not None
    ours = from_json(found.state)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"], text


@pytest.mark.filterwarnings("ignore")
def test_a_vocabulary_with_merges_is_converted_by_transformers(
    tmp_path: Path, trained: dict[str, Any]
) -> None:
    size = lay_out(tmp_path, trained, "qwen2")
    added = {"<|endoftext|>": size, "<|im_start|>": size + 1, "<|im_end|>": size + 2}
    write(tmp_path / "added_tokens.json", added)
    settings = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>"}
    write(tmp_path / "tokenizer_config.json", settings)
    compare_ids(tmp_path, "qwen2")
    found = read_tokenizer(tmp_path, "qwen2")
    assert found.notes == ()
    assert found.state is not None
    assert found.state["special"]["eos"] == [size + 2]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("where", ["added_tokens.json", "added_tokens_decoder"])
@pytest.mark.usefixtures("convert_here")
def test_tokens_beside_a_tokenizer_json_are_added(
    tmp_path: Path, trained: dict[str, Any], where: str
) -> None:
    write(tmp_path / "config.json", CONFIG)
    write(tmp_path / "tokenizer.json", trained)
    size = len(trained["model"]["vocab"])
    texts = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool>"]
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if where == "added_tokens.json":
        write(tmp_path / where, {text: size + i for i, text in enumerate(texts)})
        settings["eos_token"] = "<|im_end|>"
    else:
        flags = {"single_word": False, "lstrip": False, "normalized": False}
        settings[where] = {
            str(size + i): {"content": text, **flags, "rstrip": i == 3, "special": i < 3}
            for i, text in enumerate(texts)
        }
    write(tmp_path / "tokenizer_config.json", settings)
    compare_ids(tmp_path, "llama")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("convert_here")
def test_tokenizer_files_that_cannot_be_put_together_are_refused(
    tmp_path: Path, trained: dict[str, Any]
) -> None:
    size = lay_out(tmp_path, trained, "qwen2")
    write(tmp_path / "added_tokens.json", {"<far>": size + 5})
    with pytest.raises(DataError, match=f"'<far>' has the id {size + 5} in the files") as caught:
        read_tokenizer(tmp_path, "qwen2")
    assert "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)" in caught.value.hint
    (tmp_path / "added_tokens.json").unlink()
    (tmp_path / "vocab.json").write_text("[", encoding="utf-8")
    with pytest.raises(
        DataError, match=r"vocab\.json: is converted .*: transformers cannot do that"
    ):
        read_tokenizer(tmp_path, "qwen2")


def test_a_conversion_needs_transformers_and_ends(
    tmp_path: Path, trained: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lay_out(tmp_path, trained, "qwen2")
    monkeypatch.setattr(tokenizer_conversion, "_SECONDS", 0.01)
    with pytest.raises(DataError, match=r"transformers did not end in 0\.01 seconds"):
        read_tokenizer(tmp_path, "qwen2")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(EnvironmentProblem, match="needs the package `transformers`") as caught:
        read_tokenizer(tmp_path, "qwen2")
    assert install_command("arb-ternary-interchange[transformers]") in caught.value.hint
    assert "save_pretrained" in caught.value.hint


def sentencepiece_model() -> bytes:
    stream = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["to be or not to be that is the question"] * 50),
        model_writer=stream,
        vocab_size=24,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return stream.getvalue()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("convert_here")
@pytest.mark.parametrize("name", ["LlamaTokenizer", "PreTrainedTokenizerFast"])
def test_a_sentencepiece_model_is_converted_by_transformers(tmp_path: Path, name: str) -> None:
    write(tmp_path / "config.json", CONFIG)
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model())
    write(tmp_path / "tokenizer_config.json", {"tokenizer_class": name, "eos_token": "</s>"})
    compare_ids(tmp_path, "llama")
    size = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model()).vocab_size()
    write(tmp_path / "added_tokens.json", {"<|im_start|>": size})
    compare_ids(tmp_path, "llama")


def test_a_tokenizer_with_more_ids_than_the_model_names_both_numbers(
    tmp_path: Path, trained: dict[str, Any], make_decoder: Make, export: Export
) -> None:
    attached = {"kind": "bytes"}
    folder = export(make_decoder(architecture="llama"), tmp_path / "out", attached)
    write(folder / "tokenizer.json", trained)
    ids = len(trained["model"]["vocab"])
    with pytest.raises(DataError) as caught:
        HfImporter(ImportConfig()).load(folder)
    assert caught.value.what == f"tokenizer: it has {ids} ids, but the model 256"
    for way in (f"model.resize_token_embeddings({ids})", f"the {ids - 256} last tokens", "move"):
        assert way in caught.value.hint
    (folder / "tokenizer.json").unlink()
    kind = HfImporter(ImportConfig()).load(folder).attachments["tokenizer"]["kind"]
    assert kind == "ids"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("convert_here")
def test_special_tokens_without_an_id_get_the_next_rows(
    tmp_path: Path, trained: dict[str, Any]
) -> None:
    write(tmp_path / "config.json", CONFIG)
    write(tmp_path / "tokenizer.json", trained)
    settings = {"eos_token": "a", "pad_token": "<tool>", "mask_token": "<|im_start|>"}
    write(tmp_path / "tokenizer_config.json", settings)
    compare_ids(tmp_path, "llama")
    size = len(trained["model"]["vocab"])
    write(tmp_path / "tokenizer_config.json", {"pad_token": "<tool>"})
    note = "Special tokens that have no id of the model, and are left out: '<tool>'."
    assert read_tokenizer(tmp_path, "llama", size).notes == (note,)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("convert_here")
@pytest.mark.parametrize("prefix", [True, False, None])
@pytest.mark.parametrize(
    ("name", "in_file"),
    [
        ("GPT2Tokenizer", None),
        ("Qwen2TokenizerFast", False),
        ("Qwen2Tokenizer", True),
        ("PreTrainedTokenizerFast", False),
        ("PreTrainedTokenizerFast", True),
    ],
)
def test_a_space_before_a_text_is_that_of_transformers(
    tmp_path: Path, trained: dict[str, Any], prefix: bool | None, name: str, in_file: bool | None
) -> None:
    end = len(trained["model"]["vocab"])
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    token = {"id": end, "content": "<|endoftext|>", **flags, "special": True}
    if in_file is None:
        lay_out(tmp_path, trained, "llama")
    else:
        write(tmp_path / "config.json", CONFIG)
        split = {"type": "Split", "pattern": {"Regex": QWEN}, "behavior": "Isolated"}
        level = {"type": "ByteLevel", "add_prefix_space": in_file, "use_regex": False}
        level["trim_offsets"] = True
        parts = [{**split, "invert": False}, level]
        definition = {**trained, "pre_tokenizer": {"type": "Sequence", "pretokenizers": parts}}
        definition |= {"normalizer": {"type": "NFC"}, "added_tokens": [token]}
        write(tmp_path / "tokenizer.json", definition)
    settings = {} if prefix is None else {"add_prefix_space": prefix}
    write(tmp_path / "tokenizer_config.json", {"tokenizer_class": name, **settings})
    compare_ids(tmp_path, "llama")
    assert read_tokenizer(tmp_path, "llama").notes == ()


@pytest.mark.parametrize(
    ("class_name", "prefix"),
    [("Qwen2Tokenizer", False), ("PreTrainedTokenizerFast", True), ("LlamaTokenizer", None)],
)
def test_a_tokenizer_json_that_says_everything_is_read_as_it_is(
    tmp_path: Path, trained: dict[str, Any], class_name: str, prefix: bool | None, monkeypatch: Any
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    end = len(trained["model"]["vocab"])
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    token = {"content": "<|endoftext|>", **flags, "special": True}
    write(tmp_path / "tokenizer.json", {**trained, "added_tokens": [{"id": end, **token}]})
    settings = {"tokenizer_class": class_name, "added_tokens_decoder": {str(end): token}}
    settings |= {"eos_token": "<|endoftext|>", "add_prefix_space": prefix}
    if prefix is None:
        del settings["add_prefix_space"]
    write(tmp_path / "tokenizer_config.json", settings)
    found = read_tokenizer(tmp_path, "llama")
    assert found.notes == ()
    assert found.state is not None
    assert found.state["special"]["eos"] == [end]


# --- every key and file


VALUES: tuple[Any, ...] = (7, 0.5, True, "seven", ["seven"], {"rope_type": "linear", "factor": 7})


def read(path: Path, content: dict[str, Any]) -> ModelConfig:
    write(path, content)
    return read_model_config(path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2", "Qwen3", "Arcee", "BitNet"])
def test_every_key_of_a_config_is_used_or_harmless_or_named(tmp_path: Path, name: str) -> None:
    import transformers

    theirs = getattr(transformers, f"{name}Config")()
    path = tmp_path / "config.json"
    base = {**CONFIG, "model_type": theirs.model_type}
    before = read(path, base)
    listed = {key for keys in HARMLESS_OF_CONFIG.values() for key in keys}
    keys = {
        *theirs.to_dict(),
        *listed,
        *NEUTRAL_OF_CONFIG,
        "auto_map",
        "hidden_act",
        "partial_rotary_factor",
        "quantization_config",
        "rope_scaling",
        "rope_theta",
        "attn_logit_softcapping",
        "new",
    }
    silent = []
    for key in sorted(keys):
        for value in VALUES:
            try:
                found = read(path, {**base, key: value})
            except DataError:
                continue
            told = any(key in note for note in found.notes)
            harmless = key in listed or value in NEUTRAL_OF_CONFIG.get(key, ())
            if found == before and not told and not harmless:
                silent.append((key, value))
    assert silent == []


def test_every_key_of_an_inner_object_is_used_or_named(tmp_path: Path) -> None:
    quantization = {"quant_method": "bitnet", "new": 1, "rms_norm_eps": 1e-6}
    rotation = {"rope_type": "linear", "factor": 2.0, "beta_fast": 32}
    found = read(
        tmp_path / "config.json",
        {**CONFIG, "quantization_config": quantization, "rope_parameters": rotation},
    )
    assert found.notes == (
        "Keys of config.json that a llama does not use here: quantization_config.new, "
        "rope_parameters.beta_fast.",
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("convert_here")
def test_every_key_of_a_tokenizer_is_used_or_harmless_or_named(
    tmp_path: Path, trained: dict[str, Any]
) -> None:
    write(tmp_path / "tokenizer.json", trained)
    listed = {key for keys in HARMLESS_OF_TOKENIZER.values() for key in keys}
    roles = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
    keys = {*listed, *NEUTRAL_OF_TOKENIZER, *(f"{role}_token" for role in roles), "new"}
    keys |= {"added_tokens_decoder", "additional_special_tokens", "extra_special_tokens"}
    before = read_tokenizer(tmp_path, "llama")
    silent = []
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        for key in sorted(keys):
            for value in (7, True, "a", ["a"], {"9": "a"}):
                write(tmp_path / file, {key: value})
                try:
                    found = read_tokenizer(tmp_path, "llama")
                except DataError:
                    continue
                told = any(key in note for note in found.notes)
                harmless = key in listed or value in NEUTRAL_OF_TOKENIZER.get(key, ())
                if found.state == before.state and not told and not harmless:
                    silent.append((file, key, value))
        (tmp_path / file).unlink()
    assert silent == []


def test_older_files_beside_an_added_tokens_decoder_are_named(tmp_path: Path) -> None:
    token = {"content": "<a>", "special": True}
    write(tmp_path / "tokenizer_config.json", {"added_tokens_decoder": {"0": token}})
    write(tmp_path / "added_tokens.json", {"<a>": 0, "<b>": 1})
    write(tmp_path / "special_tokens_map.json", {"eos_token": "<c>"})
    (note,) = read_settings(tmp_path).notes
    assert note.endswith("of tokenizer_config.json leaves out: <b>, <c>.")


def test_names_that_cannot_be_printed_are_escaped(tmp_path: Path) -> None:
    (note,) = read(tmp_path / "config.json", {**CONFIG, "\x1b\n": 1}).notes
    assert note == "Keys of config.json that a llama does not use here: '\\x1b\\n'."


def test_a_mistral_has_no_biases_whatever_its_config_says(tmp_path: Path) -> None:
    mistral = {**CONFIG, "model_type": "mistral", "sliding_window": None, "attention_bias": True}
    found = read(tmp_path / "config.json", mistral)
    assert not found.biases
    assert found.notes == ("Keys of config.json that a mistral does not use here: attention_bias.",)


def test_merges_are_downloaded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def snapshot(_name: str, **options: Any) -> str:
        asked.update(options)
        return "."

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    fetched("hf://org/name")
    assert set(asked["allow_patterns"]) == {
        "*.safetensors",
        "*.json",
        "*.jinja",
        "tokenizer.model",
        "merges.txt",
    }


FILES = (
    "adapter_config.json",
    "adapter_model.bin",
    "adapter_model.safetensors",
    "added_tokens.json",
    "consolidated.safetensors",
    "config.yaml",
    "generation_config.json",
    "merges.txt",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
    "modeling_new.py",
    "new",
    "params.json",
    "pytorch_model.bin",
    "quantize_config.json",
    "README.md",
    "special_tokens_map.json",
    "spiece.model",
    "tekken.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("convert_here")
def test_every_file_is_used_or_harmless_or_named(
    tmp_path: Path, make_decoder: Make, export: Export
) -> None:
    folder = export(make_decoder(architecture="llama"), tmp_path / "out")
    before = HfModel(folder)
    assert (before.unmapped, before.tokenizer) == ((), None)
    for name in FILES:
        existed = (folder / name).exists()
        content = (folder / name).read_bytes() if existed else b""
        write(folder / name, {"new": 5})
        try:
            found = HfModel(folder)
            told = any(name in note for note in found.unmapped)
            used = found.tokenizer is not None
        except DataError as error:
            told, used = name in error.what, False
        harmless = any(re.fullmatch(pattern, name) for pattern in HARMLESS_FILES)
        # Added tokens without a tokenizer have nothing to be added to.
        assert told or used or harmless or name == "added_tokens.json", name
        if existed:
            (folder / name).write_bytes(content)
        else:
            (folder / name).unlink()


def test_every_tensor_is_used_or_named(tmp_path: Path, make_decoder: Make, export: Export) -> None:
    folder = export(make_decoder(architecture="qwen3"), tmp_path / "out", layout="dense")
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    for name in tensors:
        renamed = {f"{key}.new" if key == name else key: value for key, value in tensors.items()}
        safetensors.torch.save_file(renamed, path)
        with pytest.raises(DataError, match=re.escape(name)):
            HfModel(folder)
        safetensors.torch.save_file({**tensors, f"{name}.new": tensors[name].clone()}, path)
        (note,) = HfModel(folder).unmapped
        assert f"{name}.new" in note
