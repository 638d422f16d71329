"""Requests of a measured run beside their simulation: each has its own line, and those that warm a cache have none."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.ledger import Ledger
from scripts.simulated_requests import main

COST = {"fixed": 0.02, "token": 1e-3, "pair": 0.0, "sequence": 0.0, "context": 0.0, "error": 0.0, "samples": 900}
PROFILE = {
    **{"model": "some", "cost": COST, "kv_tokens": 16384, "max_model_len": 2048, "layers": 2, "kv_bytes": 512},
    **{"max_num_seqs": 128, "max_num_batched_tokens": 512},
}
ROW = {"output_tokens": 3, "tpot_ms": 21.0, "ttft_slo_ms": 1000.0, "tpot_slo_ms": 100.0, "error": None}


def test_a_request_is_shown_beside_its_simulation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Alone, a prompt of 100 tokens takes 120 ms and 5 of the front; that of 200 comes later and takes 225."""
    ledger = Ledger(tmp_path / "found.jsonl")
    ledger.note("learned embedded", {"profiles": {"mixed": PROFILE}, "front_ms": 5.0, "commit_ms": 0.0})
    rows = [
        {**ROW, "arrival_s": 122.0, "prompt_tokens": 200, "ttft_ms": 450.0, "counted": True},
        {**ROW, "arrival_s": 120.0, "prompt_tokens": 100, "ttft_ms": 100.0, "counted": True},
        {**ROW, "arrival_s": 0.0, "prompt_tokens": 50, "ttft_ms": 70.0, "counted": False},
    ]
    for case in ("embedded, chat, 0.6, round 1", "embedded, long-mixed, 0.6, round 1"):
        ledger.note(f"run {case}", {"profiles": {"mixed": PROFILE}, "rows": rows})
    assert main([str(tmp_path / "found"), "chat"]) == 0
    text = capsys.readouterr().out
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert lines[2][:5] == ["0.00", "100", "3", "100.0 → 125.0 (+25%)", "21.0 → 21.0 (+0%)"]
    assert lines[3][:4] == ["2.00", "200", "3", "450.0 → 225.0 (-50%)"] and len(lines) == 4
    assert "embedded, chat" in text and "long-mixed" not in text
    assert "TTFT -12.5% in the median, 37.5% either way; TPOT +0.0%" in text
