"""The chart as it is rendered: what is kept in golden/ is that, and values that it cannot have are refused.

Where nothing renders (neither helm nor Go with sprig), the other tests look at what is kept alone.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import jsonschema
import pytest

from scripts import chart_schema
from scripts.kube_pods import expanded
from tests.deploy.helm import chart
from tests.deploy.helm.chart import Manifest
from tests.deploy.helm.manifests import RENDERS, SETS, component, container_of, given, golden, workloads
from tests.deploy.helm.test_manifests import test_no_two_have_one_name_and_all_names_are_labels as names_are_labels
from tests.deploy.helm.test_manifests import test_pods_leave_after_their_drain as leaves_after_its_drain

SPREAD = {"data_parallel_size": 4, "enable_expert_parallel": True}


def spread(**changed: object) -> Manifest:
    """A group of a worker with two ranks on each of two hosts."""
    return {"name": "moe", "role": "mixed", "hosts": 2, "settings": SPREAD} | changed


@RENDERS
@pytest.mark.parametrize("name", SETS)
def test_what_is_kept_is_what_the_templates_render(name: str) -> None:
    told = "run `python -m tests.deploy.helm.write_golden`"
    assert chart.render(given(name))[0] == golden(name), told


@pytest.mark.parametrize("name", SETS)
def test_the_schema_takes_the_values(name: str) -> None:
    jsonschema.validate(chart.values(given(name)), chart_schema.schema())


def test_the_schema_kept_here_is_what_its_script_writes() -> None:
    assert chart_schema.FILE.read_text() == chart_schema.text(), "run `python -m scripts.chart_schema`"
    jsonschema.Draft7Validator.check_schema(chart_schema.schema())


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"workers": []}, "non-empty|too short"),
        ({"workers": [{"name": "a", "role": "both"}]}, "'both' is not one of"),
        ({"workers": [{"name": "kvcache-a", "role": "mixed"}]}, "should not be valid"),
        ({"router": {"settings": {"grpc_port": 1}}}, "grpc_port"),
        ({"router": {"settings": {"kv_cache_memory": 1}}}, "kv_cache_memory"),
        ({"kvcache": {"settings": {"shutdown_timeout": "inf"}}}, "not of type 'number'"),
        ({"keys": {"apikey": "a"}}, "apikey"),
        ({"grpcTls": None}, "'grpcTls' is a required"),
        ({"keys": {"file": None}}, "'file' is a required"),
        ({"router": {"settings": None}}, "'settings' is a required"),
        ({"workers": None}, "'workers' is a required"),
        ({"router": {"replicas": 1_000_000}}, "greater than the maximum"),
        ({"router": {"service": {"port": 65536}}}, "greater than the maximum"),
        ({"router": {"settings": {"shutdown_timeout": 1e19}}}, "greater than the maximum"),
        ({"workerDefaults": {"settings": {"grpc_tls_ca": "/a"}}}, "grpc_tls_ca"),
        ({"lifecycle": {"preStopSeconds": 0}}, "less than the minimum"),
        ({"generations": {"much-too-long": {}}}, "does not match"),
        ({"generations": {"b": {"tag": "next"}}}, "'tag'"),
        ({"generations": {"b": {"workers": {"decode": {"role": "mixed"}}}}}, "'role'"),
    ],
)
def test_the_schema_refuses(changed: Manifest, told: str) -> None:
    with pytest.raises(jsonschema.ValidationError, match=told):
        jsonschema.validate(chart.values(changed), chart_schema.schema())


@RENDERS
@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"workers": [{"name": "wide", "role": "mixed", "hosts": 2}]}, "a multiple of hosts"),
        ({"workers": [spread(settings={"data_parallel_size": 4})]}, "enable_expert_parallel: true"),
        ({"workers": [spread(settings=SPREAD | {"enable_expert_parallel": "false"})]}, "enable_expert_parallel: true"),
        ({"workers": [spread(settings=SPREAD | {"enable_expert_parallel": "true"})]}, "enable_expert_parallel: true"),
        ({"workers": [spread(settings=SPREAD | {"enable_eplb": True})]}, "nor enable_eplb"),
        ({"workers": [spread(settings=SPREAD | {"device": "cuda"})]}, "another device"),
        ({"workers": [spread()], "generations": {"base": {"settings": {"device": "cuda:0"}}}}, "another device"),
        ({"workers": [spread(hosts=3)]}, "a multiple of hosts"),
        ({"workers": [spread(replicas=2)]}, "groups of their own"),
        ({"workers": [spread(autoscaling={"enabled": True})]}, "groups of their own"),
        ({"workers": [spread()], "autoscaler": {"enabled": True, "settings": {"prefill": "1:2"}}}, "of their own"),
        ({"workers": [spread(name="of-fourteen-ab")]}, "20 letters"),
        ({"workers": [spread(), {"name": "moe-host-1", "role": "mixed"}]}, "something else"),
        ({"workers": [{"name": "moe-host-1", "role": "mixed"}, spread()]}, "something else"),
        ({"router": {"settings": {"ssl_cert_reqs": "2"}}}, "kubelet"),
        ({"keys": {"cluster": "a"}}, "cluster without api"),
        ({"ingress": {"enabled": True}}, "hosts: "),
        ({"gateway": {"enabled": True}}, "parentRefs: "),
        ({"workers": [{"name": "a", "role": "prefill"}, {"name": "a", "role": "decode"}]}, "something else"),
        ({"keys": {"file": {"existingSecret": "a"}}, "router": {"settings": {"api_keys_file": "/a"}}}, "leave out one"),
        ({"workers": [{"name": "p", "role": "prefill", "autoscaling": {"enabled": True}}]}, "tokensPerSecond"),
        ({"generations": {"base": {"enabled": False}}}, "none is left"),
        ({"generations": {"b": {}}, "workers": [{"name": "of-nineteen-letters", "role": "mixed"}]}, "20 letters"),
        ({"generations": {"b": {}}, "workers": [{"name": n, "role": "mixed"} for n in ("a", "a-b")]}, "something else"),
    ],
)
def test_the_templates_refuse(changed: Manifest, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        chart.render(changed)


@RENDERS
@pytest.mark.parametrize(("version", "form"), [("1.29.4", "exec"), ("1.30.0", "sleep"), ("1.34.1-gke.1", "sleep")])
def test_pods_stay_for_a_while_in_the_form_that_the_cluster_knows(version: str, form: str) -> None:
    for workload in workloads(chart.render(given("pool"), kubernetes=version)[0]):
        assert list(container_of(workload)["lifecycle"]["preStop"]) == [form]


@RENDERS
def test_settings_are_flags_as_the_command_reads_them() -> None:
    settings = {
        "kv_cache_memory": 17179869184,
        "heartbeat_interval": 0.25,
        "deterministic": True,
        "cuda_graphs": False,
        "served_model_name": ["a", "b"],
        "chat": None,
        "profile": "$(POD_IP) 'x'",
    }
    changed = {"workers": [{"name": "mixed", "role": "mixed", "settings": settings}]}
    (workload,) = [one for one in workloads(chart.render(changed)[0]) if component(one) == "mixed"]
    words = container_of(workload)["args"]
    assert words[-6:] == [
        "--no-cuda-graphs",
        "--deterministic",
        "--heartbeat-interval=0.25",
        "--kv-cache-memory=17179869184",
        "--profile=$$(POD_IP) 'x'",
        "--served-model-name=a,b",
    ]


@RENDERS
def test_texts_reach_the_command_as_they_were_written() -> None:
    """Through YAML and the kubelet, which makes one dollar of two and puts in what `$(NAME)` stands for."""
    texts = ["on", "0x10", "1e3", "null", "a: b # c", "{{ .x }}", "$(POD_IP)", "a$$b", "5$", "\"'\\", "*x", "ü\n", "%"]
    settings = {"served_model_name": texts, "profile": texts[7]}
    changed = {"model": {"name": f"/{texts[6]}"}, "workers": [{"name": "a", "role": "mixed", "settings": settings}]}
    (workload,) = [one for one in workloads(chart.render(changed)[0]) if component(one) == "a"]
    words = [expanded(word, {"POD_IP": "10.0.0.1"}) for word in container_of(workload)["args"]]
    assert words[1] == "/$(POD_IP)"
    assert words[-2:] == ["--profile=a$$b", f"--served-model-name={','.join(texts)}"]


@RENDERS
@pytest.mark.parametrize("release", ["team.chat", "a-release-of-a-name.that-is-too-long"])
def test_a_release_may_have_any_name_that_helm_takes(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of Services have no dots; those of pods have at most 63 letters."""
    monkeypatch.setattr(chart, "RELEASE", release)
    manifests = chart.render({**given("pool"), "workers": [{"name": "a" * 20, "role": "mixed"}]})[0]
    names_are_labels(manifests)
    assert max(len(one["metadata"]["name"]) for one in workloads(manifests)) + len("-5d8f9c7b4d-x2x4z") <= 63


def without(text: str, begin: str, end: str) -> str:
    """A template less what is from `begin` up to `end`."""
    head, mark, rest = text.partition(begin)
    assert mark
    return head + end + rest.partition(end)[2]


@RENDERS
def test_a_chart_without_prestop_would_be_noticed(tmp_path: Path) -> None:
    """The tests above look at what is kept, which is held to what is rendered."""
    changed = tmp_path / chart.CHART.name
    shutil.copytree(chart.CHART, changed)
    partial = changed / "templates/_pod.tpl"
    partial.write_text(
        without(partial.read_text(), "{{- if not .holds }}\nlifecycle:\n", "resources:\n  {{- toYaml .own")
    )
    rendered = chart.render({}, changed)[0]
    assert rendered != golden("default")
    with pytest.raises(KeyError, match="lifecycle"):
        leaves_after_its_drain(rendered)
