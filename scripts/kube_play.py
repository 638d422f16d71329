"""Plays the router, prefill, decode and kvcache of the chart with podman, as their kubelet: what happened, as a page.

    python -m scripts.kube_play --image localhost/millrace:cpu-demo --out bench/results/DATE-kube-play.md

`podman kube play` starts the pods; probes and preStop, which podman 4.3 does not know, are done here as the manifests
say. It needs podman with its bridge network, helm or Go with sprig, and leaves no pod, volume or network behind.
"""

from __future__ import annotations

import argparse
import ipaddress
import secrets
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import yaml

from scripts.containers import QUESTION, STORY, Answer, Deployment, finished, give, machine, wait
from scripts.kube_pods import PlannedPod, plan_pods
from tests.deploy.helm.chart import NAMESPACE, render

NETWORK, SUBNET, FIRST = "millrace-play", "10.89.77.0/24", 9
DRAIN, LONG, BEGUN = 45, 4000, 200  # seconds; tokens of an answer longer than preStop; characters when a pod is told
ASKED = f"{STORY * 12}Tell it again."


def values(image: str) -> dict[str, Any]:
    """Of the chart: one of each, small, of one thread, with a disk for the pool."""
    repository, _, tag = image.rpartition(":")
    return {
        "image": {"repository": repository, "tag": tag},
        "router": {"settings": {"shutdown_timeout": DRAIN, "routing_policy": "prefix_aware"}},
        "workerDefaults": {"settings": {"kv_cache_memory": "512MiB", "shutdown_timeout": DRAIN, "threads": 1}},
        "kvcache": {
            "replicas": 1,
            "settings": {"ram": "256MiB", "disk_size": "1GiB", "shutdown_timeout": DRAIN},
            "disk": {"enabled": True, "size": "2Gi"},
        },
    }


def podman(*arguments: str, text: str | None = None) -> str:
    """What it says; ends the program where that fails."""
    done = subprocess.run(["podman", *arguments], input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"podman {' '.join(arguments)} failed: {done.stdout}{done.stderr}")
    return done.stdout.strip()


def card_of(address: str) -> str:
    """A MAC address of its own: peers remember it for longer than a pod takes to be back at the same address."""
    return "02:00:" + ":".join(f"{part:02x}" for part in ipaddress.ip_address(address).packed)


@dataclass
class Told:
    """What a probe was answered over time: (seconds, status, text) whenever it changed; status 0 is no answer."""

    answers: list[tuple[float, int, str]] = field(default_factory=list)

    @property
    def last(self) -> int:
        return self.answers[-1][1] if self.answers else 0

    def __str__(self) -> str:
        shown = (f"{status or 'no answer'}{f' {text}' if text else ''}" for _, status, text in self.answers)
        return " → ".join(shown)


class Kubelet:
    """Starts pods, probes them as their manifests say, and ends them: preStop, SIGTERM, SIGKILL after the grace."""

    def __init__(self, pods: Sequence[PlannedPod]):
        self.pods = {pod.name: pod for pod in pods}

    def start(self, pod: PlannedPod) -> None:
        known = podman("volume", "ls", "--format", "{{.Name}}").split()
        claims = [claim for claim in pod.claims if claim["metadata"]["name"] not in known]
        manifests = yaml.safe_dump_all([*claims, pod.manifest], sort_keys=False)
        own = ("--ip", pod.address, "--mac-address", card_of(pod.address))
        podman("kube", "play", "--network", NETWORK, *own, "-", text=manifests)

    def container(self, pod: PlannedPod) -> str:
        return f"{pod.name}-{pod.manifest['spec']['containers'][0]['name']}"

    def probe(self, pod: PlannedPod, kind: str) -> tuple[int, str]:
        """Status and the word of a pod's probe; 0 where nobody answers."""
        asked = pod.probes[kind]
        url = f"{asked.get('scheme', 'HTTP').lower()}://{pod.address}:{pod.ports[asked['port']]}{asked['path']}"
        try:
            answer = httpx.get(url, timeout=5, verify=False)
            told = answer.json()
            return answer.status_code, str(told["error"]["message"] if "error" in told else told["status"])
        except (httpx.HTTPError, ValueError, KeyError):
            return 0, ""

    @contextmanager
    def watching(self, pod: PlannedPod, kind: str) -> Iterator[Told]:
        """Probes again and again until the block is left."""
        told, over, began = Told(), threading.Event(), time.monotonic()

        def look() -> None:
            while not over.wait(0.05):
                found = self.probe(pod, kind)
                if not told.answers or told.answers[-1][1:] != found:
                    told.answers.append((time.monotonic() - began, *found))

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        try:
            yield told
        finally:
            over.set()
            thread.join()

    def ready(self, pod: PlannedPod) -> float:
        return wait(lambda: self.probe(pod, "readiness")[0] == 200, f"{pod.name} is ready")

    def end(self, pod: PlannedPod, told: Callable[[], object] = lambda: None) -> tuple[float, int]:
        """As when it is deleted: seconds from then on until it has left, and its exit code (137: it was killed)."""
        began, name = time.monotonic(), self.container(pod)
        pre_stop = pod.pre_stop or {"sleep": {"seconds": 0}}
        if "sleep" in pre_stop:
            time.sleep(pre_stop["sleep"]["seconds"])
        else:
            podman("exec", name, *pre_stop["exec"]["command"])
        told()
        left = pod.grace - (time.monotonic() - began)
        podman("stop", "--time", str(max(0, round(left))), name)
        took = time.monotonic() - began
        code = int(podman("inspect", "--format", "{{.State.ExitCode}}", name))
        podman("pod", "rm", "--force", pod.name)
        return took, code

    def remove(self) -> None:
        for pod in self.pods.values():
            subprocess.run(["podman", "pod", "rm", "--force", pod.name], capture_output=True, check=False)
            for claim in pod.claims:
                name = claim["metadata"]["name"]
                subprocess.run(["podman", "volume", "rm", "--force", name], capture_output=True, check=False)


