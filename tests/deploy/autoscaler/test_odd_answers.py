"""Whatever a router or a Kubernetes API server answers, as JSON or not, the autoscaler says so and goes on."""

from __future__ import annotations

import asyncio
import http.server
import json
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.admin import Server
from deploy.autoscale import HttpSource, WatchedFleet
from deploy.autoscaler.actuator import ActuatorError
from deploy.autoscaler.by_kubernetes import KubernetesActuator
from deploy.autoscaler.kube_api import KubeApi, read_object
from deploy.autoscaler.kube_lease import KubeLease
from serving.errors import MillraceError
from serving.messages import Role
from tests.deploy.autoscaler.kube_server import LEASES, POD, SCALE, KubeServer
from tests.deploy.autoscaler.test_by_kubernetes import DEPLOYMENTS, PODS, ReportingPods
from tests.deploy.autoscaler.test_controller import Town

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


def places(found: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in plain data, the whole first."""
    yield path
    for key, value in found.items() if isinstance(found, dict) else enumerate(found if isinstance(found, list) else ()):
        yield from places(value, (*path, key))


def changed(found: Any, path: tuple[Any, ...], value: Any) -> Any:
    """The same with `value` at a place."""
    if not path:
        return value
    copy = found.copy()
    copy[path[0]] = changed(found[path[0]], path[1:], value)
    return copy


@dataclass
class OddTown(Town):
    """A router that from some turn on has something else at one place of its answer."""

    odd: Callable[[Any], Any] = lambda found: found
    since: float = 0.0

    async def read(self) -> Any:
        found = await super().read()
        return found if self.now < self.since else self.odd(found)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_no_answer_of_the_router_ends_the_autoscaler(data: st.DataObject) -> None:
    town = OddTown(since=160.0)
    place = data.draw(st.sampled_from(list(places(asyncio.run(town.read())))))
    value = data.draw(JSON)
    town.odd = lambda found: changed(found, place, value)
    controller = town.controller()
    asyncio.run(town.turns(controller, 9))
    assert controller.figures.turns == 9


@contextmanager
def answering(status: int, body: bytes) -> Iterator[str]:
    """A server that says this to everything, and where it is."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("status", [200, 503])
@pytest.mark.parametrize(
    "body", [b"", b"null", b"[]", b"\xff{", b'{"error": null}', b'{"error": "no"}', b'{"workers": 1}']
)
async def test_an_odd_body_is_an_error_of_the_tree(status: int, body: bytes) -> None:
    with answering(status, body) as url:
        server = Server.of(Namespace(url=url, api_key=None, server_cert=None))
        with pytest.raises(MillraceError):
            await WatchedFleet(server).workers()
        town = Town()
        controller = town.controller()
        controller.wiring = type(controller.wiring)(
            source=HttpSource(server), actuator=town, lock=town, clock=town, sleep=town.pass_time
        )
        await town.turns(controller, 2)
        assert controller.figures.failures == 2 and not controller.health()[0]


class OddKube(KubeApi):
    """An API server's answers with something else at one place."""

    def __init__(self, inner: KubeApi, odd: Callable[[Any], Any]):
        self.inner, self.odd, self.namespace = inner, odd, inner.namespace

    def _call(self, method: str, path: str, body: Any, kind: str) -> dict[str, Any]:
        found = self.inner._call(method, path, body, kind)
        return read_object(json.dumps(self.odd(found)).encode(), path)


@pytest.fixture(scope="module")
def kube(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubeServer]:
    folder: Path = tmp_path_factory.mktemp("kube")
    with KubeServer(folder) as made:
        yield made


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_no_answer_of_kubernetes_ends_it_either(kube: KubeServer, data: st.DataObject) -> None:
    objects = {
        SCALE.format("m-decode"): {"spec": {"replicas": 2}, "status": {"replicas": 2}},
        SCALE.format("m-prefill"): {"spec": {"replicas": 1}, "status": {"replicas": 1}},
        POD.format(PODS[1]): {"kind": "Pod", "spec": {}, "metadata": {"annotations": {"a": "b"}}},
        f"{LEASES}/who": {"spec": {"holderIdentity": "b", "leaseDurationSeconds": 9, "leaseTransitions": 1}},
    }
    kube.objects.clear()
    for path, content in objects.items():
        kube.put(path, **content)
    place = data.draw(st.sampled_from([place for each in kube.objects.values() for place in places(each)]))
    value = data.draw(JSON)

    def odd(found: Any) -> Any:
        with suppress(KeyError, TypeError, IndexError):
            return changed(found, place, value)
        return found

    asyncio.run(used(OddKube(kube.api(), odd)))


async def used(api: KubeApi) -> None:
    """Everything that an autoscaler asks."""
    actuator = KubernetesActuator(api, DEPLOYMENTS, ReportingPods())  # type: ignore[arg-type]
    lease = KubeLease(api, "who", "a")
    for asked in (lease.held(), actuator.workers(), actuator.add(Role.DECODE), actuator.drain(PODS[1]), lease.held()):
        with suppress(ActuatorError):
            await asked
    await lease.release()
