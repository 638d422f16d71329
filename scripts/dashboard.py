"""Writes the Grafana dashboard of deploy/compose from the list of its panels: queries are read and checked here.

python -m scripts.dashboard
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parent.parent / "deploy/compose/grafana/millrace.json"
SOURCE = {"type": "prometheus", "uid": "millrace"}
WIDTH, HEIGHT, ACROSS = 8, 7, 3  # of a panel, on Grafana's grid of 24 columns; a section's title is 1 high
RATE = "$__rate_interval"


def rate(metric: str, by: str = "") -> str:
    return f"sum{f' by ({by}) ' if by else ''}(rate(millrace:{metric}[{RATE}]))"


def quantile(share: float, metric: str) -> str:
    return f"histogram_quantile({share}, {rate(f'{metric}_bucket', 'le')})"


def quantiles(metric: str) -> dict[str, str]:
    return {name: quantile(share, metric) for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))}


# Of those offered, the ones that could be served: what attainment is counted by (docs/metrics.md).
VALID = f'sum by (class) (rate(millrace:requests_offered_total{{outcome!="invalid"}}[{RATE}]))'
WITHIN = f"({rate('requests_within_slo_total', 'class')} or 0 * {rate('requests_offered_total', 'class')})"
Panel = tuple[str, str, dict[str, str]]  # title, unit, queries by legend
SECTIONS: dict[str, tuple[Panel, ...]] = {
    "Goodput and attainment": (
        (
            "Goodput: requests offered, within their objectives",
            "reqps",
            {
                "offered": rate("requests_offered_total"),
                "within, {{class}}": rate("requests_within_slo_total", "class"),
            },
        ),
        ("Attainment: share within objectives, by class", "percentunit", {"{{class}}": f"{WITHIN} / ({VALID} > 0)"}),
        (
            "Requests refused and failed",
            "reqps",
            {
                "refused, {{status}}": rate("request_refused_total", "status"),
                "shed, {{class}}, {{code}}": rate("requests_shed_total", "class, code"),
                "failed, {{error}}": rate("request_failure_total", "error"),
            },
        ),
        ("Time to first token", "s", quantiles("time_to_first_token_seconds")),
        ("Time per output token", "s", quantiles("request_time_per_output_token_seconds")),
        (
            "Tokens",
            "short",
            {
                "prompt": rate("prompt_tokens_total"),
                "of those cached": rate("prompt_tokens_cached_total"),
                "output": rate("generation_tokens_total"),
            },
        ),
    ),
    "Phases of a request": (
        (
            "Phases, mean",
            "s",
            {
                name: f"{rate(f'request_{name}_time_seconds_sum')} / {rate(f'request_{name}_time_seconds_count')}"
                for name in ("queue", "prefill", "decode")
            },
        ),
        (
            "Phases, p99",
            "s",
            {name: quantile(0.99, f"request_{name}_time_seconds") for name in ("queue", "prefill", "decode")},
        ),
        (
            "Waiting for room in the router, by class",
            "short",
            {"{{class}}": "sum by (class) (millrace:router_queue_class_requests)"},
        ),
    ),
    "Workers": (
        (
            "Running and waiting, by worker",
            "short",
            {
                "running, {{engine}}": "millrace:worker_num_requests_running",
                "waiting, {{engine}}": "millrace:worker_num_requests_waiting",
            },
        ),
        (
            "Tokens computed, prompt and output, by worker",
            "short",
            {"{{engine}}": rate("engine_tokens_total", "engine")},
        ),
        (
            "Time of a step, mean, by worker",
            "s",
            {"{{engine}}": f"{rate('engine_step_seconds_total', 'engine')} / {rate('engine_steps_total', 'engine')}"},
        ),
        ("Share of time in steps with prompt tokens", "percentunit", {"{{engine}}": "millrace:worker_prompt_share"}),
        (
            "Out of service: draining, slow, stalled, breaker",
            "short",
            {
                "draining, {{engine}}": "millrace:worker_draining == 1",
                "slow, {{engine}}": "millrace:worker_slow == 1",
                "seconds in a step, {{engine}}": "millrace:worker_stalled_seconds > 5",
                "breaker, {{engine}}": "millrace:worker_breaker > 0",
            },
        ),
        (
            "Generations: shares of new requests, ready workers",
            "short",
            {
                "share, {{generation}}": "max by (generation) (millrace:generation_share)",
                "{{role}}, {{generation}}": "max by (generation, role) (millrace:generation_workers)",
                "mixed pairs": "sum(millrace:mixed_pairs_total)",
            },
        ),
        (
            "Faults",
            "short",
            {
                "placed again, {{reason}}": rate("replacements_total", "reason"),
                "KV refused, {{reason}}": rate("kv_chunks_refused_total", "reason"),
                "past their deadlines": rate("deadlines_exceeded_total"),
                "leaked leases": "sum(millrace:leaked_leases)",
                "leaked blocks": "sum(millrace:leaked_blocks)",
            },
        ),
    ),
    "KV and its transfers": (
        ("KV cache in use, by worker", "percentunit", {"{{engine}}": "millrace:worker_kv_cache_usage_perc"}),
        (
            "KV taken in by decode workers, by transport",
            "Bps",
            {"{{transport}}, {{engine}}": rate("kv_received_bytes_total", "transport, engine")},
        ),
        ("Handoffs, by transport", "ops", {"{{transport}}": rate("kv_handoffs_total", "transport")}),
        (
            "Prompt tokens by where their KV came from",
            "short",
            {"{{source}}": rate("prompt_tokens_by_source_total", "source")},
        ),
        (
            "Want of KV: preempted, leases refused",
            "ops",
            {
                "preempted, {{engine}}": rate("worker_num_preemptions_total", "engine"),
                "leases refused, {{reason}}": rate("leases_refused_total", "reason"),
            },
        ),
        (
            "KV between device and host memory",
            "Bps",
            {"out": rate("host_kv_bytes_out_total"), "in": rate("host_kv_bytes_in_total")},
        ),
        (
            "KV pool: blocks found and stored",
            "ops",
            {
                "looked up": rate("pool_lookups_total"),
                "found": rate("pool_found_total"),
                "stored": rate("pool_stored_total"),
                "refused": rate("pool_refused_total"),
            },
        ),
        (
            "KV pool: share of a tier in use",
            "percentunit",
            {"{{tier}}, {{node}}": "millrace:pool_bytes / (millrace:pool_capacity_bytes > 0)"},
        ),
        (
            "KV pool: bytes read and written, by tier",
            "Bps",
            {
                "read, {{tier}}": rate("pool_bytes_read_total", "tier"),
                "written, {{tier}}": rate("pool_bytes_written_total", "tier"),
            },
        ),
    ),
}
PANELS: tuple[Panel, ...] = tuple(panel for section in SECTIONS.values() for panel in section)


def row(title: str, y: int) -> dict[str, Any]:
    return {"type": "row", "title": title, "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}, "collapsed": False}


def panel(x: int, y: int, title: str, unit: str, queries: dict[str, str]) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + at), "datasource": SOURCE, "expr": expression, "legendFormat": legend}
        for at, (legend, expression) in enumerate(queries.items())
    ]
    return {
        "type": "timeseries",
        "title": title,
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": targets,
    }


def placed() -> list[dict[str, Any]]:
    """Each section below the last, its panels from left to right."""
    made: list[dict[str, Any]] = []
    y = 0
    for title, panels in SECTIONS.items():
        made.append(row(title, y))
        for number, given in enumerate(panels):
            down, across = divmod(number, ACROSS)
            made.append(panel(across * WIDTH, y + 1 + down * HEIGHT, *given))
        y += 1 + -(-len(panels) // ACROSS) * HEIGHT
    return [{"id": number + 1, **one} for number, one in enumerate(made)]


def dashboard() -> str:
    """The file's text."""
    made = {
        "uid": "millrace",
        "title": "millrace",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "panels": placed(),
    }
    return json.dumps(made, indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(dashboard())
    print(FILE)
