"""`millrace serve --on ray` on a Ray cluster of two nodes on this host: placed as asked, and whole through every loss.

One deployment goes through all of it, in the order of this file: a prefill and a decode worker packed on the head by
what the prefill worker reserves, and a decode worker beside them, for which there is only room on the other node.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.autoscaler.by_router import RouterActuator
from deploy.on_ray.cluster import DEPLOYMENT, claim
from serving.messages import Role
from tests.flow.client import Asked, Client
from tests.flow.on_ray.nodes import SECONDS, RayNodes
from tests.flow.ports import free_port
from tests.flow.reference import prompts
from tests.flow.server import REPOSITORY, MillraceServer, samples, wait_until
from tests.tiny import tiny_llama

pytest.importorskip("ray", reason="Ray is not installed: pip install 'millrace[ray]'")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # warnings of Ray's own

PLACEMENT = """
model = {model}

[common]
served_model_name = ["tiny"]
dtype = "float32"
kernels = "torch"
routing_policy = "round_robin"  # others give a worker that the machine slows nothing
heartbeat_interval = 0.1
heartbeat_timeout = 30

[[workers]]
role = "prefill"

[[workers]]
role = "decode"
count = 2

[ray]
name = "tests"
sets = 2
strategy = "STRICT_PACK"

[ray.prefill]
resources = {{ front = 1 }}
"""
TOKENS = 200  # for longer than it takes to hear of them, on a quick machine too
KEY, GRPC_PORT = "cluster-key-of-the-tests", free_port()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("ray") / "tiny", layers=8, hidden=256, kv_heads=4)


@pytest.fixture(scope="module")
def server(nodes: RayNodes, model: Path) -> Iterator[MillraceServer]:
    file = model.parent / "placement.toml"
    file.write_text(PLACEMENT.format(model=json.dumps(str(model))))
    arguments = ("--placement", str(file), "--on", "ray", "--address", nodes.cluster.address)
    arguments += ("--grpc-port", str(GRPC_PORT))
    environ = {"MILLRACE_CLUSTER_KEY": KEY}
    with MillraceServer(*arguments, workers=("prefill-0", "decode-0", "decode-1"), environ=environ) as started:
        yield started


@pytest.fixture
def client(server: MillraceServer) -> Iterator[Client]:
    made = Client(server.url)
    yield made
    made.close()


def ask(client: Client, pairs: int = 2) -> list[Asked]:
    """Greedy and sampled, two of each; with fewer pairs the first of them."""
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 11}] * pairs
    wanted = prompts(4, shortest=200, longest=300, seed=3)
    return [
        client.start(prompt, stream=True, max_tokens=TOKENS, **kind)
        for prompt, kind in zip(wanted[: 2 * pairs], kinds, strict=True)
    ]


@pytest.fixture(scope="module")
def undisturbed(server: MillraceServer) -> list[Any]:
    client = Client(server.url)
    try:
        return client.finish(ask(client))
    finally:
        client.close()


def streaming(server: MillraceServer, client: Client, worker: str, pairs: int = 2) -> list[Asked]:
    """Requests that have all begun, this worker has some of them: asked again where they ended before that was told."""
    asked: list[Asked] = []
    rounds = 0

    def there() -> bool:
        nonlocal rounds
        if all(one.done is not None and one.done.done() for one in asked):
            client.finish(asked)
            asked[:] = ask(client, pairs)
            rounds += 1
        running = server.metric("worker_num_requests_running", engine=worker)
        return bool(running) and all(one.chunks for one in asked)

    try:
        wait_until(there, SECONDS, f"{worker} streams")
    except AssertionError as error:
        held = server.get("/audit")[1].decode()
        chunks = [one.chunks for one in asked]
        raise AssertionError(f"{error}: asked {rounds} times, chunks {chunks}; {held}\n{server.log()}") from None
    return asked


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def alive(pid: int | None) -> bool:
    """A process that nobody has asked for its exit status yet is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def test_workers_are_where_the_file_says(nodes: RayNodes, server: MillraceServer) -> None:
    where = {name: nodes.running(name).node for name in ("prefill-0", "decode-0", "decode-1")}
    head, other = nodes.nodes["head"].node_id, nodes.nodes["other"].node_id
    assert where == {"prefill-0": head, "decode-0": head, "decode-1": other}
    assert nodes.groups() == ["CREATED", "CREATED"]
    child = nodes.running("decode-0").pid
    assert child is not None
    environ = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
    own = os.getpriority(os.PRIO_PROCESS, server.process.pid)
    assert f"RAY_worker_niceness={max(0, own)}".encode() in environ, "the router's is told to each actor"
    found = min(19, os.getpriority(os.PRIO_PROCESS, 0) + max(0, own))  # Ray's nodes are as nice as this process
    assert os.getpriority(os.PRIO_PROCESS, child) == found


def test_a_name_is_taken_once(nodes: RayNodes, server: MillraceServer) -> None:
    with pytest.raises(ValueError, match="'tests' runs on this Ray cluster already"):
        claim(nodes.ray, ())


async def roles(nodes: RayNodes, flipped: Role | None = None) -> dict[str, tuple[Role, str]]:
    """Every worker's role and state, once decode-1 has taken the role that is given."""
    actuator = RouterActuator(f"{nodes.ray.util.get_node_ip_address()}:{GRPC_PORT}", KEY, "tests", patience=SECONDS)
    try:
        if flipped is not None:
            await actuator.flip("decode-1", flipped)
        return {each.worker_id: (each.role, each.state) for each in await actuator.workers()}
    finally:
        await actuator.close()


