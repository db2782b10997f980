"""The page before ``arb serve`` with tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

expect = pytest.importorskip("playwright.sync_api").expect


@pytest.fixture(scope="module")
def serving(serve: Any, run: Path, base_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("secret\n")
    return serve("--model", f"tiny={run}", "--model", f"base={base_run}", "--api-key-file", keys)


@pytest.fixture
def page(context: Any, serving: Any) -> Any:
    """The page of the server, with a key and open settings."""
    opened = context.new_page()
    opened.goto(serving.origin)
    expect(opened.get_by_role("alert")).to_contain_text("a key is needed")
    opened.get_by_label("asks for a key").fill("secret")
    opened.keyboard.press("Enter")
    opened.get_by_role("button", name="Settings").click()
    return opened


def ask_for_the_likeliest(page: Any, most: str) -> None:
    """Ask for an answer that does not end before it has as many tokens as it may."""
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Max tokens").fill(most)
    page.locator("#text").fill("the cat")
    page.keyboard.press("Enter")


def test_a_conversation_with_models(page: Any, serving: Any, seen: dict[str, list[str]]) -> None:
    answers = page.locator(".assistant .body")
    notes = page.locator(".assistant .note")
    regenerate = page.get_by_role("button", name="Regenerate")
    ask_for_the_likeliest(page, "12")
    expect(notes).to_have_text("Ended by the limit of tokens.")
    text = answers.inner_text()
    assert text
    regenerate.click()
    expect(regenerate).to_be_enabled()
    assert answers.inner_text() == text

    page.get_by_label("Model").select_option("base")
    expect(page.get_by_role("button", name="Continue")).to_be_visible()
    ask_for_the_likeliest(page, "12")
    expect(notes).to_have_count(2)
    expect(notes.last).to_have_text("Ended by the limit of tokens.")

    page.get_by_label("Model").select_option("tiny")
    page.get_by_role("button", name="New conversation").click()
    ask_for_the_likeliest(page, "4000")
    expect(answers).not_to_have_text("")
    page.get_by_role("button", name="Stop").click()
    expect(notes).to_have_text("Stopped.")

    (line,) = seen["console"]
    assert "status of 401" in line
    own = (f"{serving.origin}/", "data:")
    assert [url for url in seen["requests"] if not url.startswith(own)] == []


def test_a_server_that_is_killed(page: Any, serving: Any) -> None:
    ask_for_the_likeliest(page, "4000")
    expect(page.locator(".assistant .body")).not_to_have_text("")
    serving.process.kill()
    expect(page.get_by_role("alert")).to_have_text("The connection ended before the answer did.")
    expect(page.locator(".assistant .note")).to_have_text("Not finished.")
    page.locator("#text").fill("again")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_have_text("The server cannot be reached.")
    expect(page.locator("#text")).to_have_value("again")
