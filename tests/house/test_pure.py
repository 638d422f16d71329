"""Code that decides is pure: no torch, no clock, no awaiting, no thread, no socket, no file.

Time, memory and the network are given to it as arguments, so that a test or a simulator decides what they are.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.source import imports, matching, start_closure, tree

# Files that decide. The thin shells around them wait, measure and send: router/admission.py waits for a turn, the
# workers and transports act. What merely describes (configuration, messages, specs) is not listed.
PURE = (
    "deploy/autoscaler/demand.py",
    "deploy/autoscaler/fleet_load.py",
    "deploy/autoscaler/gain.py",
    "deploy/autoscaler/limits.py",
    "deploy/autoscaler/observation.py",
    "deploy/autoscaler/policy.py",
    "deploy/autoscaler/shift.py",
    "deploy/foreign_flags.py",
    "deploy/placement/plan.py",
    "deploy/placement/reader.py",
    "deploy/placement/compose.py",
    "deploy/runtime/connection_table.py",
    "router/breaker.py",
    "router/block_keys.py",
    "router/calibration.py",
    "router/candidate.py",
    "router/explain.py",
    "router/goodput.py",
    "router/lease_room.py",
    "router/link_costs.py",
    "router/offered.py",
    "router/output_lengths.py",
    "router/policy.py",
    "router/policies.py",
    "router/predict.py",
    "router/prefix_index.py",
    "router/quarantine.py",
    "router/refusals.py",
    "router/registry.py",
    "router/request_state.py",
    "router/retry_budget.py",
    "router/returning.py",
    "router/shortlist.py",
    "router/snapshot.py",
    "router/slowness.py",
    "router/stalls.py",
    "router/text_kinds.py",
    "router/trust.py",
    "router/placements.py",
    "router/pool_nodes.py",
    "prefill/scheduler.py",
    "prefill/ordering.py",
    "prefill/fairness.py",
    "serving/fair_shares.py",
    "serving/api/keyring.py",
    "prefill/chunking.py",
    "decode/scheduler.py",
    "decode/leases.py",
    "decode/speculation.py",
    "decode/tpot_bound.py",
    "decode/turns.py",
    "kvcache/blocks/*.py",
    "kvcache/connector/*_cost.py",
    "kvcache/memory/heads.py",
    "kvcache/memory/kv_pieces.py",
    "kvcache/transfer/choice.py",
    "kvcache/transfer/lending.py",
    "kvcache/pool/block_index.py",
    "kvcache/pool/eviction.py",
    "kvcache/pool/backoff.py",
    "kvcache/pool/rendezvous.py",
    "kvcache/pool/tiers.py",
    "serving/engine/plan.py",
    "serving/engine/sequence.py",
    "serving/engine/objectives.py",
    "serving/engine/offload.py",
    "serving/engine/step_*.py",
    "serving/expert_parallel/epoch.py",
    "serving/expert_parallel/surviving.py",
    "serving/fading_line.py",
    "serving/expert_parallel/byte_budget.py",
    "serving/expert_parallel/replanning.py",
    "serving/expert_parallel/stages.py",
    "serving/model/expert_balance.py",
    "serving/parallel/layout.py",
    "serving/parallel/parameters.py",
    "serving/parallel/widths.py",
    "serving/model/expert_layout.py",
    "serving/service_class.py",
    "serving/step_cost.py",
    "serving/sampling/randomness.py",
    "serving/api/choice.py",
    "serving/api/explain.py",
    "serving/api/fair_queue.py",
    "serving/api/fields.py",
    "serving/api/messages_blocks.py",
    "serving/api/messages_errors.py",
    "serving/api/messages_translation.py",
    "serving/api/objectives.py",
    "serving/api/rate_limit.py",
    "serving/api/response_input.py",
    "serving/api/response_output.py",
    "serving/api/sse.py",
    "serving/api/translation.py",
    "serving/api/turns.py",
    "serving/text/detokenizer.py",
    "serving/text/reasoning.py",
    "serving/text/tools/*.py",
    "serving/timeline.py",
    "bench/contenders.py",
    "bench/mixture.py",
    "bench/race.py",
    "bench/standings.py",
    "bench/surge.py",
    "deploy/planner/answer.py",
    "deploy/planner/attainment.py",
    "deploy/planner/bounds.py",
    "deploy/planner/candidates.py",
    "deploy/planner/composing.py",
    "deploy/planner/costs.py",
    "deploy/planner/drawn.py",
    "deploy/planner/front.py",
    "deploy/planner/lanes.py",
    "deploy/planner/machines.py",
    "deploy/planner/placements.py",
    "deploy/planner/queueing.py",
    "deploy/planner/rate_search.py",
    "deploy/planner/search.py",
    "deploy/planner/shortlist.py",
    "deploy/planner/written.py",
    "deploy/simulator/hardware.py",
    "deploy/simulator/profiles.py",
    "deploy/simulator/recorded_assumed.py",
    "deploy/simulator/recorded_systems.py",
    "deploy/simulator/texts.py",
    "deploy/simulator/traffic.py",
    "deploy/simulator/outcomes.py",
    "deploy/simulator/report.py",
)
IMPURE = {
    "asyncio", "concurrent", "datetime", "grpc", "multiprocessing", "os", "queue", "random", "select", "selectors",
    "signal", "socket", "subprocess", "tempfile", "threading", "time", "torch",
}  # fmt: skip
AWAITING = (ast.AsyncFunctionDef, ast.Await, ast.AsyncFor, ast.AsyncWith)
FILE_METHODS = {"read_text", "read_bytes", "write_text", "write_bytes"}


@pytest.mark.parametrize("pattern", PURE)
def test_code_that_decides_is_pure(pattern: str) -> None:
    assert [f"{path}:{found}" for path in matching(pattern) for found in impurities(path)] == []


def impurities(path: Path) -> Iterator[str]:
    for found in imports(path):
        if found.top in IMPURE:
            yield f"{found.line} imports {found.name}"
    closure = start_closure(path)
    if "torch" in closure:
        yield f" reaches torch through {closure['torch']}"
    yield from acts(tree(path))


def acts(module: ast.Module) -> Iterator[str]:
    """Where this code awaits, or touches the file system or the terminal."""
    for node in ast.walk(module):
        if isinstance(node, AWAITING) or (isinstance(node, ast.comprehension) and node.is_async):
            yield f"{getattr(node, 'lineno', '')} awaits"
        elif isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Name) and called.id in ("open", "print", "input"):
                yield f"{node.lineno} calls {called.id}()"
            elif isinstance(called, ast.Attribute) and called.attr in FILE_METHODS:
                yield f"{node.lineno} calls {called.attr}()"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("async def step(): ...", ["1 awaits"]),
        ("def step():\n    open('file')", ["2 calls open()"]),
        ("path.write_text('text')", ["1 calls write_text()"]),
        ("lease.open(now)", []),
    ],
)
def test_acting_is_found(text: str, expected: list[str]) -> None:
    assert list(acts(ast.parse(text))) == expected
