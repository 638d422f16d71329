"""What steps of a model take on described hardware: by its FLOP/s, its memory's bandwidth and its link.

Pure arithmetic, for the simulator and the planner. Its shares of the peaks are assumptions where no worker has been
measured: they are read off DistServe's tables for OPT-13B on an A100, which docs/simulator.md compares it with.

    t  new tokens          c  context          n  devices in tensor parallel
    ((weights + KV·c) / bandwidth + (2·P·t + pairs) / flops) / n + 2 sums a layer over the link + overhead

Reading and computing add up, as they do in the tables: there a prompt of any length takes what reading the weights
takes, and then so much a token.
"""

from __future__ import annotations

from dataclasses import dataclass

from deploy.simulator.profiles import Profile, StepWork

USABLE_MEMORY = 0.924  # of a device, for weights and KV


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A decoder: sizes of its layers, and bytes of a weight and of a number of its KV.

    `parameters` are those a token passes, `weights` all of them in bytes where that differs (experts).
    """

    name: str
    parameters: float
    layers: int
    hidden: int
    kv_heads: int
    head_dim: int
    weight_bytes: float = 2.0
    kv_number_bytes: float = 2.0
    max_model_len: int = 2048
    weights: float = 0.0

    @property
    def all_weights(self) -> float:
        """Bytes."""
        return self.weights or self.parameters * self.weight_bytes

    @property
    def kv_bytes(self) -> int:
        """Of a token."""
        return round(2 * self.layers * self.kv_heads * self.head_dim * self.kv_number_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """A worker's devices. FLOP/s, bytes/s, bytes and seconds, of each device; shares of the peaks that steps reach.

    `link` carries sums between the devices of a worker.
    """

    flops: float
    bandwidth: float
    memory: float
    devices: int = 1
    link: float = 300e9
    compute_share: float = 0.79
    memory_share: float = 0.64
    link_share: float = 0.16
    usable_memory: float = USABLE_MEMORY
    step_seconds: float = 3e-3
    sequence_seconds: float = 4e-5


@dataclass(frozen=True, slots=True)
class Roofline:
    """A CostModel: each step reads the weights and the context, and computes its tokens."""

    model: ModelShape
    hardware: Hardware

    def seconds(self, work: StepWork) -> float:
        model, hardware = self.model, self.hardware
        tokens = work.prompt_tokens + work.decoding
        flops = 2 * model.parameters * tokens + 4 * model.layers * model.hidden * work.prompt_pairs
        read = model.all_weights + model.kv_bytes * (work.prompt_context + work.decoding_context)
        computing = flops / (hardware.flops * hardware.compute_share * hardware.devices)
        reading = read / (hardware.bandwidth * hardware.memory_share * hardware.devices)
        around = hardware.step_seconds + hardware.sequence_seconds * work.decoding
        return computing + reading + self._sums(tokens) + around

    def _sums(self, tokens: int) -> float:
        """Two sums of the hidden state a layer: each device sends and takes 2·(n − 1)/n of it."""
        model, hardware = self.model, self.hardware
        share = 2 * (hardware.devices - 1) / hardware.devices
        return 2 * model.layers * share * model.hidden * 2 * tokens / (hardware.link * hardware.link_share)


def kv_room(model: ModelShape, hardware: Hardware) -> int:
    """Tokens of KV beside the weights in a worker's memory. Raises ValueError where there is room for no request."""
    room = hardware.usable_memory * hardware.memory * hardware.devices - model.all_weights
    tokens = int(room // model.kv_bytes)
    if tokens < model.max_model_len:
        raise ValueError(f"weights of {model.all_weights:.3g} bytes leave room for {max(tokens, 0)} tokens of KV")
    return tokens


def roofline_profile(name: str, model: ModelShape, hardware: Hardware, kv_tokens: int | None = None) -> Profile:
    """Steps by the roofline. KV has room for `kv_tokens`, or as `kv_room` says, which raises ValueError."""
    return Profile(
        name=name,
        model=model.name,
        steps=Roofline(model, hardware),
        kv_tokens=kv_room(model, hardware) if kv_tokens is None else kv_tokens,
        kv_bytes=model.kv_bytes,
        layers=model.layers,
        max_model_len=model.max_model_len,
    )
