"""A mixture of experts over two ranks behind the ordinary router: the text of one process, whatever befalls a rank."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from deploy.cli import main
from tests.flow.client import Asked, Client
from tests.flow.reference import is_greedy_tiny, prompts
from tests.flow.server import MillraceServer, wait_until
from tests.tiny import tiny_llama

pytestmark = pytest.mark.slow

RANKS = ("--data-parallel-size", "2", "--enable-expert-parallel")
SMALL = ("--num-kv-blocks", "256", "--heartbeat-interval", "0.1", "--heartbeat-timeout", "30", "--threads", "1")
TOKENS = 200
TRIES = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    dense, out = tiny_llama(folder / "dense", layers=6, hidden=128), folder / "moe"
    assert main(["upcycle", str(dense), str(out), "--experts", "8", "--dtype", "float32"]) == 0
    return out


def ranks_of(leader: int) -> list[int]:
    """The processes of the other ranks of the worker in this process."""
    children = Path(f"/proc/{leader}/task").glob("*/children")
    found = [int(pid) for each in children for pid in each.read_text().split()]
    return [pid for pid in found if b"serving.rank_group.rank_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def gone(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def ask(client: Client, count: int) -> list[Asked]:
    wanted = prompts(count, shortest=20, longest=60, seed=5)
    return [client.start(prompt, stream=True, temperature=0.0, max_tokens=TOKENS) for prompt in wanted]


def tokens_after(client: Client, prompt: list[int]) -> list[int]:
    answer = client.openai.completions.create(
        model="tiny", prompt=prompt, max_tokens=24, temperature=0.0, extra_body={"return_token_ids": True}
    )
    found: list[int] = answer.choices[0].model_dump()["token_ids"]
    return found


def test_one_process_with_its_ranks(model: Path) -> None:
    """Served by `millrace serve MODEL` alone: greedy text, what is counted, and how it ends with Ctrl-C."""
    with MillraceServer(str(model), "--served-model-name", "tiny", *RANKS, *SMALL) as server:
        client = Client(server.url)
        asked = prompts(5, shortest=20, longest=60, seed=6)
        for prompt, tokens in zip(asked, client.pool.map(partial(tokens_after, client), asked), strict=True):
            assert is_greedy_tiny(model, prompt, tokens)
        assert server.metric("worker_ranks") == 2
        sent = [server.metric(f"expert_{name}_bytes_total") for name in ("dispatch", "combine")]
        assert all(count > 0 for count in sent)
        client.close()
        ranks = ranks_of(server.process.pid)
        assert len(ranks) == 1
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(60) == 0
        assert gone(ranks)


@pytest.fixture(scope="module")
def split(model: Path) -> Iterator[MillraceServer]:
    arguments = (str(model), "--prefill", "1", "--decode", "2", "--served-model-name", "tiny", "--rank-timeout", "2")
    with MillraceServer(*arguments, *RANKS, *SMALL, workers=("prefill-0", "decode-0", "decode-1")) as started:
        yield started


@pytest.mark.parametrize("harm", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_is_lost_in_mid_decode(model: Path, split: MillraceServer, harm: signal.Signals) -> None:
    """The worker leaves with all its ranks, and its texts go on in another, not a token of them lost or repeated."""
    split.wait_ready()
    client = Client(split.url)
    [prompt] = prompts(1, shortest=40, longest=60, seed=7)
    assert is_greedy_tiny(model, prompt, tokens_after(client, prompt))
    undisturbed = client.finish(ask(client, 4))
    for _ in range(TRIES):  # harm that comes too late to hit anything is done again
        split.wait_ready()
        before = split.metric("replacements_total")
        at_first = {name: steps(split, name) for name in ("decode-0", "decode-1")}
        asked = ask(client, 4)
        assert asked[0].progressed.wait(60)
        # What a router last heard of a worker that has died says nothing: only one that lives counts on.
        victim = wait_until(partial(counting_on, split, at_first), 60, "a worker decodes")
        leader = split.worker_pid(victim)
        [rank] = ranks_of(leader)
        os.kill(rank, harm)
        assert client.finish(asked) == undisturbed
        if split.metric("replacements_total") > before:
            break
        with suppress(ProcessLookupError):
            os.kill(rank, signal.SIGKILL)  # also one that stands still
    else:
        raise AssertionError(f"nothing was disturbed in {TRIES} tries")
    wait_until(lambda: gone([rank, leader]), 30, "the worker and its rank have left")
    assert "rank 1 of the group is lost" in split.log()
    split.wait_ready()
    split.wait_idle()
    client.close()


def counting_on(server: MillraceServer, before: dict[str, float]) -> str | None:
    """A worker that has run steps since."""
    return next((name for name, count in before.items() if steps(server, name) > count), None)


def steps(server: MillraceServer, name: str) -> float:
    return server.metric("engine_steps_total", engine=name)


def test_leaders_and_ranks_leave_together(split: MillraceServer) -> None:
    """Also between steps: nobody computes when one of them ends."""
    split.wait_ready()
    killed, left = split.worker_pid("decode-1"), split.worker_pid("prefill-0")
    ranks, [rank] = ranks_of(killed), ranks_of(left)
    os.kill(killed, signal.SIGKILL)
    os.kill(rank, signal.SIGKILL)
    wait_until(lambda: gone(ranks), 30, "the ranks of a leader that was killed have left")
    wait_until(lambda: gone([left]), 30, "the leader of a rank that was killed has left")
