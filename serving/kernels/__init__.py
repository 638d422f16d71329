"""The operations a decoder is made of. The model calls them here and does not know which form runs.

Every form has the signature and the meaning of its namesake in `serving.kernels.reference`.
"""

from serving.kernels.reference import (
    gelu,
    gelu_tanh,
    layer_norm,
    paged_attention,
    relu,
    rms_norm,
    rope,
    silu_mul,
    write_kv,
)

__all__ = [
    "gelu",
    "gelu_tanh",
    "layer_norm",
    "paged_attention",
    "relu",
    "rms_norm",
    "rope",
    "silu_mul",
    "write_kv",
]
