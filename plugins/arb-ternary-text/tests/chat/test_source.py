"""The data source ``chat``: rows, splits, fingerprints, and a run that is killed and resumed."""

from __future__ import annotations

import json
import logging
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from arb_ternary.config.yaml_document import dump_yaml
from arb_ternary.errors import ConfigError, DataError
from arb_ternary.protocols.data import Batch, BatchRequest, DataSource, MaskContext
from arb_ternary_text.chat.source import ChatConfig, ChatSource, build
from arb_ternary_text.data.masking import build_answers, build_causal
from arb_ternary_text.data.tokenizers import from_json, special_tokens


def words(number: int) -> str:
    return " ".join(str(number * k % 97) for k in range(1, 2 + number % 5))


@pytest.fixture
def files(tokenizer: Any, tmp_path: Path) -> dict[str, str]:
    """Return the paths of a tokenizer and of forty conversations."""
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer.to_json()))
    pairs = [{"prompt": words(n), "completion": words(3 * n)} for n in range(40)]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    return {
        "train": str(tmp_path / "chats.jsonl"),
        "tokenizer": str(tmp_path / "tokenizer.json"),
    }


def learned_text(source: ChatSource, batch: Batch) -> list[str]:
    pairs = zip(batch.data, batch.extras["learned"], strict=True)
    return [source.tokenizer.decode(row[marks].tolist()) for row, marks in pairs]


def drawn(source: ChatSource, workers: int = 0, count: int = 5, skip: int = 0) -> list[Batch]:
    request = BatchRequest(batch_size=4, block_size=64, seed=3, workers=workers)
    with closing(source.batches(request)) as batches:
        batches.skip(skip)
        return [next(batches) for _ in range(count)]


def test_rows_hold_whole_conversations_and_learn_their_answers(files: dict[str, str]) -> None:
    source = build(ChatConfig(**files))
    assert isinstance(source, DataSource)
    assert len(source.train) + len(source.validation) == 40
    assert len(source.validation) == 4
    answers = {f"{words(3 * n)}<|im_end|>" for n in range(40)}
    for batch in (*drawn(source), *source.held_out(2, 64, None)):
        assert batch.data.shape[1] == 65
        assert (batch.data[:, 0] == 256).all(), "a row begins at a conversation"
        for text in learned_text(source, batch):
            parts = text.split("<|im_end|>")
            assert parts.pop() == ""
            assert {f"{part}<|im_end|>" for part in parts} <= answers
    rows = source.rows(64)
    assert source.samples_per_epoch(64) == len(rows)
    assert rows.lost == 0


def test_batches_do_not_depend_on_workers_or_resumption(files: dict[str, str]) -> None:
    source = build(ChatConfig(**files))
    expected = drawn(source)
    for other in (drawn(source, workers=3), [*drawn(source, count=2), *drawn(source, 2, 3, 2)]):
        for one, two in zip(expected, other, strict=True):
            assert torch.equal(one.data, two.data)
            assert torch.equal(one.extras["learned"], two.extras["learned"])
            assert torch.equal(one.sample_ids, two.sample_ids)


def test_fingerprint_knows_data_and_options_and_no_paths(
    files: dict[str, str], tmp_path: Path
) -> None:
    first = build(ChatConfig(**files)).fingerprint()
    other = tmp_path / "other.jsonl"
    other.write_text(Path(files["train"]).read_text())
    assert build(ChatConfig(**{**files, "train": str(other)})).fingerprint() == first
    for change in ({"too_long": "drop"}, {"roles": ["user"]}, {"validation_fraction": 0.5}):
        assert build(ChatConfig(**{**files, **change})).fingerprint() != first


def test_split_keeps_equal_conversations_together(files: dict[str, str], tmp_path: Path) -> None:
    whole = build(ChatConfig(**files))
    lines = Path(files["train"]).read_text().split("\n")
    (tmp_path / "twice.jsonl").write_text("\n".join([*reversed(lines), *lines]))
    twice = build(ChatConfig(**{**files, "train": str(tmp_path / "twice.jsonl")}))
    assert len(twice.validation) == 2 * len(whole.validation)
    assert set(twice.validation.ids.tolist()) == set(whole.validation.ids.tolist())
    (tmp_path / "one.jsonl").write_text(f"{lines[0]}\n{lines[0]}")
    with pytest.raises(DataError, match="1 different conversations are too few"):
        build(ChatConfig(**{**files, "train": str(tmp_path / "one.jsonl")}))


def test_template_file_goes_with_the_run(files: dict[str, str], tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ strftime_now('%d %b %Y') }}{{ m.content }}"
        "<|im_end|>{% endfor %}"
    )
    (tmp_path / "mine.jinja").write_text(template)
    source = build(ChatConfig(**files, template=str(tmp_path / "mine.jinja"), date="2026-03-04"))
    attached = from_json(source.attachments()["tokenizer"])
    assert special_tokens(attached).chat_template == template
    assert "04 Mar 2026" in source.tokenizer.decode(drawn(source)[0].data[0].tolist())


