"""How config.json says that weights are INT8 or FP8: the `compressed-tensors` convention, read and written.

A module is stored as `weight` int8 [out, in] and `weight_scale` [out, 1] beside the modules left as they were. Data
alone: no torch here, since specs are read where there is none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

QUANT_METHOD = "compressed-tensors"
FORMAT = "int-quantized"
FORMATS = {FORMAT: "int", "float-quantized": "float"}  # and the type of their numbers
SCALE_LEAF = "weight_scale"  # what the tensor of scales is called, beside `weight`
ZERO_POINT_LEAF = "weight_zero_point"  # some tools write it although it is all zeros


def int8_config(ignored: Sequence[str]) -> dict[str, Any]:
    """`quantization_config` of a checkpoint all of whose linear modules are INT8 but those named in `ignored`."""
    common = {"num_bits": 8, "type": "int", "symmetric": True, "group_size": None, "block_structure": None}
    weights = common | {"strategy": "channel", "dynamic": False, "actorder": None, "observer": "minmax"}
    inputs = common | {"strategy": "token", "dynamic": True, "actorder": None, "observer": None}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": QUANT_METHOD,
        "format": FORMAT,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": sorted(ignored),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


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
