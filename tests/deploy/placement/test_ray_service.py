"""`millrace deploy render ray`: a RayService whose pods have room for what the placement reserves."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.cli import main
from deploy.placement.image import ImageSource
from deploy.placement.ray_service import render
from deploy.placement.reader import read_placement
from tests.deploy.helm.chart import KUBERNETES

WORKERS = "[[workers]]\nrole = 'mixed'\n"
IMAGE = ImageSource(name="registry.example.com:5000/millrace:ray")
LARGE = """
model = "/models/llama"  # a comment stays
[router]
shutdown_timeout = 30
[[workers]]
role = "prefill"
count = 3
device = "cuda"
tensor_parallel_size = 2
[[workers]]
role = "decode"
threads = 2
[kvcache]
[ray]
name = "llm"
sets = 2
[ray.prefill]
cpus = 8
memory = "1GiB"
resources = { h100 = 1 }
"""


def rendered(text: str, image: ImageSource = IMAGE) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(render(read_placement(text), image))
    return found["spec"] | {"name": found["metadata"]["name"]}


def pods(spec: dict[str, Any]) -> dict[str, dict[str, Any]]:
    cluster = spec["rayClusterConfig"]
    return {"head": cluster["headGroupSpec"]} | {one["groupName"]: one for one in cluster["workerGroupSpecs"]}


def container(group: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = group["template"]["spec"]["containers"][0]
    return found


def test_what_is_packed_has_a_pod_for_each_set_of_the_largest_sets_size() -> None:
    spec = rendered(LARGE)
    assert (spec["name"], spec["rayClusterDeletionDelaySeconds"]) == ("llm", 50)
    one = pods(spec)["set"]
    assert [one[key] for key in ("replicas", "minReplicas", "maxReplicas")] == [2, 2, 2]
    assert container(one)["resources"]["limits"] == {"cpu": "19", "nvidia.com/gpu": 4}
    assert one["rayStartParams"]["num-cpus"] == "19"
    assert json.loads(one["rayStartParams"]["resources"].strip("'")) == {"h100": 2}


def test_what_is_spread_has_a_pod_for_each_service() -> None:
    groups = pods(rendered(LARGE.replace("sets = 2", "strategy = 'SPREAD'")))
    limits = {name: container(group)["resources"]["limits"] for name, group in groups.items() if name != "head"}
    gib = str(1 << 30)
    assert limits == {
        "prefill": {"cpu": "8", "nvidia.com/gpu": 2, "memory": gib},
        "decode": {"cpu": "2"},
        "kvcache": {"cpu": "1"},
    }
    assert {name: groups[name]["replicas"] for name in limits} == {"prefill": 3, "decode": 1, "kvcache": 1}


def test_the_router_is_on_the_head_where_no_worker_computes() -> None:
    spec = rendered(LARGE)
    head, application = pods(spec)["head"], yaml.safe_load(spec["serveConfigV2"])["applications"][0]
    router = application["deployments"][0]["ray_actor_options"]
    offered = json.loads(head["rayStartParams"]["resources"].strip("'"))
    assert head["rayStartParams"]["num-cpus"] == "0" and router == {"num_cpus": 0, "resources": offered}
    assert "serve" in [port["name"] for port in container(head)["ports"]]
    keyed = [name for name, group in pods(spec).items() if "MILLRACE_API_KEY" in str(container(group)["env"])]
    assert keyed == ["head"], "clients' keys are the router's"


def test_ray_adds_no_niceness_in_any_pod() -> None:
    for group in pods(rendered(LARGE)).values():
        assert {"name": "RAY_worker_niceness", "value": "0"} in container(group)["env"]


def test_ray_serve_takes_the_application() -> None:
    schema = pytest.importorskip(
        "ray.serve.schema", reason="Ray Serve is not installed: pip install 'millrace[ray-serve]'"
    )
    schema.ServeDeploySchema.model_validate(yaml.safe_load(rendered(LARGE)["serveConfigV2"]))


def test_a_model_with_a_path_is_in_a_claim_in_every_pod() -> None:
    for group in pods(rendered(LARGE)).values():
        assert container(group)["volumeMounts"] == [{"name": "models", "mountPath": "/models", "readOnly": True}]
        claimed = group["template"]["spec"]["volumes"][0]["persistentVolumeClaim"]
        assert claimed == {"claimName": "models", "readOnly": True}
    assert "volumes" not in pods(rendered(WORKERS))["head"]["template"]["spec"]


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5), st.sampled_from(("PACK", "SPREAD")), st.booleans())
def test_pods_have_room_and_kubernetes_takes_them(
    prefill: int, decode: int, sets: int, strategy: str, pool: bool
) -> None:
    text = f"""
    [[workers]]
    role = "prefill"
    count = {prefill}
    [[workers]]
    role = "decode"
    count = {decode}
    {"[kvcache]" if pool else ""}
    [ray]
    sets = {min(sets, max(prefill, decode))}
    strategy = "{strategy}"
    [ray.decode]
    cpus = 3
    """
    spec = rendered(text)
    groups = pods(spec)
    held = sum(one["replicas"] * int(one["rayStartParams"]["num-cpus"]) for one in list(groups.values())[1:])
    assert held >= prefill + 3 * decode + pool
    for name, group in groups.items():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, **group["template"]}
        kubernetes_validate.validate(pod, KUBERNETES.rsplit(".", 1)[0], strict=True)
    arguments = yaml.safe_load(spec["serveConfigV2"])["applications"][0]["args"]
    assert arguments == {"placement_toml": text}


@pytest.mark.parametrize(
    ("text", "image", "told"),
    [
        ("[router]\nssl_certfile = '/a'\n" + WORKERS, IMAGE, "end TLS at the Ingress"),
        (WORKERS + "[ray]\nsets = 2\n", IMAGE, "sets = 2: no group has so many"),
        (WORKERS + "[ray]\nname = '0a'\n", IMAGE, "a letter first, and at most 47"),
        (WORKERS + f"[ray]\nname = '{'a' * 48}'\n", IMAGE, "a letter first, and at most 47"),
        ("[router]\nshutdown_timeout = 1e10\n" + WORKERS, IMAGE, "at most 2147483647 seconds"),
        (WORKERS, ImageSource(name="a b"), "no name of an image"),
        (WORKERS, ImageSource(name="a", context="."), "--build-context"),
        ("model = './here'\n" + WORKERS, IMAGE, "whole path"),
        (WORKERS + "data_parallel_size = 2\ndata_parallel_size_local = 1\n", IMAGE, "Ray starts no hosts of ranks"),
    ],
)
def test_what_kuberay_cannot_have_is_refused(text: str, image: ImageSource, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        render(read_placement(text), image)


def test_a_resource_reaches_ray_through_the_shell_under_any_name() -> None:
    name = """it's $HOME "1" `x` """
    group = pods(rendered(WORKERS + f"[ray.mixed]\nresources = {{ {json.dumps(name)} = 1 }}\n"))["set"]
    (word,) = shlex.split(group["rayStartParams"]["resources"])
    assert json.loads(word) == {name: 1.0}


def test_the_command_names_an_image_that_has_ray(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "placement.toml"
    file.write_text(WORKERS)
    assert main(["deploy", "render", "ray", str(file)]) == 0
    assert "image: localhost/millrace:ray\n" in capsys.readouterr().out