def test_what_is_skipped_lost_or_spelled_is_told(
    files: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Path(files["train"]).open("a") as file:
        file.write('\nno JSON\n{"text": "<|im_start|>user"}\n')
        file.write(json.dumps({"prompt": "x" * 300, "completion": "lost"}))
    with pytest.raises(DataError, match=r"chats.jsonl:41: not JSON"):
        build(ChatConfig(**files))
    caplog.set_level(logging.INFO, "arb_ternary.data")
    source = build(ChatConfig(**files, on_bad_line="skip", validation_fraction=0.05))
    source.rows(64)
    told = caplog.text
    assert "1 skipped, the first:" in told
    assert "1 training texts spell control tokens, which stay letters" in told
    assert source.rows(64).lost > 250
    assert f"{len(source.rows(64))} training rows of 65 tokens" in told


def test_faults_name_the_line(files: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "odd.jinja").write_text("{{ raise_exception('never') }}")
    changed = {**files, "template": str(tmp_path / "odd.jinja")}
    with pytest.raises(DataError, match=r"chats.jsonl:\d+: .*odd.jinja: the chat template, line 1"):
        build(ChatConfig(**changed))
    with pytest.raises(DataError, match="the chat template refuses all of them"):
        build(ChatConfig(**changed, on_bad_line="skip"))
    with pytest.raises(DataError, match="both training and validation conversations"):
        build(ChatConfig(**files, validation=files["train"]))
    with pytest.raises(DataError, match="do not continue each other"):
        build(ChatConfig(**files)).batches(BatchRequest(2, 64, 0, order="sequential"))
    with pytest.raises(DataError, match="nothing is left to learn in rows of 5 tokens"):
        build(ChatConfig(**files)).batches(BatchRequest(2, 4, 0))


def test_answers_need_data_that_marks_them() -> None:
    context = MaskContext(step=0, seed=0, vocabulary_size=9)
    generator = torch.Generator()
    learned = torch.tensor([[True, False, True, True]])
    batch = Batch(torch.tensor([[1, 2, 3, 4]]), torch.tensor([0]), {"learned": learned})
    masked = build_answers().apply(batch, generator, context)
    causal = build_causal().apply(batch, generator, context)
    assert masked.loss_mask.tolist() == [[False, True, True]]
    assert torch.equal(masked.inputs, causal.inputs)
    assert torch.equal(masked.targets, causal.targets)
    with pytest.raises(DataError, match=r"masking answers: .*\n.*data.name: chat"):
        build_answers().apply(Batch(batch.data, batch.sample_ids), generator, context)


def test_config_without_the_masking_strategy_is_refused(
    files: dict[str, str], tmp_path: Path
) -> None:
    from arb_ternary_train.loading import load_config

    config = {
        "data": {"name": "chat", **files},
        "model": {"name": "decoder", "width": 16, "layers": 1, "heads": 2, "max_length": 64},
        "optimizer": "sign_votes",
        "phases": [{"name": "standard", "steps": 2, "batch_size": 2, "block_size": 64}],
    }
    (tmp_path / "run.yaml").write_text(dump_yaml(config))
    with pytest.raises(ConfigError, match="needs masking: answers"):
        load_config(tmp_path / "run.yaml")


def test_killed_run_ends_with_the_same_bytes(files: dict[str, str], tmp_path: Path) -> None:
    from arb_ternary_train.loading import load_config
    from arb_ternary_train.progress import Silent
    from arb_ternary_train.runner import RunRequest, train

    class Killed(BaseException):
        pass

    config = {
        "data": {"name": "chat", **files},
        "masking": "answers",
        "model": {"name": "decoder", "width": 32, "layers": 1, "heads": 2, "max_length": 64},
        "optimizer": "sign_votes",
        "checkpoint": {"every": 1, "keep": 9},
        "phases": [
            {
                "name": "standard",
                "steps": 3,
                "batch_size": 2,
                "block_size": 64,
                "gradient_accumulation_steps": 2,
                "eval_every": 1,
                "num_workers": 2,
            }
        ],
    }
    (tmp_path / "run.yaml").write_text(dump_yaml(config))
    loaded = load_config(tmp_path / "run.yaml").config
    seen = 0

    def faults(point: str) -> None:
        nonlocal seen
        seen += 1
        if seen == 8:
            raise Killed

    def run(name: str, **options: Any) -> Path:
        directory = tmp_path / name
        train(loaded, RunRequest(directory=directory, backend="torch", reporter=Silent, **options))
        return directory

    whole = run("whole")
    with pytest.raises(Killed):
        run("killed", faults=faults)
    killed = run("killed", resume="auto")
    for name in ("model.safetensors", "state.safetensors", "state.json"):
        ends = [max(d.glob("checkpoints/step-*")) / name for d in (whole, killed)]
        assert ends[0].read_bytes() == ends[1].read_bytes()
    assert "chat_template" in (whole / "tokenizer.json").read_text()
