"""The decoder's operations as Triton kernels, for CUDA devices; importing this needs triton, the extra `gpu`.

`silu_mul` and `paged_attention` mean what their namesakes in `serving.kernels.reference` mean; the others fuse some of
its operations, or compute in int8. The `supports_` functions say what they can do.
"""

from serving.kernels.gpu.attention import paged_attention
from serving.kernels.gpu.attention import supported as supports_attention
from serving.kernels.gpu.launch import INTERPRETED
from serving.kernels.gpu.linear import int8_linear, tune
from serving.kernels.gpu.linear import supported as supports_linear
from serving.kernels.gpu.rotary import rope_write_kv
from serving.kernels.gpu.rotary import supported as supports_rotary
from serving.kernels.gpu.routing import supported as supports_experts
from serving.kernels.gpu.rows import (
    Quantized,
    add_rms_norm,
    quantize,
    silu_mul,
)
from serving.kernels.gpu.rows import supported as supports_rows

__all__ = [
    "INTERPRETED",
    "Quantized",
    "add_rms_norm",
    "int8_linear",
    "paged_attention",
    "quantize",
    "rope_write_kv",
    "silu_mul",
    "supports_attention",
    "supports_experts",
    "supports_linear",
    "supports_rotary",
    "supports_rows",
    "tune",
]
