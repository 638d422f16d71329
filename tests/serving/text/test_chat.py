"""Chat templates render as `transformers` renders them, and a bad one or bad messages are errors with a name."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from serving.errors import InvalidRequest
from serving.text.chat import ChatTemplate
from serving.text.tokenizer import Tokenizer

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi <b>there</b> & \"you\", 'é' 😀"},
    {"role": "assistant", "content": " Hello. "},
]

# The tricks of real templates: loops with break, namespaces, trimming, tojson, strings as methods, generation tags.
TEMPLATES = {
    "plain": "{% for m in messages %}\n  {{ m.role }}: {{ m['content'] | trim }}\n{% endfor %}\n",
    "namespace": (
        "{% set ns = namespace(found=false) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.found = true %}"
        "{% break %}{% endif %}{{ m.content }}{% endfor %}{{ ns.found }}{{ bos_token }}"
    ),
    "tojson": "{{ messages | tojson }}{{ messages[1] | tojson(indent=2) }}",
    "generation": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<go>{% endif %}"
    ),
    "python": "{{ messages[1].content.split(' ')[0].upper() }}{{ messages[-1].content.strip() }}{{ tools is none }}",
    "variable": "{% if enable_thinking is defined and enable_thinking %}think{% endif %}{{ messages | length }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_templates_render_as_in_transformers(name: str, add_generation_prompt: bool) -> None:
    source, variables = TEMPLATES[name], {"enable_thinking": True}
    ours = ChatTemplate(source, {"bos_token": "<s>"}).render(
        CHAT, add_generation_prompt=add_generation_prompt, variables=variables
    )
    (theirs,), _ = render_jinja_template(
        [CHAT], chat_template=source, add_generation_prompt=add_generation_prompt, bos_token="<s>", **variables
    )
    assert ours == theirs


@pytest.mark.real
def test_smollm2_chat_equals_transformers(smollm2_pair: tuple[Tokenizer, Any]) -> None:
    tokenizer, oracle = smollm2_pair
    template = ChatTemplate(tokenizer.chat_template or "", tokenizer.special_tokens)
    for messages in (CHAT, CHAT[1:2]):
        prompt = template.render(messages)
        assert prompt == oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        expected = oracle.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert tokenizer.encode(prompt, add_special_tokens=False) == expected


def test_the_final_message_can_be_continued() -> None:
    template = ChatTemplate("{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}", {})
    prompt = template.render(CHAT, add_generation_prompt=False, continue_final_message=True)
    assert prompt.endswith("[assistant] Hello. ")
    hiding = ChatTemplate("{{ messages[0].content }}", {})
    with pytest.raises(InvalidRequest) as error:
        hiding.render(CHAT, add_generation_prompt=False, continue_final_message=True)
    assert error.value.param == "continue_final_message"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ messages[9].content.x }}", "no element 9"),
        ("{{ 1 // 0 }}", "zero"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for i in range(10**9) %}{% endfor %}", "too big"),
    ],
)
def test_what_a_template_rejects_is_an_error_of_the_messages(source: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as error:
        ChatTemplate(source, {}).render(CHAT)
    assert error.value.param == "messages"


def test_a_broken_template_is_found_when_it_is_compiled() -> None:
    with pytest.raises(ValueError, match="not valid Jinja"):
        ChatTemplate("{% for %}", {})


def test_rendering_changes_nothing_of_the_caller() -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "x"}]
    template = ChatTemplate("{{ messages[0].content }}", {})
    template.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert messages == [{"role": "user", "content": "x"}]
