"""A name for what a model computes: equal for every process that loads the same weights, different for any others.

KV of unequal fingerprints must never meet, so it covers the spec, the bytes of the weights and the dtype computed in.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import xxhash

from serving.model.spec import ModelSpec

WHOLE_BYTES = 4 << 30  # weights up to this size are hashed byte for byte (about 0.1 s for each GiB already in memory)
SAMPLE_STRIDE = 1 << 20  # larger ones: a page of every mebibyte, so that any matrix of that size is touched
SAMPLE_BYTES = 4096
HEAD_BYTES = 1 << 20  # and the beginning whole: there lie the names, shapes and offsets of all tensors


def fingerprint(spec: ModelSpec, files: Sequence[Path], dtype: str) -> str:
    """32 hex digits: XXH3-128 over the spec, the dtype and the files' contents, in the order given; paths do not count.

    When the files together exceed `WHOLE_BYTES`, each is represented by its size, its first mebibyte and 4 KiB of each
    further one. A change confined to bytes between those, such as to a few norm weights alone, is then not seen.
    """
    digest = xxhash.xxh3_128()
    digest.update(json.dumps(asdict(spec), sort_keys=True).encode())
    digest.update(dtype.encode())
    sampled = sum(file.stat().st_size for file in files) > WHOLE_BYTES
    for path in files:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            digest.update(size.to_bytes(8, "little"))
            for start in range(0, size, SAMPLE_STRIDE):  # read, not mapped: mapped pages would count as ours
                file.seek(start)
                whole = not sampled or start < HEAD_BYTES
                digest.update(file.read(SAMPLE_STRIDE if whole else SAMPLE_BYTES))
    return digest.hexdigest()


def extended(digest: str, *parts: bytes) -> str:
    """The fingerprint of a model that was changed after loading: `digest` and all that describes the change."""
    further = xxhash.xxh3_128(digest.encode())
    for part in parts:
        further.update(len(part).to_bytes(8, "little"))
        further.update(part)
    return further.hexdigest()
