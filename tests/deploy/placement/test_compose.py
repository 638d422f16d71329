"""`millrace deploy render compose`: a Compose file that starts what the plan says, and the one that is kept here."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings

from deploy.cli import main, make_parser
from deploy.image import health
from deploy.placement.compose import render
from deploy.placement.image import CONTAINERFILE, ImageSource
from deploy.placement.plan import DeploymentPlan
from deploy.placement.reader import read_placement
from deploy.runtime.settings import read_settings
from tests.deploy.placement.test_reader import placements

REPOSITORY = Path(__file__).resolve().parents[3]
COMPOSE = REPOSITORY / "deploy/compose"
PARSER = make_parser()
WORKERS = "[[workers]]\nrole = 'mixed'\n"
HOSTED = WORKERS + "data_parallel_size = 4\ndata_parallel_size_local = 2\nenable_expert_parallel = true\n"


def rendered(text: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(render(read_placement(text), ImageSource(name="image")))
    return found


def test_the_file_kept_here_is_what_the_placement_renders_to(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deploy", "render", "compose", str(COMPOSE / "placement.toml"), "--build-context", "../.."]) == 0
    told = "run `millrace deploy render compose deploy/compose/placement.toml --build-context ../..`"
    assert capsys.readouterr().out == (COMPOSE / "compose.yaml").read_text(), told
    assert (COMPOSE / "../.." / CONTAINERFILE).is_file()


@settings(max_examples=10)
@given(placements())
def test_every_service_is_given_what_its_command_takes(placed: tuple[dict[str, Any], str]) -> None:
    """The command's own parser reads it, and what comes out is what the plan says."""
    plan = read_placement(placed[1])
    services = yaml.safe_load(render(plan, ImageSource(name="image")))["services"]
    for name, service in services.items():
        words = [word.replace("$$", "$") for word in service["command"]]
        read = read_settings(vars(PARSER.parse_args(words)))
        assert words[0] == ("router" if name == "router" else kind_of(plan, name))
        assert read.model == (None if words[0] == "kvcache" else plan.model)
        assert words[0] == "router" or read.cluster.routers == "router:8100"
    assert set(services) == {"router", *(group.name for group in plan.workers), *node_names(plan)}


def kind_of(plan: DeploymentPlan, name: str) -> str:
    return next((group.kind for group in plan.workers if group.name == name), "kvcache")


def node_names(plan: DeploymentPlan) -> list[str]:
    if plan.nodes is None:
        return []
    return ["kvcache"] if plan.nodes.count == 1 else [f"kvcache-{number}" for number in range(plan.nodes.count)]


def test_no_service_may_more_than_it_needs_and_only_the_api_is_reached_from_outside() -> None:
    services = rendered(WORKERS + "[kvcache]\ncount = 2\n")["services"]
    assert list(services) == ["router", "kvcache-0", "kvcache-1", "mixed"]
    for name, service in services.items():
        assert service["read_only"] and service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"] and "privileged" not in service
        assert ("ports" in service) == (name == "router")
    assert services["router"]["ports"] == ["${MILLRACE_PUBLISH:-127.0.0.1:8000}:8000"]


def test_keys_are_passed_on_and_never_written() -> None:
    services = rendered(WORKERS)["services"]
    assert all("MILLRACE_CLUSTER_KEY" in service["environment"] for service in services.values())
    assert "MILLRACE_API_KEY" in services["router"]["environment"]
    assert "MILLRACE_API_KEY" not in services["mixed"]["environment"]


def test_without_keys_services_start_where_only_loopback_and_each_other_reach_them() -> None:
    by_default = "MILLRACE_INSECURE=${MILLRACE_INSECURE:-1}"
    services = rendered(WORKERS + "[kvcache]\n")["services"]
    assert all(by_default in service["environment"] for service in services.values())
    published = rendered("[router]\nhost = '0.0.0.0'\n" + WORKERS)["services"]
    assert by_default not in published["router"]["environment"] and by_default in published["mixed"]["environment"]
    not_by_default = "MILLRACE_INSECURE=${MILLRACE_INSECURE:-0}"
    assert not_by_default in published["router"]["environment"]
    encrypted = rendered("[common]\ngrpc_tls_certfile = '/tls/tls.crt'\ngrpc_tls_ca = '/tls/ca.crt'\n" + WORKERS)
    for service in encrypted["services"].values():
        assert not_by_default in service["environment"] and "--grpc-tls-ca=/tls/ca.crt" in service["command"]


