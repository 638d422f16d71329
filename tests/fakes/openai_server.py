"""A small OpenAI-shaped HTTP server that answers as its script says, for tests of clients: the benchmark is one.

It parses requests by hand on asyncio streams, so that tests can break a response at any byte they like.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass(frozen=True)
class Received:
    """One request as the server got it."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any


@dataclass
class ServerScript:
    """How completions are answered. The defaults are an obedient server: one token a chunk, usage at the end."""

    tokens_per_chunk: int = 1
    usage: bool = True
    takes_ids: bool = True
    tokenize: str | None = "vllm"  # or "llama.cpp", or None for no such endpoint
    template_tokens: int = 0  # that the server adds to a text
    send_ids: bool = False
    role_chunk: bool = True  # chat: who speaks, before the first token
    closing_chunk: bool = False  # finish_reason in a chunk of its own
    claimed: int | None = None  # completion_tokens in usage, when it is to be a lie
    fail: Callable[[int], tuple[int, str] | None] = lambda number: None  # status and message for request n
    die_after: Callable[[int], int | None] = lambda number: None  # tokens until the connection breaks
    error_after: Callable[[int], int | None] = lambda number: None  # tokens until an error event
    before_chunk: Callable[[int, int], Awaitable[None]] | None = None  # (request, chunk)
    after_chunk: Callable[[int, int], Awaitable[None]] | None = None
    model: str = "scripted"
    models_status: int = 200


@dataclass
class ScriptedServer:
    """Answers by `script`; `received` holds what came, `in_flight` and `most_in_flight` how much at once."""

    script: ServerScript = field(default_factory=ServerScript)
    received: list[Received] = field(default_factory=list)
    completions: int = 0  # requests for completions so far
    in_flight: int = 0
    most_in_flight: int = 0
    url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while request := await read_request(reader):
            self.received.append(request)
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            try:
                await self.answer(request, writer)
            finally:
                self.in_flight -= 1

    async def answer(self, request: Received, writer: asyncio.StreamWriter) -> None:
        script = self.script
        if request.path == "/v1/models":
            write_json(writer, script.models_status, {"data": [{"id": script.model}]})
        elif request.path == "/tokenize" and (text := self.tokenize_text(request)) is not None:
            write_json(writer, 200, {"tokens": [100 + len(word) for word in text.split()]})
        elif request.path in ("/v1/completions", "/v1/chat/completions"):
            number, self.completions = self.completions, self.completions + 1
            await self.complete(request, number, writer)
        else:
            write_json(writer, 404, {"error": {"message": "no such path"}})
        await writer.drain()

    def tokenize_text(self, request: Received) -> str | None:
        field_name = {"vllm": "prompt", "llama.cpp": "content", None: ""}[self.script.tokenize]
        text: str | None = request.body.get(field_name)
        return text

    async def complete(self, request: Received, number: int, writer: asyncio.StreamWriter) -> None:
        script, body, chat = self.script, request.body, request.path.endswith("chat/completions")
        prompt = body["messages"][0]["content"] if chat else body["prompt"]
        if failure := script.fail(number):
            write_json(writer, failure[0], {"error": {"message": failure[1]}})
            return
        if isinstance(prompt, list) and not script.takes_ids:
            write_json(writer, 400, {"error": {"message": "prompt must be a string"}})
            return
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        if chat and script.role_chunk:
            write_event(writer, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        wanted = body["max_tokens"]
        for chunk, start in enumerate(range(0, wanted, script.tokens_per_chunk)):
            if start == script.die_after(number):
                writer.transport.abort()
                return
            if start == script.error_after(number):
                write_event(writer, {"error": {"message": "the engine fell over", "type": "server_error"}})
                break
            if script.before_chunk:
                await script.before_chunk(number, chunk)
            count = min(script.tokens_per_chunk, wanted - start)
            last = start + count == wanted and not script.closing_chunk
            write_event(
                writer, {"choices": [token_choice(" tok" * count, chat, count if script.send_ids else 0, last)]}
            )
            await writer.drain()
            if script.after_chunk:
                await script.after_chunk(number, chunk)
        if script.closing_chunk:
            write_event(writer, {"choices": [token_choice("", chat, 0, True)]})
        if script.usage:
            spent = len(prompt) if isinstance(prompt, list) else len(prompt.split()) + script.template_tokens
            claimed = wanted if script.claimed is None else script.claimed
            write_event(writer, {"choices": [], "usage": {"prompt_tokens": spent, "completion_tokens": claimed}})
        write_chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")


def token_choice(text: str, chat: bool, ids: int, last: bool) -> dict[str, Any]:
    """One choice of a streamed chunk."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if last else None}
    choice |= {"delta": {"content": text}} if chat else {"text": text}
    if ids:
        choice["token_ids"] = list(range(ids))
    return choice


def write_event(writer: asyncio.StreamWriter, data: Any) -> None:
    write_chunk(writer, b"data: " + json.dumps(data).encode() + b"\n\n")


def write_chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


def write_json(writer: asyncio.StreamWriter, status: int, data: Any) -> None:
    body = json.dumps(data).encode()
    writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)


async def read_request(reader: asyncio.StreamReader) -> Received | None:
    """The next request on a connection, None when the client has closed it."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    first, *lines = head.decode().rstrip().split("\r\n")
    method, path, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Received(method, path, headers, json.loads(body) if body else None)


@asynccontextmanager
async def listening(serve: Serve) -> AsyncIterator[str]:
    """The address of a server whose connections are each handled by `serve`; all are closed at the end."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve_and_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(serve_and_close(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    listener = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    finally:
        listener.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def scripted_server(script: ServerScript | None = None) -> AsyncIterator[ScriptedServer]:
    """A running server, closed with all its connections at the end."""
    server = ScriptedServer(script or ServerScript())
    async with listening(server.serve) as server.url:
        yield server


@contextmanager
def threaded_server(script: ServerScript | None = None) -> Iterator[ScriptedServer]:
    """A server on a loop of its own, for what runs its own loop in the main thread."""
    ready: list[ScriptedServer] = []
    started, stop = threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        async with AsyncExitStack() as stack:
            ready.append(await stack.enter_async_context(scripted_server(script)))
            started.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert started.wait(10)
    try:
        yield ready[0]
    finally:
        loops[0].call_soon_threadsafe(stop.set)
        thread.join(10)
