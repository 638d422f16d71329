"""`millrace deploy render helm`: values that the chart takes, and with which it starts what the plan says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given, settings

from deploy.cli import main
from deploy.placement.helm import render
from deploy.placement.image import ImageSource
from deploy.placement.plan import flags_of
from deploy.placement.reader import read_placement
from deploy.runtime.settings import read_settings
from scripts.chart_schema import schema
from tests.deploy.helm.chart import HERE, values
from tests.deploy.helm.manifests import PARSER, component, container_of, golden, settings_of, workloads
from tests.deploy.placement.test_reader import placements

WORKERS = "[[workers]]\nrole = 'mixed'\n"
SPREAD = "data_parallel_size = 4\ndata_parallel_size_local = 2\nenable_expert_parallel = true\n"
IMAGE = ImageSource(name="registry.example.com:5000/millrace:1.0")
PLACEMENT = HERE / "placement.toml"


def rendered(text: str, image: ImageSource = IMAGE) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(render(read_placement(text), image))
    return found


def test_the_values_kept_here_are_what_the_placement_renders_to(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deploy", "render", "helm", str(PLACEMENT), "--image", IMAGE.name]) == 0
    told = f"run `millrace deploy render helm {PLACEMENT.name} --image {IMAGE.name}`"
    assert capsys.readouterr().out == (HERE / "values/placement.yaml").read_text(), told


@pytest.mark.parametrize("ranks", [1, 4])
def test_each_rank_of_a_worker_has_a_gpu(ranks: int) -> None:
    group = f"role = 'mixed'\ndevice = 'cuda'\ntensor_parallel_size = {ranks}\n"
    [worker] = rendered(f"model = 'meta/llama'\n[[workers]]\n{group}")["workers"]
    assert worker["resources"] == {"limits": {"nvidia.com/gpu": ranks}}


@pytest.mark.parametrize(("local", "hosts"), [("", None), ("4", None), ("2", 2), ("1", 4)])
def test_pods_share_the_ranks_of_a_worker_that_is_on_several_hosts(local: str, hosts: int | None) -> None:
    text = "role = 'mixed'\ndata_parallel_size = 4\nenable_expert_parallel = true\ndata_parallel_rpc_port = 7\n"
    text += f"data_parallel_size_local = {local}\n" if local else ""
    found = rendered(f"[[workers]]\n{text}")
    jsonschema.validate(values(found), schema())
    [worker] = found["workers"]
    assert worker.get("hosts") == hosts
    assert worker["settings"] == {"data_parallel_size": 4, "enable_expert_parallel": True}


@settings(max_examples=10, deadline=None)
@given(placements())
def test_the_chart_takes_the_values_of_every_placement(placed: tuple[dict[str, Any], str]) -> None:
    found = rendered(placed[1])
    jsonschema.validate(values(found), schema())
    assert [(one["name"], one["replicas"]) for one in found["workers"]] == [
        (one.get("name", one["role"]), one.get("count", 1)) for one in placed[0]["workers"]
    ]


def test_the_chart_starts_what_the_placement_says() -> None:
    """The manifests that these values render to, read by the command's own parser."""
    plan, manifests = read_placement(PLACEMENT.read_text()), workloads(golden("placement"))
    found = {component(one): one for one in manifests}
    assert set(found) == {group.name for group in plan.groups}
    for group in plan.groups:
        own = {name: value for name, value in group.settings.items() if name not in ("host", "port", "disk")}
        model = [] if group.kind == "kvcache" else ["/models/llama-3-8b"]
        wanted = read_settings(vars(PARSER.parse_args([group.kind, *model, *flags_of(own)])))
        read = settings_of(found[group.name])
        assert (read.engine, read.model_config, read.pool) == (wanted.engine, wanted.model_config, wanted.pool)
        assert (read.model, read.placement, read.service) == (wanted.model, wanted.placement, wanted.service)
        assert read.http.shutdown_timeout == 45 and found[group.name]["spec"]["replicas"] == group.count
        assert read.security == wanted.security and read.security.grpc_tls_server_name == "workers"
        assert read.http.ssl_certfile == wanted.http.ssl_certfile
    assert container_of(found["prefill"])["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert "nvidia.com/gpu" not in container_of(found["decode-long"])["resources"]["limits"]
    assert container_of(found["decode-long"])["resources"]["limits"]["memory"] == "16Gi", "the chart's own"


@pytest.mark.parametrize(
    ("name", "image"),
    [
        ("millrace:cpu", {"repository": "millrace", "tag": "cpu"}),
        ("a.example:81/b@sha256:00", {"repository": "a.example:81/b", "digest": "sha256:00"}),
    ],
)
def test_an_image_has_a_tag_or_a_digest(name: str, image: dict[str, str]) -> None:
    assert rendered(WORKERS, ImageSource(name=name))["image"] == image


def test_files_of_the_router_are_in_secrets() -> None:
    text = "[router]\nssl_certfile = 'a'\nssl_ca_certs = 'b'\nssl_cert_reqs = '1'\napi_keys_file = 'c'\n" + WORKERS
    found = rendered(text)
    assert found["keys"] == {"file": {"existingSecret": "millrace-api-keys"}}
    assert found["router"]["settings"] == {"ssl_ca_certs": "/tls/ca.crt", "ssl_cert_reqs": "1"}


def test_a_model_of_the_hub_needs_no_claim() -> None:
    assert rendered("model = 'owner/name'\n" + WORKERS)["model"] == {"name": "owner/name"}
    assert rendered(WORKERS)["model"] == {"name": ""}


@pytest.mark.parametrize(
    ("text", "image", "told"),
    [
        ("model = './llama'\n" + WORKERS, "a:1", "whole path"),
        ("model = '/llama'\n" + WORKERS, "a:1", "folder above"),
        ("[router]\nport = 0\n" + WORKERS, "a:1", "name one"),
        ("[common]\nshutdown_timeout = inf\n" + WORKERS, "a:1", "number of seconds"),
        ("[router]\ngrpc_tls_ca = 'a'\n" + WORKERS, "a:1", "under .common"),
        (WORKERS + "name = 'mixed-of-a-very-long-name'\n", "a:1", "at most 20"),
        (WORKERS, "a.example:81/b", "neither a tag nor a digest"),
        (f"{WORKERS}name = '{'m' * 14}'\n{SPREAD}", "a:1", "letters; use at most 13"),
        (f"{WORKERS}name = '{'m' * 13}'\n{SPREAD.replace('= 4', '= 22')}", "a:1", "-host-10, .* use at most 12"),
        (WORKERS + "data_parallel_size = 4\ndata_parallel_size_local = 3\n", "a:1", "share 4 ranks evenly"),
    ],
)
def test_what_the_chart_cannot_have_is_told(text: str, image: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        rendered(text, ImageSource(name=image))


def test_a_cluster_builds_no_image(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "placement.toml").write_text(WORKERS)
    path = str(tmp_path / "placement.toml")
    assert main(["deploy", "render", "helm", path, "--build-context", "."]) == 2
    assert "registries" in capsys.readouterr().err