def test_hosts_of_a_workers_ranks_reach_it_where_it_is_published() -> None:
    """On this machine by default; elsewhere, it does not start without a key."""
    service = rendered(HOSTED)["services"]["mixed"]
    assert (
        service["ports"] == ["127.0.0.1:29550:29550"]
        and "MILLRACE_INSECURE=${MILLRACE_INSECURE:-1}" in (service["environment"])
    )
    told = "data_parallel_address = '10.0.0.1'\ndata_parallel_rpc_port = 29551\n"
    service = rendered(HOSTED + told)["services"]["mixed"]
    assert service["ports"] == ["10.0.0.1:29551:29551"]
    assert "MILLRACE_INSECURE=${MILLRACE_INSECURE:-0}" in service["environment"]
    read = read_settings(vars(PARSER.parse_args(service["command"])))
    assert (read.hosts.data_parallel_address, read.hosts.data_parallel_rpc_port) == ("0.0.0.0", 29551)
    assert read.hosts.local(read.model_config.data_parallel_size) == 2


def test_a_container_has_as_long_as_its_drain_and_more() -> None:
    services = rendered("[common]\nshutdown_timeout = 7\n" + WORKERS + "shutdown_timeout = 90\n")["services"]
    assert [services[name]["stop_grace_period"] for name in ("router", "mixed")] == ["27s", "110s"]


def test_compose_puts_no_variable_in_place_of_what_was_written() -> None:
    kvcache = "[kvcache]\ndisk = '/disk/$A'\n"
    services = rendered("model = '/models/$A'\n[router]\nchat_template = 'a ${HOME}'\n" + WORKERS + kvcache)["services"]
    assert services["router"]["command"][-1] == "--chat-template=a $${HOME}"
    assert services["mixed"]["volumes"] == ["/models/$$A:/models/$$A:ro"]
    assert services["kvcache"]["volumes"] == ["/disk/$$A/kvcache:/var/lib/millrace"]


def test_workers_are_replicas_and_nodes_keep_their_disks() -> None:
    made = rendered(WORKERS + "count = 3\n[kvcache]\ncount = 2\ndisk = 'kv'\n")
    assert made["services"]["mixed"]["deploy"] == {"replicas": 3}
    assert [made["services"][f"kvcache-{n}"]["volumes"] for n in (0, 1)] == [
        ["kv-kvcache-0:/var/lib/millrace"],
        ["kv-kvcache-1:/var/lib/millrace"],
    ]
    assert made["volumes"] == {"kv-kvcache-0": {}, "kv-kvcache-1": {}}
    assert "--worker-name=kvcache-1" in made["services"]["kvcache-1"]["command"]


