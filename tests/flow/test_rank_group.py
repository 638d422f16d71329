"""A mixture of experts over two ranks behind the ordinary router: the text of one process, whatever befalls a rank."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from deploy.cli import main
from tests.fakes.stopping import harm
from tests.flow.client import Asked, Client
from tests.flow.reference import is_greedy_tiny, prompts
from tests.flow.server import MillraceServer, wait_until
from tests.tiny import tiny_llama

pytestmark = pytest.mark.slow

RANKS = ("--data-parallel-size", "2", "--enable-expert-parallel")
SMALL = ("--num-kv-blocks", "256", "--heartbeat-interval", "0.1", "--heartbeat-timeout", "30", "--threads", "1")
BALANCED = ("--enable-eplb", "--eplb-config", '{"num_redundant_experts": 2, "step_interval": 25, "window_size": 25}')
TOKENS = 120
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
    with MillraceServer(str(model), "--served-model-name", "tiny", *RANKS, *BALANCED, *SMALL) as server:
        client = Client(server.url)
        asked = prompts(5, shortest=20, longest=60, seed=6)
        for prompt, tokens in zip(asked, client.pool.map(partial(tokens_after, client), asked), strict=True):
            assert is_greedy_tiny(model, prompt, tokens)
        wait_until(partial(judged, server, client, asked[0]), 90, "a round of balance has judged the experts' loads")
        assert (server.metric("worker_ranks"), server.metric("expert_ranks")) == (2, 2)
        sent = [server.metric(f"expert_{name}_bytes_total") for name in ("dispatch", "combine")]
        assert all(count > 0 for count in sent)
        client.close()
        ranks = ranks_of(server.process.pid)
        assert len(ranks) == 1
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(60) == 0
        assert gone(ranks)


def judged(server: MillraceServer, client: Client, prompt: list[int]) -> bool:
    tokens_after(client, prompt)
    return server.metric("expert_imbalance") >= 1


@pytest.fixture(scope="module")
def split(model: Path) -> Iterator[MillraceServer]:
    arguments = (str(model), "--prefill", "1", "--decode", "1", "--served-model-name", "tiny", "--rank-timeout", "6")
    with MillraceServer(*arguments, *RANKS, *SMALL, workers=("prefill-0", "decode-0")) as started:
        yield started


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_is_lost_in_mid_decode(model: Path, split: MillraceServer, how: signal.Signals) -> None:
    """Its worker goes on with the texts it has, not a token of them lost or repeated, and the rank comes back."""
    split.wait_ready()
    client = Client(split.url)
    [prompt] = prompts(1, shortest=40, longest=60, seed=7)
    assert is_greedy_tiny(model, prompt, tokens_after(client, prompt))
    undisturbed = client.finish(ask(client, 4))
    leader = split.worker_pid("decode-0")
    replaced = split.metric("replacements_total")
    repeated, joined = (of_decode(split, name) for name in ("steps_repeated", "ranks_rejoined"))
    for _ in range(TRIES):  # harm that comes too late to hit a step is done again
        asked = ask(client, 4)
        assert asked[0].progressed.wait(60)
        [rank] = ranks_of(leader)
        harm(rank, how)
        assert client.finish(asked) == undisturbed
        wait_until(partial(came_back, split, client, prompt, joined), 90, "the rank has come back")
        joined = of_decode(split, "ranks_rejoined")
        if of_decode(split, "steps_repeated") > repeated:
            break
    else:
        raise AssertionError(f"no step was disturbed in {TRIES} tries")
    assert gone([rank]) and len(ranks_of(leader)) == 1
    assert split.worker_pid("decode-0") == leader
    assert split.metric("replacements_total") == replaced, "no text went to another worker"
    assert client.finish(ask(client, 4)) == undisturbed
    assert "rank 1 has come back" in split.log()
    split.wait_idle()
    client.close()


def came_back(server: MillraceServer, client: Client, prompt: list[int], before: float) -> bool:
    """Ranks are taken in between two steps, so somebody has to ask for one."""
    tokens_after(client, prompt)
    return of_decode(server, "ranks_rejoined") > before


def of_decode(server: MillraceServer, name: str) -> float:
    return server.metric(f"expert_{name}_total", engine="decode-0")


def test_ranks_leave_with_their_leader(split: MillraceServer) -> None:
    """Also between steps, when nobody computes."""
    split.wait_ready()
    killed = split.worker_pid("decode-0")
    ranks = ranks_of(killed)
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: gone(ranks), 30, "the ranks of a leader that was killed have left")
