"""kill -9 of workers at every stage of a request: the client's text is that of an undisturbed run, nothing is left.

Greedy and seeded-sampled, streaming and not, are asked at once; the victim is one of two workers of its role. Stages
at which KV of the lost try was on its way or written are run in every form of computing, the others in one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from signal import SIGCONT, SIGKILL
from typing import Any
from uuid import uuid4

import httpx
import pytest

from deploy.cli import main
from tests.flow.client import Asked, Client
from tests.flow.reference import prompts
from tests.flow.server import MillraceServer, wait_until
from tests.tiny import tiny_llama

pytestmark = pytest.mark.slow

TRIES = 5
DECODE = ("decode-0", "decode-1")
FORK_SERVER = "serving.fork_server_process"
WORKERS = ("prefill-0", "prefill-1", *DECODE)
KINDS: tuple[dict[str, Any], ...] = (
    {"stream": True, "temperature": 0.0},
    {"stream": False, "temperature": 0.0},
    {"stream": True, "temperature": 1.0, "seed": 11, "top_p": 0.9},
    {"stream": False, "temperature": 1.0, "seed": 12, "frequency_penalty": 0.3},
    {"stream": True, "temperature": 1.0, "seed": 13, "extra_body": {"guided_regex": "([a-z]{1,9} )*"}},
)

Outcomes = list[tuple[str, str | None, int, int]]


@dataclass(frozen=True)
class Form:
    """How the workers compute, and a model deep enough that a long prompt in small chunks takes them a while.

    Its KV is too large for socket buffers: a handoff can be caught in the middle.
    """

    flags: tuple[str, ...]
    layers: int
    hidden: int
    tokens: int  # of output: the quicker, the more, so that there is time to do harm
    quantized: bool = False


FORMS = {
    "compiled bfloat16": Form(("--kernels", "compiled", "--dtype", "bfloat16"), layers=16, hidden=512, tokens=150),
    "torch float32": Form(("--kernels", "torch", "--dtype", "float32"), layers=8, hidden=256, tokens=100),
    "compiled int8": Form(
        ("--kernels", "compiled", "--kv-cache-dtype", "int8"), layers=16, hidden=512, tokens=150, quantized=True
    ),
}

in_every_form = pytest.mark.parametrize("form", list(FORMS), indirect=True, scope="module")
in_bfloat16 = pytest.mark.parametrize("form", ["compiled bfloat16"], indirect=True, scope="module")
in_int8 = pytest.mark.parametrize("form", ["compiled int8"], indirect=True, scope="module")


@pytest.fixture(scope="module")
def form(request: pytest.FixtureRequest) -> Form:
    return FORMS[request.param]


@pytest.fixture(scope="module")
def server(form: Form, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MillraceServer]:
    folder = tmp_path_factory.mktemp("model")
    path = tiny_llama(folder / "tiny", layers=form.layers, hidden=form.hidden, kv_heads=4)
    if form.quantized:
        assert main(["quantize", str(path), str(folder / "int8")]) == 0
        path = folder / "int8"
    arguments = (
        str(path),
        *("--prefill", "2", "--decode", "2", "--served-model-name", "tiny", *form.flags),
        *("--max-num-batched-tokens", "24", "--max-num-seqs", "24", "--no-enable-prefix-caching"),
        *("--num-kv-blocks", "512", "--heartbeat-interval", "0.1", "--heartbeat-timeout", "30"),
    )
    with MillraceServer(*arguments, workers=WORKERS) as started:
        yield started


@pytest.fixture
def client(server: MillraceServer) -> Iterator[Client]:
    server.wait_ready()
    made = Client(server.url)
    yield made
    made.close()


@pytest.fixture(scope="module")
def undisturbed(server: MillraceServer, form: Form) -> Outcomes:
    client = Client(server.url)
    try:
        return client.finish(ask(client, form))
    finally:
        client.close()


def ask(client: Client, form: Form) -> list[Asked]:
    """With a cache salt that nobody else has: where prefixes are cached, each try still computes its own."""
    wanted, asked = prompts(len(KINDS), shortest=550, longest=650, seed=3), []
    for prompt, kind in zip(wanted, KINDS, strict=True):
        extra = {**kind.get("extra_body", {}), "cache_salt": uuid4().hex}
        asked.append(client.start(prompt, max_tokens=form.tokens, **kind | {"extra_body": extra}))
    return asked


Harm = Callable[[list[Asked]], None]


def disturb(server: MillraceServer, client: Client, form: Form, undisturbed: Outcomes, harm: Harm) -> None:
    """Ask, do harm, and see that nobody noticed. Harm that came too late to hit anything is done again."""
    for _ in range(TRIES):
        server.wait_ready()
        before = server.metric("replacements_total")
        asked = ask(client, form)
        harm(asked)
        assert client.finish(asked) == undisturbed
        server.wait_idle()
        if server.metric("replacements_total") > before:
            return
    raise AssertionError(f"nothing was disturbed in {TRIES} tries")


def moment(condition: Callable[[], object], asked: list[Asked]) -> bool:
    """Wait for the moment to do harm; False when it has been missed."""

    wait_until(lambda: condition() or all(map(over, asked)), 90, "the moment to do harm, or the end")
    return not all(map(over, asked))


def over(asked: Asked) -> bool:
    return asked.done is not None and asked.done.done()


def waiting(server: MillraceServer, name: str) -> float:
    return server.metric("worker_num_requests_waiting", engine=name)


def decoding(server: MillraceServer) -> list[str]:
    """The decode workers that have something to do."""
    return [name for name in DECODE if server.metric("worker_num_requests_running", engine=name)]


def leases(server: MillraceServer) -> int:
    return int(server.audit()["services"][0]["held"]["leases"])


def kill_with_requests_queued(server: MillraceServer, client: Client, form: Form, undisturbed: Outcomes) -> None:
    """Stopped before they are placed, and killed with them; nobody is to notice."""
    server.wait_ready()
    before = server.metric("replacements_total")
    server.stop_worker("prefill-0")  # what is sent there now stays in its socket
    try:
        asked = ask(client, form)
        # The other prefill worker has its share, or is through with it: so this one was given its own.
        wait_until(lambda: waiting(server, "prefill-1") or any(map(over, asked)), 60, "the requests are placed")
    finally:
        server.signal_worker("prefill-0", SIGKILL)
    assert client.finish(asked) == undisturbed
    assert server.metric("replacements_total") > before
    server.wait_idle()


@in_bfloat16
def test_prefill_worker_dies_with_the_request_queued(
    server: MillraceServer, client: Client, form: Form, undisturbed: Outcomes
) -> None:
    kill_with_requests_queued(server, client, form, undisturbed)


def embedded(server: MillraceServer, inputs: list[list[int]]) -> list[str]:
    """In base64: to the bit."""
    asked = {"input": inputs, "encoding_format": "base64"}
    answer = httpx.post(f"{server.url}/v1/embeddings", json=asked, timeout=120).raise_for_status()
    return [item["embedding"] for item in answer.json()["data"]]


@in_bfloat16
def test_prefill_worker_dies_with_embeddings_to_compute(server: MillraceServer) -> None:
    server.wait_ready()
    inputs = prompts(8, shortest=300, longest=400, seed=4)
    undisturbed, before = embedded(server, inputs), server.metric("replacements_total")
    server.stop_worker("prefill-0")  # what is sent there now stays in its socket
    with ThreadPoolExecutor(1) as thread:
        try:
            asked = thread.submit(embedded, server, inputs)
            wait_until(lambda: waiting(server, "prefill-1"), 60, "the inputs are placed")
        finally:
            server.signal_worker("prefill-0", SIGKILL)
        assert asked.result() == undisturbed
    assert server.metric("replacements_total") > before
    server.wait_idle()


def kill_computing(server: MillraceServer, asked: list[Asked]) -> None:
    if moment(lambda: waiting(server, "prefill-0"), asked):
        server.signal_worker("prefill-0", SIGKILL)


@in_int8
def test_prefill_worker_dies_computing(
    server: MillraceServer, client: Client, form: Form, undisturbed: Outcomes
) -> None:
    disturb(server, client, form, undisturbed, partial(kill_computing, server))


def kill_in_mid_handoff(server: MillraceServer, asked: list[Asked]) -> None:
    if not moment(lambda: waiting(server, "prefill-0") and leases(server) == len(asked), asked):
        return
    for decode in DECODE:
        server.stop_worker(decode)  # KV goes out and is not taken in
    try:
        wait_until(lambda: not waiting(server, "prefill-0"), 60, "prefill-0 has computed all it has")
        server.signal_worker("prefill-0", SIGKILL)
    finally:
        for decode in DECODE:
            server.signal_worker(decode, SIGCONT)


@in_every_form
def test_prefill_worker_dies_in_the_middle_of_its_handoff(
    server: MillraceServer, client: Client, form: Form, undisturbed: Outcomes
) -> None:
    disturb(server, client, form, undisturbed, partial(kill_in_mid_handoff, server))


def kill_before_the_first_token(server: MillraceServer, asked: list[Asked]) -> None:
    if moment(lambda: leases(server) == len(asked), asked) and not any(one.chunks for one in asked):
        server.signal_worker("decode-0", SIGKILL)


@in_int8
def test_decode_worker_dies_before_its_first_token(
    server: MillraceServer, client: Client, form: Form, undisturbed: Outcomes
) -> None:
    disturb(server, client, form, undisturbed, partial(kill_before_the_first_token, server))


def kill_after_the_tenth_token(server: MillraceServer, asked: list[Asked]) -> None:
    if moment(lambda: any(one.progressed.is_set() for one in asked) and decoding(server), asked):
        server.signal_worker((decoding(server) or ["decode-0"])[0], SIGKILL)


@in_every_form
def test_decode_worker_dies_after_the_tenth_token(
    server: MillraceServer, client: Client, form: Form, undisturbed: Outcomes
) -> None:
    disturb(server, client, form, undisturbed, partial(kill_after_the_tenth_token, server))


def kill_all_that_decodes(server: MillraceServer, asked: list[Asked]) -> None:
    if moment(lambda: asked[0].progressed.is_set(), asked):
        for decode in (FORK_SERVER, *DECODE):
            server.signal_worker(decode, SIGKILL)


@in_bfloat16
def test_both_decode_workers_die_and_come_back(
    server: MillraceServer, client: Client, form: Form, undisturbed: Outcomes
) -> None:
    """Nobody is left to take over: the requests wait for the workers that are started again, by a new fork server."""
    disturb(server, client, form, undisturbed, partial(kill_all_that_decodes, server))
