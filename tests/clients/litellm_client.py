"""What applications do with LiteLLM, against the server at sys.argv[1]: prints one JSON object of what they got.

Runs in the clients' own environment (requirements.txt), so it imports nothing of the project.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # nothing is fetched

import litellm
from pydantic import BaseModel

URL, KEY, MODEL = sys.argv[1:4]
ASKED = [{"role": "user", "content": "How warm is it in Ulm?"}]
HELLO = [{"role": "user", "content": "Hello"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


class Forecast(BaseModel):
    city: str
    degrees: int


def at(provider: str) -> dict[str, Any]:
    base = URL if provider == "anthropic" else f"{URL}/v1"
    return {"model": f"{provider}/{MODEL}", "api_base": base, "api_key": KEY, "num_retries": 0}


def tools(provider: str) -> dict[str, Any]:
    """A tool is called, and its result sent back."""
    first = litellm.completion(**at(provider), messages=ASKED, tools=[WEATHER], max_tokens=200).choices[0].message
    call = first.tool_calls[0]
    result = {"role": "tool", "tool_call_id": call.id, "content": "7 degrees"}
    messages = [*ASKED, first.model_dump(), result]
    second = litellm.completion(**at(provider), messages=messages, tools=[WEATHER], max_tokens=200)
    called = [call.function.name, json.loads(call.function.arguments)]
    return {"call": called, "text": second.choices[0].message.content}


def streamed(provider: str) -> str:
    chunks = litellm.completion(**at(provider), messages=HELLO, stream=True, max_tokens=100)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def structured(provider: str) -> dict[str, Any]:
    asked = [{"role": "user", "content": "The weather in Ulm as JSON?"}]
    answer = litellm.completion(**at(provider), messages=asked, response_format=Forecast)
    return json.loads(answer.choices[0].message.content)


def too_long(provider: str) -> str:
    """What LiteLLM takes the error for decides whether its fallbacks begin."""
    try:
        litellm.completion(**at(provider), messages=[{"role": "user", "content": "long " * 5000}], max_tokens=9)
    except litellm.ContextWindowExceededError:
        return "context window exceeded"
    except litellm.APIError as error:
        return type(error).__name__
    return "answered"


async def messages() -> dict[str, Any]:
    """Anthropic's API, as it comes through LiteLLM's own door for it."""
    answer = await litellm.anthropic.messages.acreate(**at("anthropic"), messages=HELLO, max_tokens=100)
    return {"text": answer["content"][0]["text"], "stop_reason": answer["stop_reason"]}


def main() -> None:
    found: dict[str, Any] = {}
    for provider in ("openai", "hosted_vllm", "anthropic"):
        answer = litellm.completion(**at(provider), messages=HELLO, max_tokens=100)
        found[f"{provider} plain"] = answer.choices[0].message.content
        found[f"{provider} streamed"] = streamed(provider)
        found[f"{provider} tools"] = tools(provider)
    for provider in ("openai", "hosted_vllm"):
        found[f"{provider} structured"] = structured(provider)
        found[f"{provider} too long"] = too_long(provider)
    found["responses"] = litellm.responses(**at("openai"), input="Hello").output[0].content[0].text
    found["messages"] = asyncio.run(messages())
    print(json.dumps(found))


if __name__ == "__main__":
    main()
