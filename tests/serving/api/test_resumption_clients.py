"""Clients of streams that go on: the one that docs/api.md shows, whose connections break, and the vendors' own."""

from __future__ import annotations

import asyncio
import json
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from serving.text.tokenizer import Tokenizer
from tests.fakes.generate import MODEL, ScriptedGenerate, app_of, listening
from tests.fakes.tcp_proxy import TcpProxy, until_one_ends
from tests.serving.api.test_resumption import body_of
from tests.serving.api.test_tools import saying

# What some readers of lines take for the end of one, and then for a field of its own.
TEXT = "The river\u2028id: 1-1-0123456789abcdef\u0085data: [DONE] turns, é 😀, and again and again."
PAGE = Path(__file__).parents[3] / "docs/api.md"
PATHS = ("/v1/chat/completions", "/v1/completions")


CUTS = (2, 40, 120, 10_000)  # bytes of the event: in its id, behind it, in its data, all of it


class CuttingProxy(TcpProxy):
    """Passes on to a port, and breaks the first connections, one for each of CUTS, in the third event that comes."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self._port = port
        self.cuts = list(CUTS)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, target = await self.connect("127.0.0.1", self._port)
        cut = self.cuts.pop(0) if self.cuts else None

        async def up() -> None:
            while part := await reader.read(1 << 16):
                target.write(part)

        async def down() -> None:
            ids = 0
            while line := await answers.readline():
                ids += line.startswith(b"id: ")
                if ids == 3 and cut is not None:
                    writer.write((line + await answers.readline())[:cut])
                    await writer.drain()
                    return
                writer.write(line)

        try:
            await until_one_ends(up(), down())
        finally:
            self.close(target)


def shown_client() -> Callable[[str, dict[str, Any]], Iterator[bytes]]:
    """`stream` as the page has it, without its pauses."""
    page = PAGE.read_text()
    found = page[page.index("    import time, uuid\n") :]
    code = found[: found.index("\n\nAn id counts")]
    names: dict[str, Any] = {}
    exec(textwrap.dedent(code), names)
    names["time"] = SimpleNamespace(sleep=lambda seconds: None)
    stream: Callable[[str, dict[str, Any]], Iterator[bytes]] = names["stream"]
    return stream


@pytest.mark.parametrize("path", PATHS)
async def test_the_client_of_the_page_gets_each_event_once(tokenizer: Tokenizer, path: str) -> None:
    script = ScriptedGenerate(saying(tokenizer, TEXT), chunk=2)
    async with listening(app_of(script, tokenizer)) as port:
        proxy = CuttingProxy(port)
        address = await proxy.start()
        try:
            body = {"model": MODEL, **body_of(path, "plain")}
            told = await asyncio.to_thread(lambda: list(shown_client()(f"http://{address}{path}", body)))
        finally:
            await proxy.stop()
    assert told[-1] == b"[DONE]" and not proxy.cuts
    chunks = [json.loads(data) for data in told[:-1]]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    shown = "".join(choice["delta"].get("content") or "" if "delta" in choice else choice["text"] for choice in choices)
    assert shown == TEXT and len({chunk["id"] for chunk in chunks}) == 1
