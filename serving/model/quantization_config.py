"""How config.json says that weights are INT8 or FP8: the `compressed-tensors` convention, read and written.

A module is stored as `weight` int8 [out, in] and `weight_scale` [out, 1] beside the modules left as they were. Data
alone: no torch here, since specs are read where there is none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

QUANT_METHOD = "compressed-tensors"
FORMAT = "int-quantized"
FORMATS = {FORMAT: "int", "float-quantized": "float"}  # and the type of their numbers
SCALE_LEAF = "weight_scale"  # what the tensor of scales is called, beside `weight`
TRANSFORM = {"type": "hadamard", "randomize": False, "requires_grad": False, "precision": "torch.float32"}
SMALLEST = 16  # inputs that a transform joins, as in serving.kernels.hadamard
ZERO_POINT_LEAF = "weight_zero_point"  # some tools write it although it is all zeros


def int8_config(ignored: Sequence[str], rotations: Mapping[str, int] = MappingProxyType({})) -> dict[str, Any]:
    """`quantization_config` of a checkpoint all of whose linear modules are INT8 but those named in `ignored`.

    Modules named in `rotations` hold weights of inputs that Hadamard transforms have joined, so many at a time.
    """
    common = {"num_bits": 8, "type": "int", "symmetric": True, "group_size": None, "block_structure": None}
    weights = common | {"strategy": "channel", "dynamic": False, "actorder": None, "observer": "minmax"}
    inputs = common | {"strategy": "token", "dynamic": True, "actorder": None, "observer": None}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    config = {
        "quant_method": QUANT_METHOD,
        "format": FORMAT,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": sorted(ignored),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
    return config | {"transform_config": _transform_config(rotations)} if rotations else config


def _transform_config(rotations: Mapping[str, int]) -> dict[str, Any]:
    """A group for each size of blocks: inputs are transformed as they come, weights were when they were written."""
    groups = {}
    for block in sorted(set(rotations.values())):
        targets = sorted(name for name, joined in rotations.items() if joined == block)
        places = [("input", False), ("weight_input", True)]
        apply = [{"targets": targets, "location": at, "inverse": back, "ignore": []} for at, back in places]
        groups[f"hadamard_{block}"] = TRANSFORM | {"head_dim": block, "apply": apply}
    return {"config_groups": groups}


def module_rotations(config: Mapping[str, Any] | None) -> dict[str, int]:
    """Of `quantization_config`: how many inputs are joined at a time, by modules' names in the checkpoint.

    Raises ValueError for transforms that are not computed here.
    """
    found: dict[str, int] = {}
    transforms = ((config or {}).get("transform_config") or {}).get("config_groups") or {}
    for name, group in transforms.items():
        block, places = group.get("head_dim"), {}
        for part in group.get("apply", ()):
            places[part.get("location"), bool(part.get("inverse"))] = tuple(part.get("targets", ()))
            if part.get("ignore"):
                raise ValueError(f"transform {name} ignores modules, which is not supported; name its targets")
        inputs = places.get(("input", False), ())
        if group.get("type") != TRANSFORM["type"] or group.get("randomize") or not _is_block(block):
            raise ValueError(
                f"transform {name} is not supported; Hadamard transforms of {SMALLEST} inputs or more, not random, are"
            )
        if places.keys() != {("input", False), ("weight_input", True)} or places["weight_input", True] != inputs:
            raise ValueError(f"transform {name} is not one of modules' inputs alone, which is what is supported")
        if any(target.startswith("re:") or "." not in target for target in inputs):
            raise ValueError(f"transform {name} has patterns or classes as its targets; write out modules' names")
        if twice := sorted(found.keys() & {*inputs}):
            raise ValueError(f"inputs of {', '.join(twice)} are to be transformed twice")
        found |= dict.fromkeys(inputs, block)
    return found


def _is_block(size: object) -> bool:
    return isinstance(size, int) and size >= SMALLEST and size & (size - 1) == 0


def check_config(config: Mapping[str, Any] | None, dequantized: Sequence[str] = ()) -> None:
    """Raises ValueError, saying what is different, unless `config` is None or describes INT8 or FP8 as computed here.

    That is: symmetric weights of 8 bits, one scale per output channel, and activations quantized per token on arrival.
    Methods of `dequantized` need not be computed: weights become wide as they are loaded.
    """
    if not config:
        return
    method = config.get("quant_method", "unknown")
    if method in dequantized:
        return
    if method != QUANT_METHOD:
        raise ValueError(
            f"{method!r} quantized checkpoints are not supported (quantization_config.quant_method); "
            "use unquantized weights or a GGUF file"
        )
    kind = FORMATS.get(config.get("format", ""))
    if kind is None:
        raise ValueError(
            f"{QUANT_METHOD} format {config.get('format')!r} is not supported; {' and '.join(FORMATS)} are"
        )
    if module_rotations(config) and kind != FORMATS[FORMAT]:
        raise ValueError("inputs are transformed before INT8 products alone, and this checkpoint's weights are FP8")
    if config.get("kv_cache_scheme"):
        raise ValueError("this checkpoint brings scales for its KV cache (kv_cache_scheme), which is not supported")
    for name, group in config.get("config_groups", {}).items():
        if not isinstance(group, Mapping):
            raise ValueError(
                f"quantization group {name} is not described, only named; write out its weights and inputs"
            )
        _check(name, "weights", group.get("weights"), type=kind, strategy="channel", dynamic=False)
        _check(name, "input_activations", group.get("input_activations"), type=kind, strategy="token", dynamic=True)
        if group.get("output_activations"):
            raise ValueError(f"quantization group {name} quantizes outputs, which is not supported")


def _check(group: str, part: str, found: Mapping[str, Any] | None, **more: Any) -> None:
    wanted = {"num_bits": 8, "symmetric": True, **more}
    for key, value in wanted.items():
        if (found or {}).get(key) != value:
            has = (found or {}).get(key)
            raise ValueError(f"quantization group {group} has {part} with {key} {has!r}; only {value!r} is supported")
