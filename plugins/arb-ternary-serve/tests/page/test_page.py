"""The page of a chat in headless Chromium, before a server that answers as a test says.

A request that is refused makes Chromium itself write a line: those tests take it off the record.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

sync_api = pytest.importorskip("playwright.sync_api")
expect = sync_api.expect

CODE = "Try this:\n```python\nfor i in range(3):\n    print(i)\n```\n\nDone."


def ask(page: Any, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def answers(page: Any) -> Any:
    return page.locator(".assistant .body")


def forget_refusal(seen: dict[str, list[str]], status: int) -> None:
    (line,) = seen["console"]
    assert f"status of {status}" in line
    seen["console"].clear()


def test_text_appears_as_it_comes(page: Any, server: Any) -> None:
    server.go.clear()
    server.cut = 1
    server.pause = 0.002
    server.pieces = ["Grüße, 日本", " and the rest"]
    ask(page, "hello")
    expect(answers(page)).to_have_text("Grüße, 日本")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    server.go.set()
    expect(answers(page)).to_have_text("Grüße, 日本 and the rest")
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    expect(page.get_by_role("status")).to_have_text("Answer: Grüße, 日本 and the rest")
    assert server.requests == [
        (
            "/v1/chat/completions",
            {"model": "tiny", "stream": True, "messages": [{"role": "user", "content": "hello"}]},
        )
    ]


def test_turns_and_settings_are_sent(page: Any, server: Any) -> None:
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System message").fill("Be brief.")
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Max tokens").fill("7")
    ask(page, "one")
    expect(answers(page)).to_have_text("Hello there.")
    ask(page, "two")
    expect(answers(page)).to_have_count(2)
    expect(answers(page).last).to_have_text("Hello there.")
    assert server.requests[1][1] == {
        "model": "tiny",
        "stream": True,
        "temperature": 0,
        "max_tokens": 7,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "Hello there."},
            {"role": "user", "content": "two"},
        ],
    }


def test_settings_out_of_range_are_not_sent(page: Any, server: Any) -> None:
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("-1")
    page.get_by_role("button", name="Settings").click()
    ask(page, "one")
    expect(page.get_by_label("Temperature")).to_be_focused()
    assert server.requests == []


def test_shift_enter_starts_a_line(page: Any, server: Any) -> None:
    page.get_by_label("Message", exact=True).focus()
    page.keyboard.type("a")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("b")
    assert server.requests == []
    page.keyboard.press("Enter")
    expect(answers(page)).to_have_text("Hello there.")
    assert server.requests[0][1]["messages"][0]["content"] == "a\nb"


def test_stop_keeps_the_text_and_closes_the_stream(page: Any, server: Any) -> None:
    server.go.clear()
    ask(page, "hello")
    expect(answers(page)).to_have_text("Hello")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".assistant .note")).to_have_text("Stopped.")
    assert server.cancelled.wait(10)
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    server.go.set()
    ask(page, "again")
    expect(answers(page).last).to_have_text("Hello there.")
    expect(answers(page).first).to_have_text("Hello")


def test_regenerate_replaces_the_last_answer(page: Any, server: Any) -> None:
    ask(page, "hello")
    expect(answers(page)).to_have_text("Hello there.")
    server.pieces = ["Good day."]
    page.get_by_role("button", name="Regenerate").click()
    expect(answers(page)).to_have_text("Good day.")
    assert server.requests[0] == server.requests[1]


@pytest.mark.parametrize("begun", ["", "Hello"])
def test_new_conversation_ends_an_answer(page: Any, server: Any, begun: str) -> None:
    server.go.clear()
    server.pieces[0] = begun
    ask(page, "hello")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    expect(answers(page)).to_have_text(begun)
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator(".message")).to_have_count(0)
    assert server.cancelled.wait(10)
    expect(page.get_by_label("Message", exact=True)).to_have_value("")
    server.go.set()
    ask(page, "again")
    expect(answers(page)).to_have_text(f"{begun} there.")
    assert len(server.requests[1][1]["messages"]) == 1


def test_a_reload_keeps_everything(page: Any, server: Any) -> None:
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("0.5")
    ask(page, "hello")
    expect(answers(page)).to_have_text("Hello there.")
    server.go.clear()
    ask(page, "more")
    expect(answers(page).last).to_have_text("Hello")
    page.get_by_label("Message", exact=True).fill("a draft")
    page.reload()
    expect(page.locator(".message .body")).to_have_text(["hello", "Hello there.", "more", "Hello"])
    expect(page.locator(".assistant .note").last).to_have_text("Not finished.")
    expect(page.get_by_label("Message", exact=True)).to_have_value("a draft")
    expect(page.get_by_label("Temperature")).to_have_value("0.5")


def test_a_reload_before_the_answer_gives_the_question_back(page: Any, server: Any) -> None:
    server.go.clear()
    server.pieces = ["", "late"]
    ask(page, "hello")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    # What would be left if the tab crashed now.
    (kept,) = page.evaluate("Object.values(sessionStorage)")
    assert json.loads(kept)["messages"] == []
    assert json.loads(kept)["draft"] == "hello"
    page.reload()
    expect(page.get_by_label("Message", exact=True)).to_have_value("hello")
    expect(page.locator(".message")).to_have_count(0)


@pytest.mark.parametrize(
    "text", ["<img src=x onerror=\"console.log('run')\">", "<b>bold</b>", "```\n<i>x</i>\n```"]
)
def test_html_of_a_model_stays_text(page: Any, server: Any, text: str) -> None:
    server.pieces = list(text)
    ask(page, text)
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    shown = text.removeprefix("```\n").removesuffix("\n```")
    expect(page.locator(".message .body")).to_have_text([shown, shown])
    assert page.locator(".message :is(img, b, i)").count() == 0


def test_fences_hold_code(page: Any, server: Any) -> None:
    server.go.clear()
    cut = CODE.index("python") - 1
    server.pieces = [CODE[:cut], CODE[cut:]]
    ask(page, "code?")
    expect(answers(page)).to_contain_text("``")
    server.go.set()
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    expect(answers(page).locator("p")).to_have_text(["Try this:", "Done."])
    assert answers(page).locator("p").last.inner_text() == "Done."
    assert answers(page).locator("pre").inner_text() == "for i in range(3):\n    print(i)"


def test_a_refusal_gives_the_question_back(page: Any, server: Any, seen: Any) -> None:
    server.refusal = (429, {"Retry-After": "5"}, {"message": "Too many wait.", "code": None})
    ask(page, "hello")
    expect(page.get_by_role("alert")).to_have_text("Too many wait. Try again in 5 seconds.")
    expect(page.get_by_label("Message", exact=True)).to_have_value("hello")
    expect(page.locator(".message")).to_have_count(0)
    forget_refusal(seen, 429)
    server.refusal = None
    page.keyboard.press("Enter")
    expect(answers(page)).to_have_text("Hello there.")
    expect(page.get_by_role("alert")).to_be_hidden()


def test_a_refused_regeneration_keeps_the_answer(page: Any, server: Any, seen: Any) -> None:
    ask(page, "hello")
    expect(answers(page)).to_have_text("Hello there.")
    server.refusal = (400, {}, {"message": "No.", "code": None})
    page.get_by_role("button", name="Regenerate").click()
    expect(page.get_by_role("alert")).to_have_text("No.")
    expect(answers(page)).to_have_text("Hello there.")
    forget_refusal(seen, 400)


def test_a_connection_that_ends_early_is_told(page: Any, server: Any) -> None:
    server.finish_reason = None
    ask(page, "hello")
    expect(page.get_by_role("alert")).to_contain_text("ended before the answer did")
    expect(answers(page)).to_have_text("Hello there.")
    expect(page.locator(".assistant .note")).to_have_text("Not finished.")


def test_the_limit_of_tokens_is_told(page: Any, server: Any) -> None:
    server.finish_reason = "length"
    ask(page, "hello")
    expect(page.locator(".assistant .note")).to_have_text("Ended by the limit of tokens.")


def test_a_key_is_asked_for_and_kept_for_the_tab(
    context: Any, server: Any, seen: dict[str, list[str]]
) -> None:
    server.key = "secret"
    page = context.new_page()
    page.goto(server.origin)
    field = page.get_by_label("asks for a key")
    expect(page.get_by_role("alert")).to_have_text("The key is wrong.")
    field.fill("wrong")
    page.keyboard.press("Enter")
    expect(field).to_have_value("")
    expect(page.get_by_role("alert")).to_be_visible()
    field.fill(" secret ")
    page.keyboard.press("Enter")
    expect(field).to_be_hidden()
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    ask(page, "hello")
    expect(answers(page)).to_have_text("Hello there.")
    page.reload()
    expect(page.get_by_label("Model")).to_have_value("tiny")
    assert all("401" in line for line in seen["console"])
    assert page.evaluate("localStorage.length") == 0
    assert context.cookies() == []
    other = context.new_page()
    other.goto(server.origin)
    expect(other.get_by_label("asks for a key")).to_be_visible()


def test_a_model_is_picked(page: Any, server: Any) -> None:
    server.models = [{"id": "tiny"}, {"id": "small"}]
    page.reload()
    page.get_by_label("Model").select_option("small")
    ask(page, "hello")
    expect(answers(page)).to_have_text("Hello there.")
    assert server.requests[0][1]["model"] == "small"
    page.reload()
    expect(page.get_by_label("Model")).to_have_value("small")


def test_text_is_seen_unless_the_user_scrolled_up(page: Any, server: Any) -> None:
    server.pieces = ["line\n" * 100, "line\n" * 100, "line\n" * 100]
    server.go.clear()
    ask(page, "hello")
    log = page.get_by_role("log")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    expect(answers(page)).to_contain_text("line")
    below = "log => log.scrollHeight - log.clientHeight - log.scrollTop"
    page.wait_for_timeout(100)
    assert log.evaluate(below) <= 1
    log.hover()
    page.mouse.wheel(0, -500)
    page.wait_for_timeout(200)
    place = log.evaluate("log => log.scrollTop")
    assert log.evaluate(below) >= 400
    server.go.set()
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    assert log.evaluate("log => log.scrollTop") == place
    ask(page, "more")
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    assert log.evaluate(below) <= 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 900])
def test_nothing_is_wider_than_the_window(page: Any, server: Any, scheme: str, width: int) -> None:
    server.models = [{"id": "a-model-with-quite-a-long-name-" * 3}]
    server.pieces = ["word" * 60, f"\n```\n{'code ' * 60}\n```\n"]
    page.set_viewport_size({"width": width, "height": 640})
    page.emulate_media(color_scheme=scheme)
    page.reload()
    page.get_by_role("button", name="Settings").click()
    ask(page, "question" * 30)
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.get_by_role("log").evaluate("log => log.scrollWidth <= log.clientWidth")
    assert page.evaluate("document.documentElement.scrollHeight <= innerHeight")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_have_contrast(page: Any, scheme: str) -> None:
    """Text has the contrast of 4.5 that WCAG 2.2 asks for (1.4.3)."""
    page.emulate_media(color_scheme=scheme)
    ask(page, "hello")
    expect(answers(page)).to_have_text("Hello there.")
    elements = page.locator("h1, h2, .body, #keys, #send, button:enabled")
    grounds = elements.evaluate_all(
        """elements => elements.filter((element) => element.offsetParent).map((element) => {
          const ink = getComputedStyle(element).color;
          let ground = element;
          while (getComputedStyle(ground).backgroundColor === "rgba(0, 0, 0, 0)") {
            ground = ground.parentElement;
          }
          return [ink, getComputedStyle(ground).backgroundColor];
        })"""
    )
    assert len(grounds) > 6
    for ink, ground in grounds:
        light, dark = sorted((luminance(ink), luminance(ground)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (ink, ground)


def luminance(colour: str) -> float:
    """Return the relative luminance of ``rgb(r, g, b)``, as WCAG defines it."""
    shares = [int(each) / 255 for each in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    linear = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_a_model_without_a_template_continues_text(page: Any, server: Any) -> None:
    server.models = [{"id": "base", "has_chat_template": False}]
    page.reload()
    expect(page.get_by_text("This model has no template of a chat.")).to_be_visible()
    expect(page.get_by_role("button", name="Continue")).to_be_visible()
    page.get_by_label("Text to continue").fill("Once upon")
    page.keyboard.press("Enter")
    expect(answers(page)).to_have_text("Hello there.")
    page.keyboard.press("Enter")
    expect(answers(page)).to_have_count(2)
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    paths = [path for path, _ in server.requests]
    assert paths == ["/v1/completions"] * 2
    assert server.requests[0][1] == {
        "model": "base",
        "stream": True,
        "max_tokens": 256,
        "prompt": "Once upon",
    }
    assert server.requests[1][1]["prompt"] == "Once uponHello there."


def test_every_field_has_a_name_and_is_reached_by_tab(page: Any) -> None:
    page.get_by_role("button", name="Settings").click()
    names = page.locator(":is(button, input, select, textarea):visible").evaluate_all(
        "fields => fields.map((field) => field.labels?.[0]?.textContent || field.textContent)"
    )
    assert len(names) >= 8
    assert all(name.strip() for name in names)
    reached = set()
    for _ in range(20):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id"))
    wanted = {"model", "settings-button", "new", "system", "temperature", "max-tokens", "plain"}
    assert wanted | {"log", "text", "send"} <= reached