def test_a_worker_flips_and_is_begun_in_its_new_role_when_its_process_dies(
    nodes: RayNodes, server: MillraceServer, client: Client, undisturbed: list[Any]
) -> None:
    before, asked = nodes.running("decode-1"), streaming(server, client, "decode-1")
    assert asyncio.run(roles(nodes, Role.PREFILL))["decode-1"] == (Role.PREFILL, "ready")
    assert nodes.running("decode-1") == before, "the process is the same"
    assert client.finish(asked) == undisturbed == client.finish(ask(client))
    assert before.pid is not None
    os.kill(before.pid, signal.SIGKILL)
    wait_until(lambda: not server.metric("role_flips_total", engine="decode-1"), SECONDS, "its next process reports")
    begun = (Role.PREFILL, "ready")  # a while after it first reports: it has to load the model
    wait_until(lambda: asyncio.run(roles(nodes))["decode-1"] == begun, SECONDS, "it is ready in its new role")
    assert asyncio.run(roles(nodes, Role.DECODE))["decode-1"] == (Role.DECODE, "ready")
    assert client.finish(ask(client)) == undisturbed
    server.wait_idle()


def test_an_actor_is_killed(nodes: RayNodes, server: MillraceServer, client: Client, undisturbed: list[Any]) -> None:
    before, child = server.metric("replacements_total"), nodes.running("decode-0").pid
    assert child is not None
    asked = streaming(server, client, "decode-0")
    os.kill(parent(child), signal.SIGKILL)
    assert client.finish(asked) == undisturbed
    assert server.metric("replacements_total") > before
    wait_until(lambda: not alive(child), SECONDS, "its child gives up what nobody has reserved")
    assert nodes.running("decode-0").pid != child
    server.wait_ready()


def test_a_node_is_removed_and_another_comes(
    nodes: RayNodes, server: MillraceServer, client: Client, undisturbed: list[Any]
) -> None:
    before, lost = server.metric("replacements_total"), nodes.running("decode-1").node
    asked = streaming(server, client, "decode-1")
    nodes.cluster.remove_node(nodes.nodes.pop("other"), allow_graceful=False)
    assert client.finish(asked) == undisturbed
    assert server.metric("replacements_total") > before
    nodes.add("third")
    report = nodes.running("decode-1")
    assert report.node == nodes.nodes["third"].node_id != lost


def test_a_group_is_taken_away(nodes: RayNodes, server: MillraceServer) -> None:
    """By hand, or by a cluster that was begun anew: it is made again, and its actors."""
    child = nodes.running("decode-1").pid
    nodes.ray.util.remove_placement_group(nodes.ray.util.get_placement_group("set-1"))
    wait_until(lambda: (report := nodes.report("decode-1")) and report.pid not in (None, child), SECONDS, "it is back")


def taking(server: MillraceServer) -> set[str]:
    """Workers that the router knows and that do not leave."""
    found = samples(server.get("/metrics")[1].decode(), "worker_draining")
    return {labels["engine"] for labels, draining in found if not draining}


def scale(nodes: RayNodes, *counts: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "deploy.cli", "scale", *counts, "--name", "tests"]
    command += ["--address", nodes.cluster.address]
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_scaling_under_load_loses_nothing(
    nodes: RayNodes, server: MillraceServer, client: Client, undisturbed: list[Any]
) -> None:
    """Up by one and down to one, with requests asked all the while; what leaves finishes what it has."""
    before = server.metric("replacements_total")
    for count, reporting in ((3, {"prefill-0", "decode-0", "decode-1", "decode-2"}), (1, {"prefill-0", "decode-0"})):
        scaling, rounds = scale(nodes, f"decode={count}"), 0
        with scaling:
            while scaling.poll() is None or not rounds:
                assert client.finish(ask(client, 1)) == undisturbed[:2]
                rounds += 1
            out, err = scaling.communicate()
        assert (scaling.returncode, out) == (0, f"prefill=1 decode={count}\n"), err
        wait_until(lambda: taking(server) == reporting, SECONDS, f"{reporting} take requests")  # noqa: B023
        assert {name for name in nodes.names() if name != DEPLOYMENT} == reporting
    assert server.metric("replacements_total") == before
    wait_until(lambda: nodes.groups() == ["CREATED"], SECONDS, "the set without services is given back")


def test_ctrl_c_leaves_nothing(nodes: RayNodes, server: MillraceServer, client: Client, undisturbed: list[Any]) -> None:
    children = [nodes.running(name).pid for name in ("prefill-0", "decode-0")]
    asked = streaming(server, client, "decode-0")
    server.process.send_signal(signal.SIGINT)
    assert client.finish(asked) == undisturbed
    assert server.process.wait(SECONDS) == 0, server.log()
    assert not [child for child in children if alive(child)]
    assert nodes.groups() == []
    wait_until(lambda: not nodes.names(), SECONDS, "no actor is left")


def test_a_router_that_is_killed_leaves_nothing(nodes: RayNodes, server: MillraceServer, model: Path) -> None:
    """Nobody could take away what outlived it: Ray ends its actors with it, and they their children."""
    assert server.process.poll() is not None
    shown = ("--served-model-name", "tiny", "--kernels", "torch")
    placed = ("--mixed", "1", "--on", "ray", "--address", nodes.cluster.address)
    with MillraceServer(str(model), *shown, *placed, workers=("mixed-0",)) as begun:
        child = nodes.running("mixed-0", "millrace").pid
        client = Client(begun.url)
        streaming(begun, client, "mixed-0", 1)
        begun.process.kill()
        wait_until(lambda: not nodes.names() and not nodes.groups(), SECONDS, "no actor and no group is left")
        wait_until(lambda: not alive(child), SECONDS, "nor a child of an actor")
        client.close()
