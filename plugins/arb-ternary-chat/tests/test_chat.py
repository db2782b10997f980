"""Conversations: what the model reads, what is kept, and what the terminal shows."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from arb_ternary import load_model
from arb_ternary.cli.main import main
from arb_ternary.errors import UsageProblem
from arb_ternary_chat.model import Model
from arb_ternary_chat.session import Session

GREEDY = {"temperature": 0.0, "max_new_tokens": 5}
Talk = Callable[..., int]


@pytest.fixture(scope="module")
def model(run: Path) -> Model:
    loaded: Model = load_model(run)
    return loaded


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch) -> Talk:
    """Run ``arb chat`` with lines in a pipe."""

    def run_command(source: Path, lines: str, *options: str) -> int:
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        return main(["chat", str(source), "--max-new-tokens", "5", *options])

    return run_command


def test_turns_with_a_kept_cache_are_those_of_whole_conversations(model: Model) -> None:
    session = Session(model, system="be brief", sampling=GREEDY)
    messages = [{"role": "system", "content": "be brief"}]
    for said in ("hello", "and then?", "why"):
        messages.append({"role": "user", "content": said})
        expected = model.generate(messages, **GREEDY)
        assert "".join(session.say(said)) == expected
        messages.append({"role": "assistant", "content": expected})
    assert session.conversation() == messages


def test_only_new_tokens_are_read(model: Model) -> None:
    session = Session(model, sampling=GREEDY)
    list(session.say("a" * 60))
    first = session.last
    list(session.say("b"))
    assert first.read > 60
    assert session.last.read < 50
    assert session.speed.read == first.read + session.last.read


def test_an_answer_that_is_stopped_belongs_to_the_conversation(model: Model) -> None:
    session = Session(model, sampling={**GREEDY, "max_new_tokens": 50})
    stream = session.say("hello")
    piece = next(stream)
    stream.close()
    assert session.messages[-1] == {"role": "assistant", "content": piece}


def test_the_oldest_turns_leave_a_full_context(model: Model) -> None:
    session = Session(model, system="s", sampling=GREEDY, context=120)
    for number in range(6):
        list(session.say(f"turn {number} " + "x" * 20))
    assert session.dropped > 0
    assert session.dropped % 2 == 0
    assert len(session.messages) == 12
    with pytest.raises(UsageProblem, match="the turn has"):
        list(session.say("y" * 200))
    assert len(session.messages) == 12


def test_a_base_model_continues_plain_text(base_run: Path) -> None:
    model = load_model(base_run)
    session = Session(model, sampling=GREEDY)
    first = "".join(session.say("the cat"))
    assert first == model.generate("the cat", **GREEDY)
    second = "".join(session.say(" and"))
    assert second == model.generate(f"the cat{first} and", **GREEDY)


def test_in_a_pipe_each_line_is_a_turn_and_only_answers_are_printed(
    run: Path, model: Model, talk: Talk, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    saved = tmp_path / "talk.jsonl"
    lines = f"hello\n\nmore\n/save {saved}\n/stats\n/exit\nnever\n"
    assert talk(run, lines, "--temperature", "0") == 0
    captured = capsys.readouterr()
    session = Session(model, sampling=GREEDY)
    answers = ["".join(session.say(said)) for said in ("hello", "more")]
    assert captured.out == "".join(f"{answer}\n" for answer in answers)
    assert "tokens per second" in captured.err
    assert json.loads(saved.read_text()) == {"messages": session.conversation()}
    assert talk(run, f"hi\n/save {saved}\n") == 0
    assert len(saved.read_text().splitlines()) == 2


def test_system_and_reset_begin_anew(run: Path, talk: Talk, tmp_path: Path) -> None:
    saved = tmp_path / "talk.jsonl"
    lines = f"one\n/system be kind\ntwo\n/save {saved}\n/reset\nthree\n/save {saved}\n"
    assert talk(run, lines) == 0
    first, second = (json.loads(line)["messages"] for line in saved.read_text().splitlines())
    assert [each["role"] for each in first] == ["system", "user", "assistant"]
    assert second[1]["content"] == "three"


def test_wrong_commands_are_named(
    run: Path, base_run: Path, talk: Talk, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert talk(run, "/rest\n") == 2
    assert "Did you mean /reset?" in capsys.readouterr().err
    assert talk(run, f"/save {tmp_path}\n") == 2
    assert "Is a directory" in capsys.readouterr().err
    assert talk(base_run, "hi\n", "--system", "x") == 2
    assert "no chat template" in capsys.readouterr().err
    assert talk(base_run, "hi\n") == 0
    assert "it continues what you write" in capsys.readouterr().err


def test_a_stop_text_ends_an_answer(run: Path, model: Model, talk: Talk, capsys) -> None:  # type: ignore[no-untyped-def]
    answer = model.generate([{"role": "user", "content": "hello"}], **GREEDY)
    letter = answer[2]
    assert talk(run, "hello\n", "--temperature", "0", "--stop", letter) == 0
    assert capsys.readouterr().out == answer[: answer.index(letter)] + "\n"
