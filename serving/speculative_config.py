"""What drafts tokens, as `--speculative-config` says it: a JSON object with vLLM's keys. Reads text, loads nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serving.options import ConfigError

METHODS = ("ngram", "draft_model", "mtp")
ALIASES = {"deepseek_mtp": "mtp", "[ngram]": "ngram"}  # vLLM's older names
NO_MODELS = ("ngram", "[ngram]")  # names of a method in place of a model's
LOOKUPS = {"prompt_lookup_max": 4, "prompt_lookup_min": 2}  # of ngram: the longest and shortest run looked up
LONGEST = 200  # characters of a wrong text that are repeated
KEYS = ("method", "model", "num_speculative_tokens", "quantization", "draft_tensor_parallel_size", *LOOKUPS)
PARAM = "speculative_config"


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculativeConfig:
    """`ngram` drafts from the text itself, `draft_model` with `model`, `mtp` with the served model's own layer."""

    method: str = "ngram"
    model: str | None = None
    num_speculative_tokens: int | None = None  # at a time; None: as --num-speculative-tokens says
    quantization: str | None = None  # of `model` at load: int8
    unused: tuple[str, ...] = ()  # keys that were given and change nothing


def read_speculative_config(text: str | None) -> SpeculativeConfig:
    """Raises ConfigError for what is no such object, or names what cannot be had."""
    if text is None:
        return SpeculativeConfig()
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise _wrong(f"{_shortened(text)} is no JSON object", 'write it as {"method": "ngram"}')
    unknown = sorted(given.keys() - set(KEYS))
    if unknown:
        raise _wrong(f"{', '.join(unknown)} not known", f"known are {', '.join(KEYS)}")
    if given.get("draft_tensor_parallel_size", 1) != 1:
        raise _wrong("draft_tensor_parallel_size must be 1", "a worker computes on one device")
    method, model, quantization = _method(given), given.get("model"), given.get("quantization")
    if method == "draft_model" and (not isinstance(model, str) or not model):
        raise _wrong("draft_model needs a model", 'name a smaller one of the same vocabulary as "model"')
    if quantization not in (None, "int8") or (quantization and method != "draft_model"):
        raise _wrong(f"quantization {quantization!r} cannot be had", 'a draft model\'s may be "int8"')
    return SpeculativeConfig(
        method=method,
        model=model if method == "draft_model" else None,
        num_speculative_tokens=_count(given),
        quantization=quantization,
        unused=_unused(given, method),
    )


def _method(given: Mapping[str, Any]) -> str:
    """As vLLM finds it out: by name, else by the model's."""
    method, model = given.get("method"), given.get("model")
    if method is None:
        method = "ngram" if model in NO_MODELS else "draft_model"
    method = ALIASES.get(str(method), str(method))
    if method not in METHODS:
        raise _wrong(f"there is no method {method!r} here", f"there are {', '.join(METHODS)}")
    return method


def _count(given: Mapping[str, Any]) -> int | None:
    count = given.get("num_speculative_tokens")
    if count is not None and (type(count) is not int or not 1 <= count <= 64):
        raise _wrong(f"num_speculative_tokens {count!r} is not a number from 1 to 64", "4 is usual")
    return count


def _unused(given: Mapping[str, Any], method: str) -> tuple[str, ...]:
    """Keys that vLLM's users give and that say nothing here, or what is done whatever they say."""
    for key in LOOKUPS:
        length = given.get(key)
        if length is not None and (type(length) is not int or length < 1):
            raise _wrong(f"{key} {length!r} is no number of tokens", f"{LOOKUPS[key]} is what is done")
    unused = [key for key, length in LOOKUPS.items() if given.get(key) not in (None, length)]
    if method != "draft_model" and given.get("model") not in (None, *NO_MODELS):
        unused.append("model")
    return tuple(unused)


def _shortened(text: str) -> str:
    return repr(text) if len(text) <= LONGEST else f"{text[:LONGEST]!r} and so on"


def _wrong(what: str, instead: str) -> ConfigError:
    return ConfigError(f"--speculative-config: {what}; {instead}", param=PARAM)