def ended_under_an_answer(kubelet: Kubelet, site: Deployment, pod: PlannedPod, whole: str) -> str:
    """A row: the pod is deleted in mid-answer, and started again as its controller would."""
    wait(site.whole, "all are there")
    answer = site.ask(ASKED, LONG)
    wait(lambda: len(answer.text) > BEGUN or answer.ended.is_set(), "the answer has begun")
    assert not answer.ended.is_set(), answer.error
    under_way: list[bool] = []  # when SIGTERM comes
    with kubelet.watching(pod, "readiness") as told:
        took, code = kubelet.end(pod, lambda: under_way.append(not answer.ended.is_set()))
    finished(answer)
    kubelet.start(pod)
    back = kubelet.ready(pod)
    text = answer.error or ("the same text" if answer.text == whole else "ANOTHER TEXT")
    moment = "under way" if all(under_way) else "OVER"
    left = f"{took:.1f} of {pod.grace} s, exit code {code}"
    return f"| {pod.component} | {moment} | {text} | {told} | {left} | {back:.1f} s |"


def _well(*told: Told) -> bool:
    return all(one.last == 200 for one in told)


def started(kubelet: Kubelet, pods: Sequence[PlannedPod]) -> list[str]:
    """Rows: what the startup and liveness probes of each saw until it was ready; the router before all others."""
    rows = []
    for pod in sorted(pods, key=lambda pod: pod.component != "router"):
        with kubelet.watching(pod, "startup") as startup, kubelet.watching(pod, "liveness") as living:
            kubelet.start(pod)
            wait(partial(_well, startup, living), f"{pod.name} has started")
        readiness = kubelet.probe(pod, "readiness")
        rows.append(f"| {pod.component} | {startup} | {living} | {' '.join(map(str, readiness))} |")
    return rows


def _stored(site: Deployment, numbers: Iterator[int]) -> bool:
    """Whether the pool has blocks, after one more question: workers hear of it a heartbeat after the router has."""
    finished(site.ask(f"{next(numbers)}. {QUESTION}"))
    time.sleep(0.5)
    return site.metric("pool_blocks") > 0


def prove(kubelet: Kubelet, site: Deployment, by: Callable[[str], PlannedPod]) -> list[str]:
    """Everything, as lines of a page."""
    rows = started(kubelet, list(kubelet.pods.values()))
    wait(site.whole, "the router has a prefill and a decode worker and a node of the pool")
    first = finished(site.ask(QUESTION))
    wait(partial(_stored, site, count(1)), "the pool has blocks")
    whole: Answer = finished(site.ask(ASKED, LONG))
    ends = [ended_under_an_answer(kubelet, site, by(name), whole.text) for name in ("decode", "prefill", "router")]
    wait(site.whole, "all are there")
    took, code = kubelet.end(by("kvcache"))
    wait(lambda: site.metric("pool_blocks") == 0, "the router knows of no node any more")
    kubelet.start(by("kvcache"))
    wait(site.whole, "the node of the pool is back")
    kept = wait(lambda: site.metric("pool_blocks") > 0, "the node has its blocks again")
    keyless = httpx.get(f"{site.url}/v1/models", timeout=10).status_code
    return [
        f"- A streamed chat: placed as `{first.placement}`{f', {first.error}' if first.error else ''}. "
        f"Asked for its models without the key, the API answers {keyless}.",
        f"- The node of the pool, ended ({took:.1f} s, exit code {code}) and started again under its name: its blocks "
        f"are there {kept:.1f} s after it was heard of.",
        "",
        "| pod | startup probe | liveness probe meanwhile | readiness then |",
        "|---|---|---|---|",
        *rows,
        "",
        "| deleted in mid-answer | which at SIGTERM is | its text | readiness | left after | ready again after |",
        "|---|---|---|---|---|---|",
        *ends,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--image", default="localhost/millrace:cpu-demo", help="default: %(default)s")
    parser.add_argument("--out", type=Path, help="the page to write; default: standard output")
    parsed = parser.parse_args()
    keys = {"millrace-keys": {"cluster-key": secrets.token_hex(16), "api-key": secrets.token_hex(16)}}
    addresses = map(str, list(ipaddress.ip_network(SUBNET).hosts())[FIRST:])
    pods = plan_pods(render(values(parsed.image))[0], NAMESPACE, addresses, keys)
    kubelet, by_component = Kubelet(pods), {pod.component: pod for pod in pods}
    site = Deployment((), "podman", f"http://{by_component['router'].address}:8000")
    site.client.headers["authorization"] = f"Bearer {keys['millrace-keys']['api-key']}"
    podman("network", "create", "--subnet", SUBNET, NETWORK)
    try:
        lines = prove(kubelet, site, by_component.__getitem__)
    finally:
        kubelet.remove()
        podman("network", "rm", "--force", NETWORK)
    head = f"{machine()}; {podman('--version')}. `python -m scripts.kube_play`."
    give("The chart's pods, played", head, lines, parsed.out)


if __name__ == "__main__":
    main()
