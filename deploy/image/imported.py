"""Imports what a service imports, as it starts, of others: their bytecode is written then, and no other's is.

All bytecode of torch and its like would add a tenth to the image, for files that no service reads.
"""

from __future__ import annotations

import importlib

LIBRARIES = (
    *("torch", "torch.nn.functional", "numpy", "safetensors.torch", "gguf", "tokenizers", "llguidance", "xxhash"),
    *("fastapi", "fastapi.responses", "uvicorn", "uvicorn.protocols.http.httptools_impl", "uvloop", "orjson"),
    *("pydantic", "grpc", "grpc.aio", "google.protobuf.message", "prometheus_client", "jinja2.sandbox", "rich.live"),
    *("yaml", "huggingface_hub"),
)

if __name__ == "__main__":
    for name in LIBRARIES:
        importlib.import_module(name)
