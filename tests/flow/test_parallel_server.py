"""Decode workers of two ranks that share a model, behind the ordinary router: one process's text, whoever is lost."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from serving.loader.loading import load
from tests.flow.client import Client
from tests.flow.reference import prompts
from tests.flow.server import MillraceServer, wait_until
from tests.flow.test_rank_group import SMALL, TRIES, ask, gone, ranks_of, tokens_after
from tests.serving.model.paged import PagedRun
from tests.tiny import tiny_llama

pytestmark = pytest.mark.slow

SPLIT = ("--prefill", "1", "--decode", "2", "--decode-tensor-parallel-size", "2", "--rank-timeout", "2")


def test_a_rank_and_a_leader_are_lost(tmp_path: Path) -> None:
    """Texts go on in another worker, not a token of them lost or repeated; nothing of the lost stays."""
    model, temporary = tiny_llama(tmp_path / "model", layers=3, hidden=96, heads=6, kv_heads=3), tmp_path / "temporary"
    temporary.mkdir()
    workers, named = ("prefill-0", "decode-0", "decode-1"), ("--served-model-name", "tiny")
    environ = {"TMPDIR": str(temporary)}
    with MillraceServer(str(model), *named, *SPLIT, *SMALL, workers=workers, environ=environ) as server:
        server.wait_ready()
        client = Client(server.url)
        [prompt] = prompts(1, shortest=40, longest=60, seed=7)
        assert tokens_after(client, prompt) == likeliest(model, prompt, tokens_after(client, prompt))
        assert server.metric("worker_ranks") == 5
        assert server.metric("parallel_bytes_total") > 0
        left = lose_a_rank(server, client, client.finish(ask(client, 4)))
        server.wait_idle()
        killed = server.worker_pid(left)
        ranks = ranks_of(killed)
        assert len(ranks) == 1
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: gone(ranks), 30, "the ranks of a leader that was killed have left")
        client.close()
    assert list(temporary.glob("millrace-*")) == [], "also of a leader that was killed"


def likeliest(path: Path, prompt: list[int], tokens: list[int]) -> list[int]:
    """What one process says after the prompt and each of the tokens but the last."""
    run = PagedRun(load(path, "float32").model, [prompt + tokens], block_size=16)
    run.step({0: len(prompt) + len(tokens)})
    found: list[int] = run.result(0).argmax(-1)[len(prompt) - 1 : -1].tolist()
    return found


def counting_on(server: MillraceServer, before: dict[str, float]) -> str | None:
    """A worker that has run steps since."""
    return next((name for name, count in before.items() if steps(server, name) > count), None)


def steps(server: MillraceServer, name: str) -> float:
    return server.metric("engine_steps_total", engine=name)


def lose_a_rank(server: MillraceServer, client: Client, undisturbed: object) -> str:
    """In mid-decode; harm that comes too late to hit anything is done again. The worker that is left."""
    for _ in range(TRIES):
        server.wait_ready()
        before = server.metric("replacements_total")
        at_first = {name: steps(server, name) for name in ("decode-0", "decode-1")}
        asked = ask(client, 4)
        assert asked[0].progressed.wait(60)
        victim = wait_until(partial(counting_on, server, at_first), 60, "a worker decodes")
        leader = server.worker_pid(victim)
        [rank] = ranks_of(leader)
        with suppress(ProcessLookupError):
            os.kill(rank, signal.SIGKILL)
        assert client.finish(asked) == undisturbed
        wait_until(lambda: gone([rank, leader]), 30, "the worker and its rank have left")  # noqa: B023 - now
        if server.metric("replacements_total") > before:
            assert "rank 1 of the group is lost" in server.log()
            return "decode-1" if victim == "decode-0" else "decode-0"
    raise AssertionError(f"nothing was disturbed in {TRIES} tries")
