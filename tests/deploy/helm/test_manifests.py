"""The chart's manifests for each set of values: valid to Kubernetes, and one with another."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import kubernetes_validate

from kvcache.pool.store import FLUSH_SECONDS
from tests.deploy.helm.chart import KUBERNETES, NAMESPACE, Manifest
from tests.deploy.helm.manifests import (
    component,
    container_of,
    holds_experts,
    named,
    of_kind,
    pod_of,
    selected,
    selects,
    services,
    settings_of,
    workloads,
)

CUSTOM = {
    "keda.sh/v1alpha1/ScaledObject",
    "monitoring.coreos.com/v1/ServiceMonitor",
    "monitoring.coreos.com/v1/PodMonitor",
    "monitoring.coreos.com/v1/PrometheusRule",
    "gateway.networking.k8s.io/v1/HTTPRoute",
}
SUFFIX = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}


# ---- valid, each alone -----------------------------------------------------------------------------------------


def test_kubernetes_takes_every_manifest(manifests: list[Manifest]) -> None:
    for manifest in manifests:
        if f"{manifest['apiVersion']}/{manifest['kind']}" not in CUSTOM:
            kubernetes_validate.validate(manifest, KUBERNETES.rsplit(".", 1)[0], strict=True)


def test_no_two_have_one_name_and_all_names_are_labels(manifests: list[Manifest]) -> None:
    names = [(manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests]
    assert len(names) == len(set(names))
    assert all(re.fullmatch(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", name) for _, name in names)


def test_the_command_takes_its_arguments(manifests: list[Manifest]) -> None:
    for workload in services(manifests):
        words = container_of(workload)["args"]
        read = settings_of(workload)
        kinds = {"router": "router", "kvcache": "kvcache"}
        assert words[0] == kinds.get(component(workload), words[0])
        assert read.http.host == read.cluster.grpc_host == "0.0.0.0"
        if words[0] != "router":
            assert read.cluster.advertise == "$(POD_IP):8100" and read.cluster.worker_name == "$(POD_NAME)"


def test_pods_have_no_more_rights_than_they_need(manifests: list[Manifest]) -> None:
    for workload in workloads(manifests):
        pod, container = pod_of(workload), container_of(workload)
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 65532
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False and pod["enableServiceLinks"] is False
        own = container["securityContext"]
        assert own["readOnlyRootFilesystem"] and own["allowPrivilegeEscalation"] is False
        assert own["capabilities"] == {"drop": ["ALL"]}
        writable = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
        assert {"/tmp", "/cache"} <= writable


# ---- one with another ------------------------------------------------------------------------------------------


def test_workloads_select_their_own_pods_and_no_others(manifests: list[Manifest]) -> None:
    for workload in workloads(manifests):
        assert selected(manifests, workload["spec"]["selector"]) == [workload]
        assert named(manifests, "ServiceAccount", pod_of(workload)["serviceAccountName"])
        for spread in pod_of(workload)["topologySpreadConstraints"]:
            together = selected(manifests, spread["labelSelector"])
            assert workload in together
            assert [one for one in together if not holds_experts(one)] in ([workload], together[:1])
            assert len(together) == 1 or "matchLabelKeys" not in spread, "each has a template of its own"


def test_services_lead_to_ports_that_there_are(manifests: list[Manifest]) -> None:
    for service in of_kind(manifests, "Service"):
        found = selected(manifests, {"matchLabels": service["spec"]["selector"]})
        assert len(found) == 1
        ports = {port["name"] for port in container_of(found[0])["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    for stateful in of_kind(manifests, "StatefulSet"):
        assert named(manifests, "Service", stateful["spec"]["serviceName"])


def test_workers_register_with_every_router_whether_it_is_ready_or_not(manifests: list[Manifest]) -> None:
    """A router is ready only once workers have registered."""
    for workload in services(manifests):
        routers = [word for word in container_of(workload)["args"] if word.startswith("--routers=")]
        if component(workload) == "router":
            continue
        name, namespace, service, port = re.fullmatch(
            r"--routers=dns:([^.]+)\.([^.]+)\.(svc):(\d+)", routers[0]
        ).groups()
        (found,) = [one for one in of_kind(manifests, "Service") if one["metadata"]["name"] == name]
        assert (namespace, service, int(port)) == (NAMESPACE, "svc", found["spec"]["ports"][0]["port"])
        assert found["spec"]["clusterIP"] == "None" and found["spec"]["publishNotReadyAddresses"] is True
        assert [component(one) for one in selected(manifests, {"matchLabels": found["spec"]["selector"]})] == ["router"]


def test_pods_leave_after_their_drain(manifests: list[Manifest]) -> None:
    """Nobody is sent there any more; then the drain; then a little for what comes after it."""
    for workload in services(manifests):
        preparing = container_of(workload)["lifecycle"]["preStop"]["sleep"]["seconds"]
        drain = settings_of(workload).http.shutdown_timeout
        writing = FLUSH_SECONDS if component(workload) == "kvcache" else 0
        assert preparing == 5
        assert pod_of(workload)["terminationGracePeriodSeconds"] == 5 + drain + writing + 15


def test_probes_ask_doors_that_answer(manifests: list[Manifest]) -> None:
    for workload in services(manifests):
        container = container_of(workload)
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        read = settings_of(workload)
        of_router = component(workload) == "router"
        door = ("http", read.http.port) if of_router else ("status", read.cluster.metrics_port)
        asked = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")}
        assert all((one["port"], ports[one["port"]]) == door for one in asked.values())
        assert [asked[name]["path"] for name in ("readiness", "liveness")] == ["/health", "/live"]
        assert asked["startup"]["path"] == ("/live" if of_router else "/health"), "no workers must not kill a router"
        secure = of_router and read.http.ssl_certfile is not None
        assert all(one.get("scheme", "HTTP") == ("HTTPS" if secure else "HTTP") for one in asked.values())
        probe = container["startupProbe"]
        assert probe["periodSeconds"] * probe["failureThreshold"] >= 1800, "large models load for long"
        assert container["readinessProbe"]["failureThreshold"] == 1


def test_files_that_are_named_are_mounted(manifests: list[Manifest]) -> None:
    for workload in workloads(manifests):
        container = container_of(workload)
        mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
        volumes = {volume["name"] for volume in pod_of(workload)["volumes"]}
        volumes |= {claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", ())}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        paths = [word.partition("=")[2] or word for word in container["args"] if re.match(r"(--[\w-]+=)?/", word)]
        assert all(any(path == mount or path.startswith(f"{mount}/") for mount in mounts) for path in paths)


def test_the_disk_of_a_node_has_room_for_its_blocks(manifests: list[Manifest]) -> None:
    for stateful in of_kind(manifests, "StatefulSet"):
        for claim in stateful["spec"].get("volumeClaimTemplates", ()):
            size = claim["spec"]["resources"]["requests"]["storage"]
            blocks = settings_of(stateful).kvcache.disk_size
            assert int(size[:-2]) * SUFFIX[size[-2:]] > blocks


def test_every_service_has_a_budget_for_disruptions(manifests: list[Manifest]) -> None:
    budgets = of_kind(manifests, "PodDisruptionBudget")
    assert all(budget["spec"]["maxUnavailable"] == 1 for budget in budgets)
    covered = [component(one) for budget in budgets for one in selected(manifests, budget["spec"]["selector"])]
    assert sorted(covered) == sorted(map(component, workloads(manifests))), "each by one"
    assert len(budgets) == len(services(manifests)), "hosts by that of their worker"


def test_keys_come_from_secrets_alone(manifests: list[Manifest]) -> None:
    here = {one["metadata"]["name"]: set(one["stringData"]) for one in of_kind(manifests, "Secret")}
    for workload in workloads(manifests):
        env = {one["name"]: one for one in container_of(workload)["env"]}
        cluster = env["MILLRACE_CLUSTER_KEY"]["valueFrom"]["secretKeyRef"]
        assert cluster["key"] == "cluster-key"
        assert ("MILLRACE_API_KEY" in env) <= (component(workload) == "router")
        for reference in (one["valueFrom"].get("secretKeyRef") for one in env.values() if "valueFrom" in one):
            if reference and here and reference["name"] in here:
                assert reference["key"] in here[reference["name"]]
    written = [value for one in of_kind(manifests, "Secret") for value in one["stringData"].values()]
    rest = json.dumps([one for one in manifests if one["kind"] != "Secret"])
    assert not any(value in rest for value in written)


def test_services_have_the_certificates_of_one_secret_or_none(manifests: list[Manifest]) -> None:
    """Those with TLS and those without do not meet."""
    read = [settings_of(workload).security for workload in workloads(manifests)]
    assert all(one == replace(read[0], insecure=one.insecure) for one in read)
    named_in = [volume for one in workloads(manifests) for volume in pod_of(one)["volumes"]]
    secrets = [volume["secret"]["secretName"] for volume in named_in if volume["name"] == "grpc-tls"]
    assert len(secrets) == len(read) * read[0].grpc_tls_asked and len(set(secrets)) <= 1
    assert not read[0].grpc_tls_asked or read[0].grpc_tls_ca == "/grpc-tls/ca.crt"


def test_the_api_is_open_only_where_no_keys_are_given(manifests: list[Manifest]) -> None:
    (router,) = [one for one in workloads(manifests) if component(one) == "router"]
    read, env = settings_of(router), [one["name"] for one in container_of(router)["env"]]
    keyed = "MILLRACE_API_KEY" in env or read.service.api_keys_file is not None
    assert read.security.insecure != keyed
    assert (read.service.api_keys_file is None) == (read.service.key_pepper_file is None)


def test_what_scales_has_no_fixed_number_and_is_there(manifests: list[Manifest]) -> None:
    scaled = set()
    for scaler in of_kind(manifests, "HorizontalPodAutoscaler", "ScaledObject"):
        target = scaler["spec"]["scaleTargetRef"]
        assert named(manifests, target["kind"], target["name"])
        scaled.add(target["name"])
    for workload in workloads(manifests):
        assert ("replicas" in workload["spec"]) != (workload["metadata"]["name"] in scaled)


def test_doors_lead_to_the_api(manifests: list[Manifest]) -> None:
    (api,) = [one for one in of_kind(manifests, "Service") if one["metadata"]["name"] == "millrace"]
    ports = {port["name"]: port["port"] for port in api["spec"]["ports"]}
    for ingress in of_kind(manifests, "Ingress"):
        backends = [path["backend"]["service"] for rule in ingress["spec"]["rules"] for path in rule["http"]["paths"]]
        assert backends and all(one["name"] == "millrace" and one["port"]["name"] in ports for one in backends)
    for route in of_kind(manifests, "HTTPRoute"):
        backends = [one for rule in route["spec"]["rules"] for one in rule["backendRefs"]]
        assert backends and all(one["name"] == "millrace" and one["port"] in ports.values() for one in backends)
    for monitor in of_kind(manifests, "ServiceMonitor"):
        found = [
            one
            for one in of_kind(manifests, "Service")
            if selects(monitor["spec"]["selector"], one["metadata"]["labels"])
        ]
        assert found == [api] and all(one["port"] in ports for one in monitor["spec"]["endpoints"])


def test_a_monitor_of_pods_finds_every_worker_and_node_and_no_router(manifests: list[Manifest]) -> None:
    for monitor in of_kind(manifests, "PodMonitor"):
        chosen, (endpoint,) = monitor["spec"]["selector"], monitor["spec"]["podMetricsEndpoints"]
        for workload in workloads(manifests):
            found = selects(chosen, workload["spec"]["template"]["metadata"]["labels"])
            assert found == (component(workload) != "router" and not holds_experts(workload))
            names = {port["name"] for port in container_of(workload).get("ports", ())}
            assert not found or endpoint["port"] in names
        (kept,) = endpoint["metricRelabelings"]
        for prefix in ("millrace", "vllm", "Team_2"):  # as --metrics-prefix may say
            assert re.fullmatch(kept["regex"], f"{prefix}:certificate_expiry_seconds")


def test_a_monitor_verifies_the_certificate_of_the_api(manifests: list[Manifest]) -> None:
    """Before: it asked for none of it."""
    for monitor in of_kind(manifests, "ServiceMonitor"):
        for endpoint in monitor["spec"]["endpoints"]:
            assert (endpoint.get("scheme") == "https") == ("tlsConfig" in endpoint)
            asked = endpoint.get("tlsConfig", {"serverName": ""})
            assert "serverName" in asked and "insecureSkipVerify" not in asked
