"""Quantizes a model that has just been loaded, by scales found earlier when there are any.

Scales are found once for each model and scheme and kept in the user's cache, where later workers of the host read them,
so that all compute the same. It knows files and the tokenizer, not the search and not the model's parts.
"""

from __future__ import annotations

import json
import logging
import os
import time
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from tempfile import NamedTemporaryFile

from safetensors import SafetensorError
from safetensors.torch import load, save

from serving.cache_folder import cache_folder
from serving.checkpoint.fingerprint import extended
from serving.model.decoder import Decoder
from serving.quantization.apply import apply_scales, find_scales
from serving.quantization.scheme import Int8Scheme, Scales
from serving.text.tokenizer import load_tokenizer

_log = logging.getLogger("millrace.quantization")

DEFAULT = Int8Scheme()


def quantize(model: Decoder, path: Path, fingerprint: str) -> str:
    """Quantize `model`, loaded from `path` and named by `fingerprint`, in place by `DEFAULT`; its new fingerprint.

    That covers the scales, because a search on another machine may end in others: such models must not share KV.
    """
    calibration = calibration_tokens(path, model.spec.max_position)
    key = extended(fingerprint, json.dumps([asdict(DEFAULT), calibration]).encode())
    file = cache_folder() / f"int8-{key}.safetensors"
    stored = _cached(file)
    if stored is None:
        started = time.monotonic()
        stored = _keep(file, packed(find_scales(model, DEFAULT, calibration)))
        _log.info("found INT8 scales in %.1f s, kept in %s", time.monotonic() - started, file)
    apply_scales(model, DEFAULT, unpacked(stored))
    return extended(key, stored)


def calibration_tokens(path: Path, longest: int) -> list[list[int]]:
    """The calibration text in tokens of the model at `path`, a sequence for each part; nothing without a tokenizer."""
    try:
        tokenizer = load_tokenizer(path)
    except (FileNotFoundError, ValueError) as error:
        _log.warning("quantizing without calibration, since the model's tokenizer cannot be read: %s", error)
        return []
    return [tokenizer.encode(part)[:longest] for part in calibration_parts()]


def calibration_parts() -> list[str]:
    """Stories, facts, talk, lists, code and numbers. A changed text changes every scale, and so every fingerprint."""
    text = files("serving.quantization").joinpath("calibration.txt").read_text(encoding="utf-8")
    return text.split("-----\n")


def packed(found: dict[str, Scales]) -> bytes:
    """Scales as a safetensors file: `<module>.scale` and `<module>.smoothing`."""
    tensors = {f"{name}.scale": scales.scale for name, scales in found.items()}
    tensors |= {f"{name}.smoothing": scales.smoothing for name, scales in found.items() if scales.smoothing is not None}
    return save({name: tensor.contiguous() for name, tensor in sorted(tensors.items())})


def unpacked(stored: bytes) -> dict[str, Scales]:
    tensors = load(stored)
    names = [name.removesuffix(".scale") for name in tensors if name.endswith(".scale")]
    return {name: Scales(smoothing=tensors.get(f"{name}.smoothing"), scale=tensors[f"{name}.scale"]) for name in names}


def _cached(file: Path) -> bytes | None:
    try:
        stored = file.read_bytes()
        unpacked(stored)
    except OSError:  # nothing there, or nothing that may be read
        return None
    except SafetensorError as damage:
        _log.warning("%s is damaged (%s); finding the scales again", file, damage)
        file.unlink(missing_ok=True)
        return None
    return stored


def _keep(file: Path, stored: bytes) -> bytes:
    """Put `stored` at `file`, unless another process was faster: then what that one found counts."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=file.parent, suffix=".part") as part:
            part.write(stored)
            part.flush()
            os.link(part.name, file)
    except FileExistsError:
        return _cached(file) or stored
    except OSError as error:
        _log.warning("the INT8 scales cannot be kept, the next start will seek them again: %s", error)
    return stored
