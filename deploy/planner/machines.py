"""The models and machines that a plan is for: sizes, memory, links, and the profile of a worker of each shape.

Pure. Step times are DistServe's tables where a model has some (docs/simulator.md), and the simulator's roofline of the
machine's figures otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePath

from deploy.planner.placements import InstanceShape
from deploy.simulator.hardware import USABLE_MEMORY, Hardware, ModelShape, roofline_profile
from deploy.simulator.profiles import PROFILES, Linear, PhaseTables, Profile

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Machines:
    """`nodes` of `devices_per_node` devices. Bytes, FLOP/s; cost of a device-hour.

    `link` and `network` are bytes/s into and out of one device, to others of its node and of other nodes. A worker has
    those of all its devices.
    """

    name: str = "a100-80g"
    nodes: int = 1
    devices_per_node: int = 8
    memory: float = 80 * GIB
    flops: float = 312e12
    memory_bandwidth: float = 2.039e12
    link: float = 300e9
    network: float = 25e9 / 8
    cost: float = 2.5

    def __post_init__(self) -> None:
        for name in ("nodes", "devices_per_node", "memory", "flops", "memory_bandwidth", "link", "network", "cost"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name.replace('_', ' ')} of the machines must be above 0")

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node

    @property
    def speeds(self) -> tuple[float, float, float]:
        """What steps depend on: FLOP/s, and bytes/s of memory and of the link inside a node."""
        return self.flops, self.memory_bandwidth, self.link


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedModel:
    """`weights` and `kv_bytes` (of a token) in bytes. `measured` are profiles by tensor parallel size, on A100s; where
    there are none, and on other machines, workers of every size have a roofline.

    `room`: tokens of KV of the one worker that was profiled, on machines like its own; 0: none was.
    """

    name: str
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    weights: float
    kv_bytes: int
    max_model_len: int = 2048
    bytes_per_weight: float = 2.0
    measured: Mapping[int, Profile] = field(default_factory=dict)
    room: int = 0

    def __post_init__(self) -> None:
        for name in (
            "layers",
            "heads",
            "kv_heads",
            "hidden",
            "weights",
            "kv_bytes",
            "max_model_len",
            "bytes_per_weight",
        ):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name.replace('_', ' ')} of the model must be above 0")

    def kv_tokens(self, machines: Machines, shape: InstanceShape) -> int:
        """Tokens of KV beside the weights on a worker's devices; none or less where the weights do not fit."""
        if self.room:
            return self.room * shape.devices
        free = USABLE_MEMORY * machines.memory * shape.devices - self.weights
        return int(free // self.kv_bytes)

    def tables(self, machines: Machines) -> Mapping[int, Profile]:
        """What was measured, where that was on machines as fast as these."""
        return self.measured if self.room or machines.speeds == Machines().speeds else {}

    def profile(self, machines: Machines, shape: InstanceShape) -> Profile:
        """A worker's steps as those of one stage, and its KV's room. Raises KeyError where TP has no profile."""
        tokens, tables = self.kv_tokens(machines, shape), self.tables(machines)
        if tables:
            return replace(tables[shape.tp], kv_tokens=tokens)
        return roofline(self, machines, shape.tp, tokens)


def profiled(profile: Profile) -> PlannedModel:
    """The model of a worker whose steps are known, which takes one device of machines like its own."""
    return PlannedModel(
        name=PurePath(profile.model).name,
        layers=profile.layers,
        heads=1,
        kv_heads=1,
        hidden=1,
        weights=1.0,
        kv_bytes=profile.kv_bytes,
        max_model_len=profile.max_model_len,
        measured={1: profile},
        room=profile.kv_tokens,
    )


def roofline(model: PlannedModel, machines: Machines, tp: int, kv_tokens: int) -> Profile:
    """A worker over `tp` devices by the simulator's roofline (deploy/simulator/hardware.py), KV for `kv_tokens`."""
    numbers = 2 * model.layers * model.kv_heads * _head_dim(model)  # of a token's KV
    shape = ModelShape(
        name=model.name,
        parameters=model.weights / model.bytes_per_weight,
        layers=model.layers,
        hidden=model.hidden,
        kv_heads=model.kv_heads,
        head_dim=_head_dim(model),
        weight_bytes=model.bytes_per_weight,
        kv_number_bytes=model.kv_bytes / numbers,
        max_model_len=model.max_model_len,
    )
    hardware = Hardware(
        flops=machines.flops,
        bandwidth=machines.memory_bandwidth,
        memory=machines.memory,
        devices=tp,
        link=machines.link,
    )
    return roofline_profile(f"{model.name}-tp{tp}", shape, hardware, kv_tokens)


def _head_dim(model: PlannedModel) -> int:
    return max(1, model.hidden // model.heads)


def _opt(name: str, layers: int, heads: int, hidden: int, parameters: float, **profiles: str | Profile) -> PlannedModel:
    found = {int(tp[2:]): PROFILES[each] if isinstance(each, str) else each for tp, each in profiles.items()}
    return PlannedModel(
        name=name,
        layers=layers,
        heads=heads,
        kv_heads=heads,
        hidden=hidden,
        weights=2 * parameters,
        kv_bytes=2 * 2 * hidden * layers,
        measured=found,
    )


def _vllm(profile: str, prefill: Linear, decode: Linear, large: Linear) -> Profile:
    return replace(PROFILES[profile], name=f"{profile}-vllm", steps=PhaseTables(prefill, decode, large))


_13B, _66B = (40, 40, 5120, 12.58e9), (64, 72, 9216, 65.2e9)
MODELS: dict[str, PlannedModel] = {
    made.name: made
    for made in (
        _opt("opt-13b", *_13B, tp1="a100-opt13b", tp2="a100-opt13b-tp2", tp4="a100-opt13b-tp4"),
        _opt("opt-66b", *_66B, tp2="a100-opt66b-tp2", tp4="a100-opt66b-tp4", tp8="a100-opt66b-tp8"),
        # vLLM of DistServe's time, from the same artefact: what its paper compares with.
        _opt(
            *("opt-13b-vllm", *_13B),
            tp1="a100-opt13b-vllm",
            tp2=_vllm(
                "a100-opt13b-tp2",
                Linear(27.440806247810684, 0.0905453268062731, 8.452054313246025e-06),
                Linear(24.54058424191086, 0.00022440145424035404, 0.08715787269447899),
                Linear(17.947769467112806, 0.0004570851465217072, 0.11179075830699213),
            ),
            tp4=_vllm(
                "a100-opt13b-tp4",
                Linear(30.536322590049405, 0.05150644936810146, 4.232473132942393e-07),
                Linear(25.90114444283343, 7.753634454230709e-05, 0.05528087160867803),
                Linear(23.88388468859458, 0.00028400164093310935, 0.06276523831046728),
            ),
        ),
        # For other models a file has these figures; here is one that many know.
        PlannedModel(
            name="llama-3-8b",
            layers=32,
            heads=32,
            kv_heads=8,
            hidden=4096,
            weights=2 * 8.03e9,
            kv_bytes=2 * 2 * 1024 * 32,
            max_model_len=8192,
        ),
    )
}
AS_PROFILED = Machines(name="as-profiled", cost=1.0)
MACHINES: dict[str, Machines] = {
    made.name: made
    for made in (
        Machines(),
        Machines(name="h100-80g", flops=989e12, memory_bandwidth=3.35e12, link=450e9, network=50e9, cost=4.0),
    )
}
