"""Requests as real clients send them: each is answered, and the header names what of it was ignored.

The bodies in `recorded` follow the sources of openai 3.54, langchain-openai 1.7.4, litellm 1.109.1, open-webui 0.12.4,
Continue, Kimi Code and lm-eval 0.4.13; texts are shortened. `with_tools` has what they send for tools,
`responses` what clients like Codex, OpenAI's agents and langchain-openai send to /v1/responses.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from serving.api.settings import ServedModel
from serving.text.tokenizer import Tokenizer
from tests.fakes.generate import MODEL, VOCAB_SIZE, CountingObserver, ScriptedGenerate, app_of, calling, saying

FOLDER = Path(__file__).parent / "recorded"
CLIENTS = (
    "openai",
    "langchain",
    "langchain_structured",
    "litellm_openai",
    "litellm_hosted_vllm",
    "open_webui",
    "continue",
    "kimi_code",
    "lm_eval",
    "with_tools",
    "responses",
)
ANSWERS = {"/v1/chat/completions": '"choices"', "/v1/completions": '"choices"', "/v1/responses": '"output":[{'}
BODIES = [(client, sent) for client in CLIENTS for sent in json.loads((FOLDER / f"{client}.json").read_text())]
SERVED = ServedModel(names=(MODEL,), max_model_len=65_536, vocab_size=VOCAB_SIZE, created=1_700_000_000)


@pytest.mark.parametrize(("client", "sent"), BODIES, ids=[f"{client}: {sent['name']}" for client, sent in BODIES])
async def test_a_recorded_request_is_answered(client: str, sent: dict[str, Any], tokenizer: Tokenizer) -> None:
    script, observer = ScriptedGenerate(saying(tokenizer, "fine")), CountingObserver()
    async with calling(app_of(script, tokenizer, served=SERVED, observer=observer)) as http:
        answer = await http.post(sent["path"], json=sent["body"])
    assert answer.status_code == 200, answer.text
    assert len(script.started) == 1 and ANSWERS[sent["path"]] in answer.text and '"error":{' not in answer.text
    assert answer.headers.get("x-millrace-ignored", "") == ", ".join(sent["ignored"])
    assert len(observer.ignored) == len(sent["ignored"])


@pytest.mark.parametrize(("client", "sent"), BODIES, ids=[f"{client}: {sent['name']}" for client, sent in BODIES])
async def test_and_with_strict_fields_too(client: str, sent: dict[str, Any], tokenizer: Tokenizer) -> None:
    """Clients send hints, and nothing that is not known."""
    script = ScriptedGenerate(saying(tokenizer, "fine"))
    async with calling(app_of(script, tokenizer, served=SERVED, strict_fields=True)) as http:
        assert (await http.post(sent["path"], json=sent["body"])).status_code == 200
