"""Clients' packages that cannot share our environment, each in a process of the clients' own, against a real socket.

`make test` creates that environment in .venv-clients from requirements.txt. What the packages get is what the
scripted model says: plain text, a tool call where a tool is offered, an object where a form is asked for.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from serving.api.settings import ServedModel
from serving.messages import Request
from serving.text.tokenizer import Tokenizer
from tests.fakes.generate import KEY, MODEL, VOCAB_SIZE, ScriptedGenerate, app_of, listening, tiny_tokenizer

PYTHON = Path(__file__).parents[2] / ".venv-clients" / "bin" / "python"
TEXT = "The mill stands where the river narrows, déjà vu 😀 and on."
FORECAST = {"city": "Ulm", "degrees": 7}
PLAIN_CALL = ["weather", {"city": "Ulm"}]
LAST = "It is 7 degrees."

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON.exists(), reason="`make test` creates .venv-clients")]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def acting(tokenizer: Tokenizer) -> ScriptedGenerate:
    """A model that does what the prompt asks for, as far as these tests ask."""

    def say(request: Request) -> list[int]:
        prompt = tokenizer.decode(request.prompt, skip_special_tokens=False)
        text = TEXT
        if "7 degrees" in prompt:
            text = LAST
        elif '"Forecast"' in prompt:
            text = _call("Forecast", FORECAST)
        elif '"weather"' in prompt:
            text = _call("weather", {"city": "Ulm"})
        elif request.sampling.grammar:
            text = json.dumps(FORECAST)
        return [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_id or 0]

    return ScriptedGenerate(say, chunk=2, eos=tokenizer.eos_id)


def _call(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def drive(tokenizer: Tokenizer, script: str) -> dict[str, Any]:
    """What the script of tests/clients prints, run against an app with a key."""
    served = ServedModel(names=(MODEL,), max_model_len=16384, vocab_size=VOCAB_SIZE, created=1)
    app = app_of(acting(tokenizer), tokenizer, served=served, api_key=KEY)
    async with listening(app, api_key=KEY) as port:
        command = [str(PYTHON), str(Path(__file__).with_name(script)), f"http://127.0.0.1:{port}", KEY, MODEL]
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        out, err = await asyncio.wait_for(process.communicate(), timeout=120)
    assert process.returncode == 0, err.decode()
    found: dict[str, Any] = json.loads(out.splitlines()[-1])  # packages print what they like before
    return found


async def test_langchain(tokenizer: Tokenizer) -> None:
    agent = {"types": ["human", "ai", "tool", "ai"], "calls": [PLAIN_CALL], "text": LAST}
    assert await drive(tokenizer, "langchain_client.py") == {
        "plain": [TEXT, len(tokenizer.encode(TEXT, add_special_tokens=False)) + 1],
        "streamed": [TEXT, True],
        "agent": agent,
        "streaming agent": agent,
        "structured by json_schema": FORECAST,
        "structured by function_calling": FORECAST,
        "structured by json_mode": FORECAST,
        "responses": TEXT,
        "responses streamed": TEXT,
        "responses agent": agent,
    }


async def test_litellm(tokenizer: Tokenizer) -> None:
    tools = {"call": PLAIN_CALL, "text": LAST}
    expected: dict[str, Any] = {}
    for provider in ("openai", "hosted_vllm", "anthropic"):
        expected |= {f"{provider} plain": TEXT, f"{provider} streamed": TEXT, f"{provider} tools": tools}
    for provider in ("openai", "hosted_vllm"):
        expected |= {f"{provider} structured": FORECAST, f"{provider} too long": "context window exceeded"}
    expected["responses"] = TEXT
    expected["messages"] = {"text": TEXT, "stop_reason": "end_turn"}
    assert await drive(tokenizer, "litellm_client.py") == expected
