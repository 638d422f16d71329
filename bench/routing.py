"""What placing a request costs the router, with a full prefix index: `python -m bench.routing`.

Workers report over the production path (heartbeats with KV events) until the index holds what is asked for; then
requests whose prefixes are there in part are placed one after another, while workers go on reporting and the policy
learns what came of its predictions. Nothing is sent: no sockets, no engine. What the router adds to a whole server is
bench.router_share's to say.
"""

from __future__ import annotations

import argparse
import random
import time
import tracemalloc
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from bench.report import aligned
from kvcache.blocks.prefix import extend_keys, root_key
from router.arrivals import Arrivals
from router.block_keys import block_keys
from router.candidate import Dispatched
from router.fleet import Fleet, RouterConfig
from router.placer import Placer
from router.policies import POLICIES, make_policy
from router.policy import Decision
from router.prefix_index import PrefixIndex
from router.registry import Reservation
from router.request_state import RequestState
from serving.collecting import collecting_as_served
from serving.messages import KVEvents, Request, Role, SamplingParams, Slo, WorkerStatus
from serving.options import parse_bytes
from serving.step_cost import StepCost

BLOCK = 16  # tokens
PROMPT = 1520  # tokens, unless asked otherwise
QUESTION = 20  # tokens of it, at least, that no other prompt has
FRESH = 93  # blocks that a worker reports as new at a time
HOLDERS = (1, 1, 1, 2, 2, 4)  # workers that hold a document
LIMITS = (0.5, 2.0, 8.0)  # seconds: TTFT objectives of prompts that have come in time
OPEN = 64  # requests at a time
ROLES = {
    "thirds": (Role.PREFILL, Role.DECODE, Role.MIXED),
    "mixed": (Role.MIXED,),
    "split": (Role.PREFILL, Role.DECODE),
    "half-split": (Role.MIXED, Role.PREFILL, Role.MIXED, Role.DECODE),
}
STEPS = ("block keys", "index lookup", "view", "choose", "accounts", "a request", "a heartbeat")
CLOCKS = {"cpu": time.thread_time, "wall": time.perf_counter}


@dataclass
class Stopwatch:
    """Seconds by step."""

    clock: Callable[[], float]
    spent: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in STEPS})

    @contextmanager
    def timing(self, step: str) -> Iterator[None]:
        began = self.clock()
        yield
        self.spent[step].append(self.clock() - began)

    def rows(self, policy: str) -> Iterator[list[str]]:
        """Milliseconds: p50, p90, p99 and the most."""
        for step, found in self.spent.items():
            seconds, most = sorted(found), len(found) - 1
            if seconds:
                shown = (seconds[min(most, int(len(seconds) * share))] for share in (0.5, 0.9, 0.99, 1.0))
                yield [policy, step, *(f"{1e3 * each:.3f}" for each in shown)]


def shared_blocks(prompt: int) -> int:
    """Blocks that prompts of so many tokens about one document have in common at most."""
    return (prompt - QUESTION) // BLOCK


def document(number: int, blocks: int) -> list[int]:
    """The tokens of a text that prompts begin with."""
    tokens = array("H")
    tokens.frombytes(random.Random(number).randbytes(2 * blocks * BLOCK))
    return tokens.tolist()