@pytest.mark.parametrize(
    ("model", "volumes"),
    [("/models/llama", ["/models/llama:/models/llama:ro"]), ("owner/name", ["hub:/var/lib/huggingface"])],
)
def test_a_model_is_found_in_the_containers(model: str, volumes: list[str]) -> None:
    services = rendered(f"model = '{model}'\n{WORKERS}")["services"]
    assert [services[name]["volumes"] for name in ("router", "mixed")] == [volumes, volumes]
    assert services["mixed"]["command"][:2] == ["mixed", model]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("model = './llama'\n" + WORKERS, "whole path"),
        ("model = 'models/of/mine'\n" + WORKERS, "whole path"),
        ("model = '/models/a:b'\n" + WORKERS, "colon"),
        (WORKERS + "[router]\nport = 0\n", "name one"),
        (WORKERS + "[router]\nhost = 'localhost'\n", "127.0.0.1"),
        (WORKERS + "[router]\nhost = '1}${HOME}'\n", "127.0.0.1"),
        (HOSTED + "data_parallel_address = 'leader'\n", r"mixed: data_parallel_address = 'leader'.*127\.0\.0\.1"),
        (WORKERS + "[kvcache]\ndisk = '/a:b'\n", "colon"),
        (WORKERS + "[kvcache]\ndisk = '..'\n", "a path with a slash"),
        (WORKERS + "[kvcache]\ndisk = 'a b'\n", "a path with a slash"),
        ("[common]\nshutdown_timeout = inf\n" + WORKERS, "number of seconds"),
    ],
)
def test_what_a_platform_cannot_have_is_told(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        rendered(text)


@pytest.mark.parametrize("name", ["", "a b", "a}b", "${HOME}"])
def test_what_is_no_image_is_told(name: str) -> None:
    with pytest.raises(ValueError, match="--image"):
        render(read_placement(WORKERS), ImageSource(name=name))


def test_a_model_that_is_here_is_not_looked_for_at_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "placement.toml").write_text("model = 'models/llama'\n" + WORKERS)
    assert main(["deploy", "render", "compose", "placement.toml"]) == 0
    (tmp_path / "models/llama").mkdir(parents=True)
    capsys.readouterr()
    assert main(["deploy", "render", "compose", "placement.toml"]) == 2
    assert "whole path" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[common]\nheartbeat_interval = 9\nheartbeat_timeout = 9\n" + WORKERS, "heartbeat-timeout"),
        (WORKERS + "enable_eplb = true\n", "mixed: --enable-eplb"),
        (WORKERS + "tensor_parallel_size = 2\ndeterministic = true\n", "mixed: --deterministic"),
    ],
)
def test_settings_that_do_not_go_together_are_not_rendered(
    text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Containers would be started again and again."""
    (tmp_path / "placement.toml").write_text(text)
    assert main(["deploy", "render", "compose", str(tmp_path / "placement.toml")]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("extra", ["", "ssl_certfile = '/tls/${A}.pem'\nssl_keyfile = '/tls/key.pem'\n"])
def test_the_health_check_asks_as_the_api_is_served(extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def urlopen(url: str, **_: object) -> None:
        asked.append(url)
        raise OSError

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    router = rendered(WORKERS + f"[router]\n{extra}")["services"]["router"]
    assert "MILLRACE_INSECURE=${MILLRACE_INSECURE:-1}" in router["environment"]
    own = [variable.replace("$$", "$").split("=") for variable in router["environment"] if "${MILL" not in variable]
    own = [words for words in own if len(words) == 2]
    for name, value in own:
        monkeypatch.setenv(name, value)
    assert health.main() == 1
    words = [word.replace("$$", "$") for word in router["command"]]
    read = read_settings(vars(PARSER.parse_args(words))).http
    assert read.ssl_certfile == ("/tls/${A}.pem" if extra else None)
    assert asked == [f"{'https' if extra else 'http'}://127.0.0.1:{read.port}/health"]


def test_an_address_of_the_machine_is_published_not_listened_on() -> None:
    router = rendered(WORKERS + "[router]\nhost = '::1'\nport = 81\n")["services"]["router"]
    assert router["ports"] == ["${MILLRACE_PUBLISH:-[::1]:81}:8000"]
    assert "--host=0.0.0.0" in router["command"] and not re.search("::1", " ".join(router["command"]))


KEYED = "[router]\napi_keys_file = 'keys/live.jsonl'\nkey_pepper_file = '/etc/millrace/pep$per'\n" + WORKERS


def test_keys_are_a_mounted_folder_and_the_pepper_is_a_secret() -> None:
    """A file that is mounted alone stays what it was when `millrace keys` replaces it."""
    found = rendered(KEYED)
    router, worker = found["services"]["router"], found["services"]["mixed"]
    assert found["secrets"] == {"key-pepper": {"file": "/etc/millrace/pep$$per"}}
    assert router["secrets"] == ["key-pepper"] and "./keys:/api-keys:ro" in router["volumes"]
    read = read_settings(vars(PARSER.parse_args([word.replace("$$", "$") for word in router["command"]])))
    assert read.service.api_keys_file == "/api-keys/live.jsonl"
    assert read.service.key_pepper_file == "/run/secrets/key-pepper"
    assert "secrets" not in worker and "pep" not in str(router["command"] + router["environment"]).replace("pepper", "")
    assert "secrets" not in rendered(WORKERS)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ("api_keys_file = 'keys/k'", "go together"),
        ("key_pepper_file = 'pepper'", "go together"),
        *(
            (f"api_keys_file = '{path}'\nkey_pepper_file = 'pepper'", "its folder is mounted; .* keys/k$")
            for path in ("k", "./k", "../k", "a/../../../k", "/k", "~/k", "~root/k")
        ),
        ("api_keys_file = 'a:b/k'\nkey_pepper_file = 'pepper'", "ends a path at a colon"),
    ],
)
def test_keys_that_no_container_would_see_are_refused(settings: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        rendered(f"[router]\n{settings}\n{WORKERS}")


def test_where_clients_have_to_show_a_certificate_the_health_check_asks_beside_the_api() -> None:
    """Before: it was refused, and the container of a router that served well counted as broken."""
    told = "ssl_certfile = '/tls/a'\nssl_ca_certs = '/tls/b'\nssl_cert_reqs = "
    for asked, apart in (("2", True), ("1", False)):
        router = rendered(f"[router]\n{told}'{asked}'\n{WORKERS}")["services"]["router"]
        assert ("MILLRACE_METRICS_PORT=9100" in router["environment"]) == apart
