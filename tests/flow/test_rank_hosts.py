"""A worker with ranks on another host behind the ordinary router: one process's text, also when that host is killed."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from deploy.cli import main
from tests.fakes.stopping import harm
from tests.flow.client import Client
from tests.flow.ports import free_port
from tests.flow.reference import is_greedy_tiny, prompts
from tests.flow.server import MillraceServer, start_millrace, wait_until
from tests.flow.test_rank_group import SMALL, TRIES, ask, tokens_after
from tests.tiny import tiny_llama

pytestmark = pytest.mark.slow

RANKS = ("--data-parallel-size", "4", "--enable-expert-parallel")
KEY = {"MILLRACE_CLUSTER_KEY": "key-of-this-test"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    dense, out = tiny_llama(folder / "dense", layers=6, hidden=128), folder / "moe"
    assert main(["upcycle", str(dense), str(out), "--experts", "8", "--dtype", "float32"]) == 0
    return out


class Host:
    """The other host, `millrace serve --headless` with two ranks."""

    def __init__(self, model: Path, port: int, log: Path) -> None:
        self.flags = ("serve", str(model), "--headless", *RANKS, "--data-parallel-start-rank", "2", "--threads", "1")
        self.flags += ("--data-parallel-rpc-port", str(port))
        self.log = log.open("w")
        self.process = self._started()

    def _started(self):  # type: ignore[no-untyped-def]
        return start_millrace(*self.flags, log=self.log, environ=KEY)

    def again(self) -> None:
        self.process.wait(60)
        self.process = self._started()

    def close(self) -> None:
        self.process.kill()
        self.process.wait(60)
        self.log.close()


@pytest.fixture
def served(model: Path, tmp_path: Path) -> Iterator[tuple[MillraceServer, Host]]:
    port = free_port()
    host = Host(model, port, tmp_path / "host.log")
    ours = ("--data-parallel-size-local", "2", "--data-parallel-rpc-port", str(port), "--rank-timeout", "10")
    arguments = (str(model), "--mixed", "1", "--served-model-name", "tiny", *RANKS, *ours, *SMALL)
    try:
        with MillraceServer(*arguments, workers=("mixed-0",), environ=KEY) as server:
            yield server, host
    finally:
        host.close()


def test_the_other_host_is_killed_in_mid_decode_and_comes_back(
    model: Path, served: tuple[MillraceServer, Host]
) -> None:
    """Not a token is lost or repeated; its experts are on the ranks that are left until it is there again."""
    server, host = served
    client = Client(server.url)
    for prompt in prompts(2, shortest=40, longest=60, seed=7):
        assert is_greedy_tiny(model, prompt, tokens_after(client, prompt))
    assert (of_worker(server, "worker_ranks"), of_worker(server, "expert_ranks")) == (4, 4)
    sent = [of_worker(server, f"expert_bytes_{way}_hosts_total") for way in ("to", "from")]
    assert all(count > 0 for count in sent)
    undisturbed = client.finish(ask(client, 4))
    repeated, joined = (of_worker(server, f"expert_{name}_total") for name in ("steps_repeated", "ranks_rejoined"))
    for _ in range(TRIES):  # harm that comes too late to hit a step is done again
        asked = ask(client, 4)
        assert asked[0].progressed.wait(60)
        harm(host.process.pid, signal.SIGKILL)
        assert client.finish(asked) == undisturbed
        host.again()
        wait_until(partial(came_back, server, client, prompt, joined), 120, "the host has come back")
        joined = of_worker(server, "expert_ranks_rejoined_total")
        if of_worker(server, "expert_steps_repeated_total") > repeated:
            break
    else:
        raise AssertionError(f"no step was disturbed in {TRIES} tries")
    assert of_worker(server, "expert_ranks") == 4
    assert client.finish(ask(client, 4)) == undisturbed
    server.wait_idle()
    client.close()


def of_worker(server: MillraceServer, name: str) -> float:
    return server.metric(name, engine="mixed-0")


def came_back(server: MillraceServer, client: Client, prompt: list[int], before: float) -> bool:
    """Ranks are taken in between two steps, so somebody has to ask for one."""
    tokens_after(client, prompt)
    return of_worker(server, "expert_ranks_rejoined_total") > before
