"""What applications do with LangChain, against the server at sys.argv[1]: prints one JSON object of what they got.

Runs in the clients' own environment (requirements.txt), so it imports nothing of the project.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

URL, KEY, MODEL = sys.argv[1:4]


class Forecast(BaseModel):
    """The weather of a city."""

    city: str
    degrees: int


@tool
def weather(city: str) -> str:
    """The weather of a city"""
    return f"7 degrees in {city}"


def model(**options: Any) -> ChatOpenAI:
    return ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key=KEY, max_retries=0, **options)


def agent(chat: ChatOpenAI) -> dict[str, Any]:
    """A tool is called, and its result read: the conversation an agent has of its own accord."""
    messages = create_agent(chat, [weather]).invoke({"messages": [("user", "How warm is it in Ulm?")]})["messages"]
    called = [call for message in messages for call in getattr(message, "tool_calls", [])]
    return {
        "types": [message.type for message in messages],
        "calls": [[call["name"], call["args"]] for call in called],
        "text": messages[-1].text,
    }


def structured(method: str) -> dict[str, Any]:
    found = model().with_structured_output(Forecast, method=method).invoke("The weather in Ulm as JSON?")
    return found.model_dump()


def main() -> None:
    plain = model(temperature=0, max_tokens=64).invoke("Hello")
    streamed = list(model(stream_usage=True).stream("Hello"))
    responses = model(use_responses_api=True)
    print(
        json.dumps(
            {
                "plain": [plain.text, plain.usage_metadata["output_tokens"]],
                "streamed": ["".join(chunk.text for chunk in streamed), len(streamed) > 3],
                "agent": agent(model()),
                "streaming agent": agent(model(streaming=True)),
                **{f"structured by {method}": structured(method) for method in METHODS},
                "responses": responses.invoke("Hello").text,
                "responses streamed": "".join(chunk.text for chunk in responses.stream("Hello")),
                "responses agent": agent(responses),
            }
        )
    )


METHODS = ("json_schema", "function_calling", "json_mode")

if __name__ == "__main__":
    main()