def held_blocks(workers: int, blocks: int, each: int) -> list[list[bytes]]:
    """Keys of so many blocks in all, of documents of `each`, as KV events have them: for each worker what it holds."""
    draw, held = random.Random(7), [[] for _ in range(workers)]  # type: tuple[random.Random, list[list[bytes]]]
    for number in range(blocks // each):
        keys: list[bytes] = []
        extend_keys(keys, root_key("model"), document(number, each), BLOCK)
        for worker in draw.sample(range(workers), min(workers, draw.choice(HOLDERS))):
            held[worker] += [key[:8] for key in keys]
    return held


class Reporters:
    """Workers that report in turn, each time with another load, new blocks, and without those of the time before."""

    def __init__(self, fleet: Fleet, roles: Sequence[Role], held: Sequence[Sequence[bytes]]):
        self.fleet = fleet
        self.draw = random.Random(1)
        self.roles = [roles[number % len(roles)] for number in range(len(held))]
        self.turn = 0
        self.fresh: dict[int, tuple[bytes, ...]] = {}
        for number, stored in enumerate(held):
            events = KVEvents(first=-1, next=len(stored), reset=True, stored=tuple(stored))
            fleet.heartbeat(self.status(number), events)

    def report(self) -> None:
        number, self.turn = self.turn % len(self.roles), self.turn + 1
        status, removed = self.status(number), self.fresh.get(number, ())
        self.fresh[number] = fresh = tuple(self.draw.randbytes(8) for _ in range(FRESH))
        since = self.fleet.kv_events_since(status.instance) or 0
        events = KVEvents(first=since, next=since + len(fresh) + len(removed), stored=fresh, removed=removed)
        self.fleet.heartbeat(status, events)
        prompt = Arrivals(0, self.draw.choice(LIMITS), 0.1, 1.0)
        self.fleet.registry.in_time(status.instance, prompt, self.fleet.clock())

    def status(self, number: int) -> WorkerStatus:
        draw, role = self.draw, self.roles[number]
        pace = 0.8 + 0.4 * (number % 17) / 16
        running = 0 if role is Role.PREFILL else draw.randrange(48)
        queued = 0 if role is Role.DECODE else draw.randrange(4000)
        return WorkerStatus(
            instance=f"{number:032x}",
            name=f"{role}-{number}",
            role=role,
            address=f"10.0.{number // 250}.{number % 250}:9000",
            fingerprint="model",
            pairing="model",
            model="model",
            max_model_len=65_536,
            block_size=BLOCK,
            total_blocks=16_384,
            free_blocks=16_384 - 40 * running,
            max_seqs=256,
            running=running,
            waiting=queued // 1000,
            waiting_tokens=queued,
            waiting_seconds=queued * 1e-4 * pace,
            leases=running,
            context_tokens=640 * running,
            tpot_counts=(*(0,) * 7, running // 4, running // 4, 0, running // 4, *(0,) * 4),
            prompt_share=0.3 if role is Role.MIXED else 0.0,
            step_cost=StepCost(
                fixed=8e-3 * pace, token=1e-4 * pace, pair=1e-8, sequence=5e-5, context=2e-7, error=0.1, samples=600
            ),
            max_batched_tokens=512,
        )


def requests(count: int, blocks: int, prompt: int) -> Iterator[Request]:
    """Prompts of `prompt` tokens that begin with 0 to all tokens of a document; an index has `blocks` of these."""
    draw, each = random.Random(3), shared_blocks(prompt)
    documents = blocks // each
    for number in range(count):
        known = document(draw.randrange(documents), each)[: draw.randrange(each * BLOCK + 1)] if documents else []
        rest = random.Random(-1 - number).choices(range(65536), k=prompt - len(known))
        yield Request(
            request_id=f"request-{number}",
            prompt=(*known, *rest),
            sampling=SamplingParams(max_tokens=128),
            slo=Slo(ttft_ms=500.0, tpot_ms=50.0),
        )


class TimedIndex(PrefixIndex):
    """Says how long it is looked into; that is part of a view."""

    def __init__(self, capacity: int, watch: Stopwatch):
        super().__init__(capacity)
        self.watch = watch

    def match(self, keys: Sequence[bytes]) -> dict[str, int]:
        with self.watch.timing("index lookup"):
            return super().match(keys)


@dataclass
class RoutedRequest:
    """A request that is open: what it holds at workers, and what was predicted for it."""

    decision: Decision
    reserved: list[Reservation]

    def end(self, placer: Placer, draw: random.Random) -> None:
        """Its prompt is computed, and what came of it is not quite what was predicted."""
        for each in self.reserved:
            each.release(computed=True)
        told = self.decision.predicted
        if told is not None:
            ttft, tpot = (seconds * draw.lognormvariate(0.0, 0.3) for seconds in (told.ttft, told.tpot))
            placer.policy.observed(self.decision, ttft=ttft, tpot=tpot)


def place(placer: Placer, request: Request, watch: Stopwatch) -> RoutedRequest:
    """Everything that happens to a request between its arrival and its prefill, but for the calls to workers."""
    state, fleet = RequestState(request=request), placer.fleet
    with watch.timing("a request"):
        status = fleet.candidates()[0].status
        if fleet.prefixes is not None:
            with watch.timing("block keys"):
                block_keys(state, status)
        with watch.timing("view"):
            look = placer.look(state)
            demand, view = look.demand, look.view
        with watch.timing("choose"):
            decision = placer.policy.choose(demand, view, fleet.clock())
        assert decision is not None and decision.decode is not None and decision.prefill is not None
        with watch.timing("accounts"):
            placed = placer.placed(decision, demand)
            lease = fleet.reserve(decision.decode, Dispatched(leases=1, context_tokens=state.tokens))
            placer.expect_blocks(state, decision.prefill.status.instance, decision.decode.status.instance)
    assert placed.reserved is not None
    return RoutedRequest(decision, [placed.reserved, lease])


def measure(policy: str, asked: argparse.Namespace, held: Sequence[Sequence[bytes]]) -> Stopwatch:
    """Place all requests; some workers report between any two."""
    config = RouterConfig(policy=policy, prefix_index_bytes=asked.prefix_index_memory)
    fleet = Fleet(config, lambda status: NotImplemented)
    placer, watch = Placer(fleet, make_policy(policy)), Stopwatch(CLOCKS[asked.clock])
    if fleet.prefixes is not None:
        fleet.prefixes = TimedIndex(asked.prefix_index_memory, watch)
    reporters = Reporters(fleet, ROLES[asked.roles], held)
    with collecting_as_served():
        _play(placer, reporters, asked, watch)
    return watch


def _play(placer: Placer, reporters: Reporters, asked: argparse.Namespace, watch: Stopwatch) -> None:
    running, draw = deque[RoutedRequest](), random.Random(9)
    for request in requests(asked.requests, asked.blocks, asked.prompt_tokens):
        for _ in range(asked.heartbeats):
            with watch.timing("a heartbeat"):
                reporters.report()
        running.append(place(placer, request, watch))
        if len(running) > OPEN:
            running.popleft().end(placer, draw)


def index_size(asked: argparse.Namespace, held: Sequence[Sequence[bytes]]) -> tuple[int, int]:
    """Blocks in the index, and the bytes that Python has allocated for it."""
    config = RouterConfig(policy="prefix_aware", prefix_index_bytes=asked.prefix_index_memory)
    fleet = Fleet(config, lambda status: NotImplemented)
    assert fleet.prefixes is not None
    tracemalloc.start()
    began = tracemalloc.get_traced_memory()[0]
    for number, stored in enumerate(held):  # copies, as keys from the wire are
        copied = [bytes(bytearray(key)) for key in stored]
        fleet.prefixes.stored(f"{number:032x}", copied)
        del copied
    size = tracemalloc.get_traced_memory()[0] - began
    tracemalloc.stop()
    return len(fleet.prefixes), size


def show(tables: Mapping[str, Stopwatch], asked: argparse.Namespace) -> None:
    prompts = f"{asked.requests} prompts of {asked.prompt_tokens} tokens"
    print(f"{asked.workers} workers ({asked.roles}), {prompts}, ms on the {asked.clock} clock")
    rows = [row for policy, watch in tables.items() for row in watch.rows(policy)]
    print(aligned([["policy", "step", "p50", "p90", "p99", "most"], *rows], texts=2))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.routing", description=__doc__)
    parser.add_argument("--workers", type=int, default=256, help="workers that report (default: 256)")
    parser.add_argument(
        "--roles",
        choices=tuple(ROLES),
        default="thirds",
        help="of workers: a third of each, or others (default: thirds)",
    )
    parser.add_argument("--blocks", type=int, default=1_000_000, help="blocks in the index (default: a million)")
    parser.add_argument("--prefix-index-memory", type=parse_bytes, default=256 << 20, help="default: 256MiB")
    parser.add_argument("--prompt-tokens", type=int, default=PROMPT, help=f"of each (default: {PROMPT})")
    parser.add_argument("--requests", type=int, default=3000, help="requests for each policy (default: 3000)")
    parser.add_argument("--heartbeats", type=int, default=4, help="between two requests (default: 4)")
    parser.add_argument("--policy", choices=tuple(POLICIES), help="only this one")
    parser.add_argument("--clock", choices=tuple(CLOCKS), default="cpu", help="this thread's CPU, or the wall's")
    asked = parser.parse_args()
    if not QUESTION + BLOCK <= asked.prompt_tokens < 65_536:
        parser.error(f"--prompt-tokens: give {QUESTION + BLOCK} to 65535")
    held = held_blocks(asked.workers, asked.blocks, shared_blocks(asked.prompt_tokens))
    blocks, size = index_size(asked, held)
    print(f"index: {blocks:,} blocks in {size / 2**20:.0f} MiB of {asked.prefix_index_memory / 2**20:.0f}")
    names = POLICIES if asked.policy is None else [asked.policy]
    show({name: measure(name, asked, held) for name in names}, asked)


if __name__ == "__main__":
    main()
