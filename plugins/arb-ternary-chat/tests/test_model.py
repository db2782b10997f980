"""A model from a run and from files computes the same, and learns nothing by itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from arb_ternary import load_model
from arb_ternary.errors import DataError, UsageProblem
from arb_ternary_chat.model import Model
from arb_ternary_interchange.export import export_model
from arb_ternary_text.data.tokenizers import special_tokens
from arb_ternary_text.models.generate import CachedReader

CONVERSATION = [{"role": "user", "content": "hi <|im_end|>"}]


@pytest.fixture(scope="module")
def model(run: Path) -> Model:
    loaded: Model = load_model(run)
    return loaded


def test_a_run_and_its_export_give_the_same_logits(run: Path, model: Model, tmp_path: Path) -> None:
    export_model(run, tmp_path / "model.gguf", "gguf", ["type=f32"])
    back = load_model(tmp_path / "model.gguf")
    assert special_tokens(back.tokenizer) == special_tokens(model.tokenizer)
    ids = model.encode("the cat")
    torch.testing.assert_close(back.logits(ids), model.logits(ids), rtol=1e-4, atol=1e-4)


def test_logits_are_those_of_the_module(model: Model) -> None:
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    with torch.no_grad():
        expected = model.module(ids)
    assert torch.equal(model.logits(ids), expected)
    # A batch of another size may sum in another order.
    torch.testing.assert_close(model.logits([1, 2, 3]), model.logits(ids)[0])


def test_typed_control_tokens_are_letters_in_prompts_and_messages(model: Model) -> None:
    assert model.encode("a<|im_end|>") == list(b"a<|im_end|>")
    ids = model.encode(CONVERSATION)
    expected = [256, *b"user\nhi <|im_end|>", 257, *b"\n", 256, *b"assistant\n"]
    assert ids == expected


def test_greedy_text_is_the_argmax_of_logits(model: Model) -> None:
    ids = model.encode(CONVERSATION)
    drawn: list[int] = []
    while len(drawn) < 8:
        token = int(model.logits([*ids, *drawn])[-1].argmax())
        if token in model.special.eos:
            break
        drawn.append(token)
    expected = model.tokenizer.decode(drawn)
    answer = model.generate(CONVERSATION, temperature=0, max_new_tokens=8)
    assert answer == expected
    assert answer == "".join(model.stream(CONVERSATION, temperature=0, max_new_tokens=8))


def test_a_reader_reads_only_what_is_new(model: Model) -> None:
    reader = CachedReader(model.causal)
    observed: list[int] = []
    options = {"temperature": 0, "max_new_tokens": 6}
    first = model.generate("the cat", reader=reader, observe=observed.append, **options)
    assert len(observed) == 6
    longer = f"the cat{first} and the dog"
    assert model.generate(longer, reader=reader, **options) == model.generate(longer, **options)
    other = "the cow"
    assert model.generate(other, reader=reader, **options) == model.generate(other, **options)


def test_a_model_is_loaded_without_accumulators(model: Model, run: Path) -> None:
    with torch.enable_grad(), pytest.raises(UsageProblem, match="without its accumulators"):
        model.module(torch.tensor([[1, 2]])).sum().backward()
    learning = load_model(run, accumulators=True)
    learning.module(torch.tensor([[1, 2]])).sum().backward()


def test_a_model_without_a_tokenizer_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match="no such file"):
        load_model(tmp_path / "nothing")
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    record = json.loads((copied / "run.json").read_text())
    record["attachments"] = []
    (copied / "run.json").write_text(json.dumps(record))
    with pytest.raises(DataError, match="there is no tokenizer with it"):
        load_model(copied)


def test_a_conversation_needs_a_template(base_run: Path) -> None:
    with pytest.raises(DataError, match="no chat_template"):
        load_model(base_run).generate(CONVERSATION)
