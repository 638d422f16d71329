"""What the chart scales by: queries over metrics that there are, which say the right thing of what a Prometheus has."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.deploy.helm.chart import NAMESPACE, Manifest
from tests.deploy.helm.manifests import golden, of_kind
from tests.house.test_documents import exported


def queries(manifests: list[Manifest]) -> dict[str, str]:
    """By component."""
    prefix = "millrace-"
    found = {
        one["metadata"]["name"].removeprefix(prefix): one["spec"]["triggers"][0]["metadata"]["query"]
        for one in of_kind(manifests, "ScaledObject")
    }
    rules = [rule for one in of_kind(manifests, "PrometheusRule") for rule in one["spec"]["groups"][0]["rules"]]
    return found | {rule["labels"]["component"]: rule["expr"] for rule in rules}


@pytest.mark.parametrize(("name", "prefix"), [("hpa", "millrace"), ("keda", "vllm")])
def test_scaling_asks_for_metrics_that_there_are(name: str, prefix: str) -> None:
    workers = {f"millrace:{metric}" for metric in ("worker_prompt_tokens_waiting", "worker_kv_cache_usage_perc")}
    found = queries(golden(name))
    assert len(found) == 3
    for query in found.values():
        asked = {f"millrace:{metric}" for metric in re.findall(rf"{prefix}:(\w+)", query)}
        assert asked and asked <= exported().keys() | workers
        assert f'namespace="{NAMESPACE}"' in query, "of this namespace alone"


def test_autoscalers_ask_for_what_the_rule_records() -> None:
    manifests = golden("hpa")
    (rule,) = of_kind(manifests, "PrometheusRule")
    recorded = [(one["record"], one["labels"]) for one in rule["spec"]["groups"][0]["rules"]]
    for scaler in of_kind(manifests, "HorizontalPodAutoscaler"):
        (metric,) = [one["external"]["metric"] for one in scaler["spec"]["metrics"]]
        assert (metric["name"], {"namespace": NAMESPACE, **metric["selector"]["matchLabels"]}) in recorded


# What a Prometheus has: two routers that tell of the same workers, other groups, another namespace, another release.
OURS = f'namespace="{NAMESPACE}",job="millrace"'
RECORDED = f'namespace="{NAMESPACE}",release="millrace"'
BURST = {
    f'millrace:router_queue_requests{{{OURS},pod="a"}}': 3,
    f'millrace:router_queue_requests{{{OURS},pod="b"}}': 4,
    'millrace:router_queue_requests{namespace="other",job="millrace"}': 100,
    f'millrace:router_queue_requests{{namespace="{NAMESPACE}",job="millrace-canary"}}': 100,
    f'millrace:router_prompt_tokens_waiting{{{OURS},pod="a"}}': 1000,
    f'millrace:router_prompt_tokens_waiting{{{OURS},pod="b"}}': 2000,
    f'millrace:worker_prompt_tokens_waiting{{{OURS},pod="a",engine="millrace-prefill-5d4f9-abcde"}}': 400,
    f'millrace:worker_prompt_tokens_waiting{{{OURS},pod="b",engine="millrace-prefill-5d4f9-abcde"}}': 500,
    f'millrace:worker_prompt_tokens_waiting{{{OURS},pod="b",engine="millrace-prefill-5d4f9-fghij"}}': 100,
    f'millrace:worker_prompt_tokens_waiting{{{OURS},pod="b",engine="millrace-prefill-long-5d4f9-fghij"}}': 7000,
    f'millrace:worker_kv_cache_usage_perc{{{OURS},pod="a",engine="millrace-decode-77b6c-abcde"}}': 0.5,
    f'millrace:worker_kv_cache_usage_perc{{{OURS},pod="b",engine="millrace-decode-77b6c-abcde"}}': 0.25,
    f'millrace:worker_kv_cache_usage_perc{{{OURS},pod="a",engine="millrace-decode-77b6c-fghij"}}': 1,
    f'millrace:worker_kv_cache_usage_perc{{{OURS},pod="a",engine="millrace-prefill-5d4f9-abcde"}}': 1,
}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool (Debian: prometheus) is here")
@pytest.mark.parametrize(
    ("series", "loads"),
    [
        ({}, {"router": 0, "prefill": 0, "decode": 0}),
        (BURST, {"router": 7, "prefill": 3600 / 33821, "decode": 1.5}),
    ],
)
def test_the_load_is_that_of_our_workers_each_counted_once(
    series: dict[str, float], loads: dict[str, float], tmp_path: Path
) -> None:
    (rule,) = of_kind(golden("hpa"), "PrometheusRule")
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rule["spec"]))
    asked = [
        {
            "expr": f'millrace_scaling_load{{component="{component}"}}',
            "eval_time": "1m",
            "exp_samples": [
                {
                    "labels": f'millrace_scaling_load{{{RECORDED},component="{component}"}}',
                    "value": load,
                }
            ],
        }
        for component, load in loads.items()
    ]
    given = [{"series": name, "values": f"{value} {value}"} for name, value in series.items()]
    one = {"interval": "1m", "input_series": given, "promql_expr_test": asked}
    (tmp_path / "test.yaml").write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "tests": [one]}))
    command = ["promtool", "test", "rules", str(tmp_path / "test.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
