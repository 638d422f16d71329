"""The bench of the router's own cost: it fills the index it says it fills, and times every step of a request."""

from __future__ import annotations

import sys

import pytest

from bench import routing
from kvcache.blocks.prefix import extend_keys, root_key
from router.policies import POLICIES


@pytest.mark.parametrize("roles", list(routing.ROLES))
def test_every_policy_is_timed(roles: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--workers", "6", "--blocks", "930", "--requests", "80", "--prefix-index-memory", "1MiB"]
    monkeypatch.setattr(sys, "argv", ["bench.routing", *sizes, "--roles", roles])
    routing.main()
    first, _, _, *rows = capsys.readouterr().out.splitlines()
    assert first.startswith("index: 930 blocks in ") and first.endswith(" MiB of 1")
    timed = {(policy, step.strip()) for policy, step in ((row[:16].strip(), row[16:30]) for row in rows)}
    for policy, kind in POLICIES.items():
        steps = {step for named, step in timed if named == policy}
        expected = set(routing.STEPS) - (set() if kind.needs_prefixes else {"block keys", "index lookup"})
        assert steps == expected


@pytest.mark.parametrize("prompt", [routing.PROMPT, 8000])
def test_prompts_begin_with_blocks_that_workers_have_reported(prompt: int) -> None:
    each = routing.shared_blocks(prompt)
    held = routing.held_blocks(4, 10 * each, each)
    known = {key for keys in held for key in keys}
    assert len(known) == 10 * each
    lengths = set()
    for request in routing.requests(30, 10 * each, prompt):
        keys: list[bytes] = []
        extend_keys(keys, root_key("model"), request.prompt, routing.BLOCK)
        lengths.add(next((n for n, key in enumerate(keys) if key[:8] not in known), len(keys)))
        assert len(request.prompt) == prompt
    assert min(lengths) < 0.25 * each and max(lengths) > 0.75 * each
