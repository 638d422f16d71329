"""Quantizes a model that has just been loaded, by scales found earlier when there are any.

Scales are found once for each model and scheme and kept in the user's cache, where later workers of the host read them,
so that all compute the same. It knows files and the tokenizer, not the search and not the model's parts.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from tempfile import NamedTemporaryFile

from safetensors import SafetensorError
from safetensors.torch import load, save

from serving.cache_folder import cache_folder
from serving.checkpoint.fingerprint import extended
from serving.model.decoder import Decoder
from serving.model.fused_shape import unlike_llama
from serving.model.spec import ModelSpec
from serving.quantization.apply import apply_scales, find_scales, linear_sites
from serving.quantization.scheme import PORTABLE, ROTATED, Int8Scheme, Scales
from serving.text.tokenizer import load_tokenizer

_log = logging.getLogger("millrace.quantization")


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptScales:
    """What is known of a model's scales by `scheme` before it is loaded: a safetensors file in bytes, or nothing."""

    scheme: Int8Scheme
    key: str  # the fingerprint of the model and of how scales are sought
    file: Path
    calibration: Sequence[Sequence[int]]
    stored: bytes | None


def default_scheme(spec: ModelSpec, device: str) -> Int8Scheme:
    """All linears where the fused step of a CPU computes them; elsewhere kernels transform no inputs, or take long."""
    return ROTATED if device == "cpu" and unlike_llama(spec) is None else PORTABLE


def kept_scales(path: Path, fingerprint: str, longest: int, scheme: Int8Scheme) -> KeptScales:
    """Of the model at `path`, which reads up to `longest` tokens and is named by `fingerprint`."""
    calibration = calibration_tokens(path, longest)
    key = extended(fingerprint, json.dumps([asdict(scheme), calibration]).encode())
    file = cache_folder() / f"int8-{key}.safetensors"
    return KeptScales(scheme=scheme, key=key, file=file, calibration=calibration, stored=_cached(file))


def leaves_any(model: Decoder, scheme: Int8Scheme) -> bool:
    """True if `scheme` quantizes a module that the checkpoint's files do not hold quantized."""
    return any(True for _ in linear_sites(model, scheme))


def quantized_modules(model: Decoder, scheme: Int8Scheme) -> frozenset[str]:
    """The layers' modules that `scheme` quantizes: with scales that are known, one after the other can be loaded."""
    return frozenset(site.name for site in linear_sites(model, scheme) if site.name != "head")


def quantize(model: Decoder, kept: KeptScales, ready: Callable[[str], None]) -> str:
    """Quantize `model` in place by the scheme of `kept`; its new fingerprint.

    `ready(name)` is called before a module is read.

    The fingerprint covers the scales, because a search on another machine may end in others: such models must not share
    KV.
    """
    stored = kept.stored
    if stored is None:
        started = time.monotonic()
        stored = _keep(kept.file, packed(find_scales(model, kept.scheme, kept.calibration)))
        _log.info("found INT8 scales in %.1f s, kept in %s", time.monotonic() - started, kept.file)
    apply_scales(model, kept.scheme, unpacked(stored), ready)
    return extended(kept.key, stored)


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
