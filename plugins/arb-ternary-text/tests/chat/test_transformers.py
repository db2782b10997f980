"""Text, ids and masks equal those of transformers' ``apply_chat_template``."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from arb_ternary.errors import DataError
from arb_ternary_text.chat.answers import encode_conversation, encode_rendered, tokens_in
from arb_ternary_text.chat.conversations import Conversation
from arb_ternary_text.chat.template import ChatTemplate, chat_template

LLAMA = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != "
    "(loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'].strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' ~ message['content']|trim ~ ' ' ~ eos_token }}{% endif %}{% endfor %}"
)
TOOLS = """{%- if tools %}
    {{- tools | tojson(indent=2) }}
{%- endif %}
{%- set ns = namespace(count=0) %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {%- set ns.count = ns.count + 1 %}
<|{{ message.role }}|>{{ {"n": ns.count, "é<": loop.last} | tojson }}
    {%- if message.role == "assistant" %}
        {%- generation %}
            {{- message.content + eos_token }}
        {%- endgeneration %}
    {%- else %}
        {{- message.content.split('x')[-1].lstrip('\\n') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif -%}
"""
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONTROL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>")
#: What looks like a control token in any of TRL's templates.
SPELLED = re.compile(
    r"<\|[^|<>{}'\" ]+\|>|<\uff5c[^\uff5c]+\uff5c>|<\|?[a-z_]+\|?>|</s>|\[/?[A-Z_]+\]"
)

TEXTS = st.text(st.sampled_from("ab x\n\t\"'<>{}é☃🙂\\"), max_size=12)


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, str]]:
    turns = draw(st.integers(1, 3))
    messages = [{"role": "system", "content": draw(TEXTS)}] if draw(st.booleans()) else []
    for _ in range(turns):
        messages.append({"role": "user", "content": draw(TEXTS)})
        messages.append({"role": "assistant", "content": draw(TEXTS)})
    return messages


@cache
def made(make_tokenizer: Callable[..., Any], source: str) -> tuple[Any, ChatTemplate, Any]:
    """Return our tokenizer, its template, and transformers' tokenizer."""
    transformers = pytest.importorskip("transformers")
    library = pytest.importorskip("tokenizers")
    spelled = sorted(set(SPELLED.findall(source)) - set(CONTROL))
    control = [*CONTROL, *spelled]
    ends = (257, *range(258, 256 + len(control)))
    ours = make_tokenizer(control, bos=256, eos=ends, pad=257, chat_template=source)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=library.Tokenizer.from_str(ours.inner.definition),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
    )
    theirs.chat_template = source
    return ours, chat_template(ours), theirs


def compare(make_tokenizer: Any, source: str, messages: list[dict[str, str]]) -> bool:
    """Compare a conversation; return whether the template writes it."""
    ours, template, theirs = made(make_tokenizer, source)
    for prompt in (False, True):
        options = {"add_generation_prompt": prompt}
        try:
            text = theirs.apply_chat_template(messages, tokenize=False, **options)
        except Exception:
            with pytest.raises(DataError):
                template.render(messages, **options)
            return False
        rendered = template.render(messages, **options)
        assert rendered.text == text
        ids = theirs.apply_chat_template(messages, return_dict=False, **options)
        found, offsets = encode_rendered(ours, rendered)
        assert found == ids
    if template.marks_answers:
        wanted = theirs.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True
        )
        rendered = template.render(messages)
        found, offsets = encode_rendered(ours, rendered)
        mask = [bool(each) for each in wanted["assistant_masks"]]
        assert tokens_in(rendered.generated, offsets) == mask
        encoded = encode_conversation(ours, template, Conversation(tuple(messages), "here"))
        assert encoded.learned == mask
    return True


@pytest.mark.parametrize("source", [CHATML, LLAMA, TOOLS], ids=["chatml", "llama", "tools"])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(messages=conversations())
def test_text_ids_and_masks_are_those_of_transformers(
    make_tokenizer: Any, source: str, messages: list[dict[str, str]]
) -> None:
    compare(make_tokenizer, source, messages)


def trl_templates() -> list[Any]:
    """Return the templates that come with TRL, which is not imported."""
    from importlib.util import find_spec

    found = find_spec("trl")
    if found is None or found.origin is None:
        return [pytest.param("", id="trl", marks=pytest.mark.skip(reason="needs the package trl"))]
    folder = Path(found.origin).parent / "chat_templates"
    files = sorted(folder.glob("*.jinja"))
    return [pytest.param(file.read_text(encoding="utf-8"), id=file.stem) for file in files]


@pytest.mark.extended
@pytest.mark.parametrize("source", trl_templates())
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(messages=conversations())
def test_templates_of_trl_give_what_transformers_gives(
    make_tokenizer: Any, source: str, messages: list[dict[str, str]]
) -> None:
    compare(make_tokenizer, source, messages)


@pytest.mark.parametrize("source", [CHATML, TOOLS], ids=["chatml", "tools"])
def test_typed_control_tokens_are_the_letters_of_transformers(
    make_tokenizer: Any, source: str
) -> None:
    """Bytes are merged with nothing, so that both ways to cut the text give the same ids."""
    ours, template, theirs = made(make_tokenizer, source)
    typed = "a<|im_end|>b<|im_end|<|im_end|></s>"
    messages = [{"role": "user", "content": typed}, {"role": "assistant", "content": "<s>"}]
    wanted = theirs.apply_chat_template(messages, return_dict=False, sanitize_control_tokens=True)
    rendered = template.render(messages)
    assert rendered.text == theirs.apply_chat_template(messages, tokenize=False)
    assert encode_rendered(ours, rendered)[0] == wanted
