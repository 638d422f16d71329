"""Writes deploy/helm/millrace/values.schema.json: what the values may be, and which settings each service reads.

    python -m scripts.chart_schema

The settings are those of the placement file (deploy.placement.plan); the rest is written here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from deploy.placement.plan import KVCACHE, LEADERS, READS, ROUTER
from serving.messages import Role

FILE = Path(__file__).resolve().parent.parent / "deploy/helm/millrace/values.schema.json"
# What the chart says itself, from other values; keys belong in a Secret.
OF_THE_CHART = {"host", "port", "disk", "ssl_certfile", "ssl_keyfile", "api_key", "cluster_key"} | {
    *LEADERS,
    *("grpc_tls_certfile", "grpc_tls_keyfile", "grpc_tls_ca", "grpc_tls_server_name"),
}
WINDOWS = ("scale_up_window", "scale_down_window")
OF_THE_AUTOSCALER = ("attainment", "scale_up", "scale_down", "cool_down", "interval", *WINDOWS)
Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
YES: Schema = {"type": "boolean"}
TABLE: Schema = {"type": "object"}
LIST: Schema = {"type": "array"}
TEXTS: Schema = {"type": "array", "items": TEXT}
MOST = 999_999  # Helm reads numbers as floats, and writes those from a million on as 1e+06, which is no whole number
SECONDS: Schema = {"type": "number", "minimum": 0, "maximum": MOST}
NUMBER: Schema = {"type": ["number", "null"], "exclusiveMinimum": 0}
SIZE: Schema = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?(k|M|G|T|Ki|Mi|Gi|Ti)?$"}
NAME: Schema = {
    "type": "string",
    "pattern": "^[a-z]([a-z0-9-]{0,18}[a-z0-9])?$",
    "not": {"pattern": "^(router|kvcache)"},
}


def whole(least: int, most: int = MOST) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most}


def one_of(*choices: str) -> Schema:
    return {"type": "string", "enum": list(choices)}


def table(required: tuple[str, ...] = (), **keys: Schema) -> Schema:
    """A table with these keys and no others. Those that templates look into cannot be taken away with null."""
    made: Schema = {"type": "object", "additionalProperties": False, "properties": keys}
    looked_into = [name for name, schema in keys.items() if "properties" in schema]
    needed = sorted({*required, *looked_into})
    return made | ({"required": needed} if needed else {})


_IMAGE: Schema = {
    "repository": TEXT,
    "tag": TEXT,
    "digest": {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
    "pullPolicy": one_of("Always", "IfNotPresent", "Never"),
    "pullSecrets": TEXTS,
}
_MODEL: Schema = {
    "name": TEXT,
    "volume": TABLE,
    "mountPath": TEXT,
    "hubVolume": TABLE,
    "tokenSecret": table(name=TEXT, key=TEXT),
}


def settings(kind: str) -> Schema:
    """What a service of this kind reads. Their values are checked when it starts."""
    value = {"type": ["string", "number", "boolean", "array", "null"]}
    known: Schema = dict.fromkeys(sorted(READS[kind] - OF_THE_CHART), value)
    return table(**known | {"shutdown_timeout": SECONDS})


def autoscaler_settings() -> Schema:
    """Flags of `millrace autoscale` that the chart does not give itself."""
    spans = {role.value: {"type": "string", "pattern": "^[0-9]*:[0-9]*$"} for role in Role}
    numbers = {name: {"type": "number", "minimum": 0} for name in OF_THE_AUTOSCALER}
    return spans | numbers | {"most_workers": whole(1), "dry_run": YES, "log_format": one_of("text", "json")}


def schema() -> Schema:
    """JSON Schema of values.yaml."""
    pod: Schema = {
        "resources": TABLE,
        "podAnnotations": TABLE,
        "podLabels": TABLE,
        "nodeSelector": TABLE,
        "tolerations": LIST,
        "affinity": TABLE,
        "priorityClassName": TEXT,
        "extraEnv": LIST,
        "extraVolumes": LIST,
        "extraVolumeMounts": LIST,
    }
    scaling = {"enabled": YES, "minReplicas": whole(1), "maxReplicas": whole(1), "target": NUMBER}
    service = table(type=one_of("ClusterIP", "NodePort", "LoadBalancer"), port=whole(1, 65535), annotations=TABLE)
    router = pod | {"settings": settings(ROUTER), "service": service, "autoscaling": table(**scaling)}
    worker = pod | {
        "replicas": whole(0),
        "hosts": whole(1),
        "settings": settings(Role.MIXED.value),
        "shmSize": SIZE,
        "runtimeClassName": TEXT,
        "autoscaling": table(**scaling, tokensPerSecond=NUMBER),
    }
    disk = table(enabled=YES, size=SIZE, storageClassName=TEXT, accessMode=TEXT)
    node = pod | {"replicas": whole(0), "settings": settings(KVCACHE), "disk": disk}
    named = worker | {"name": NAME, "role": one_of(*(role.value for role in Role))}
    group = table(**named) | {"required": ["name", "role"]}  # the rest may come from workerDefaults
    changes = _all_optional(table(**worker))
    generation = table(
        enabled=YES,
        image=table(**_IMAGE),
        model=table(**_MODEL),
        settings=settings(Role.MIXED.value),
        workers={"type": "object", "propertyNames": NAME, "additionalProperties": changes},
    )
    made = table(
        ("workers", "generations", "podDisruptionBudgets"),
        **_whole_chart(),
        router=table(replicas=whole(1), **router),
        workerDefaults=table(**worker),
        workers={"type": "array", "minItems": 1, "items": group},
        generations={
            "type": "object",
            "propertyNames": {"pattern": "^[a-z0-9]{1,8}$"},
            "additionalProperties": _all_optional(generation),
        },
        kvcache=table(**node),
        autoscaler=table(**pod, enabled=YES, settings=table(**autoscaler_settings())),
    )
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Values of the millrace chart", **made}


def _all_optional(made: Schema) -> Schema:
    """The table, of which any part may be left out: what it changes is whole elsewhere."""
    parts = {name: _all_optional(part) if "properties" in part else part for name, part in made["properties"].items()}
    return {key: value for key, value in made.items() if key != "required"} | {"properties": parts}


def _whole_chart() -> Schema:
    """What is said once for all services."""
    step = table(pods=whole(1), seconds=whole(1))
    checked = table(caSecret=table(name=TEXT, key=TEXT), serverName=TEXT, insecureSkipVerify=YES)
    service_monitor = table(enabled=YES, interval=TEXT, labels=TABLE, tls=checked)
    pod_monitor = table(enabled=YES, interval=TEXT, labels=TABLE, keep=TEXT)
    existing = {"type": "string", "minLength": 1}
    return {
        "global": TABLE,
        "image": table(**_IMAGE),
        "model": table(**_MODEL),
        "keys": table(
            existingSecret=existing, cluster=TEXT, api=TEXT, apiRequired=YES, file=table(existingSecret=TEXT)
        ),
        "tls": table(secretName=TEXT),
        "grpcTls": table(secretName=TEXT, serverName=TEXT),
        "lifecycle": table(preStopSeconds=whole(1), preStopForm=one_of("auto", "sleep", "exec"), afterSeconds=whole(5)),
        "startup": table(periodSeconds=whole(1), failureThreshold=whole(1)),
        "topologySpread": table(
            enabled=YES, topologyKey=TEXT, whenUnsatisfiable=one_of("ScheduleAnyway", "DoNotSchedule")
        ),
        "podDisruptionBudgets": YES,
        "autoscaling": table(engine=one_of("keda", "hpa"), prometheusAddress=TEXT, up=step, down=step),
        "networkPolicy": table(enabled=YES, clients=LIST, monitoring=LIST, extraEgress=LIST),
        "monitoring": table(serviceMonitor=service_monitor, podMonitor=pod_monitor),
        "ingress": table(enabled=YES, className=TEXT, annotations=TABLE, hosts=TEXTS, tlsSecretName=TEXT),
        "gateway": table(enabled=YES, parentRefs=LIST, hostnames=TEXTS),
        "serviceAccount": table(annotations=TABLE),
    }


def text() -> str:
    return json.dumps(schema(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
    print(FILE)
