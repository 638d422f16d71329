"""Sorts the fields of a body into those that are served, hints, contracts and unknown ones.

Hints and unknown fields are left out and named; a contract that is not served is refused. One pass over the objects
that the models know, so linear in the body, however many fields it has.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from serving.api.schema import ChatCompletionBody, CompletionBody, GenerationBody
from serving.api.strict import Contract, Strict
from serving.errors import InvalidRequest

HINTS = frozenset(
    {
        "annotations",
        "cache_control",
        "chat_id",
        "early_stopping",
        "enable_thinking",
        "guided_decoding_backend",
        "id",
        "include_obfuscation",
        "include_reasoning",
        "keep_alive",
        "metadata",
        "num_batch",
        "num_ctx",
        "num_gpu",
        "num_keep",
        "num_thread",
        "prompt_cache_options",
        "prompt_cache_retention",
        "provider_specific_fields",
        "reasoning",
        "reasoning_details",
        "reasoning_effort",
        "request_id",
        "safety_identifier",
        "service_tier",
        "session_id",
        "store",
        "think",
        "thinking",
        "thinking_blocks",
        "use_mlock",
        "use_mmap",
        "verbosity",
    }
)
"""Fields that clients send and that no promise of an answer depends on, in the body or in a part of it."""

CONTRACTS: Mapping[str, tuple[object, ...]] = {
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": (),
    "chat_template": (),
    "documents": (),
    "dry_multiplier": (),
    "embed_dtype": ("float32",),
    "endianness": ("little", "native"),
    "function_call": ("none",),
    "functions": (),
    "images": (),
    "length_penalty": (1,),
    "logits_processors": (),
    "mirostat": (),
    "mm_processor_kwargs": (),
    "modalities": (["text"],),
    "moderation": (),
    "num_beams": (1,),
    "parallel_tool_calls": (True,),
    "prediction": (),
    "prompt_logprobs": (),
    "return_tokens_as_token_ids": (),
    "spaces_between_special_tokens": (True,),
    "structural_tag": (),
    "suffix": (),
    "tfs_z": (1,),
    "tool_choice": ("none",),
    "tools": (),
    "top_a": (),
    "truncate_prompt_tokens": (),
    "typical_p": (1,),
    "use_activation": (),
    "use_beam_search": (),
    "web_search_options": (),
    "xtc_probability": (),
}
"""Fields that change what is answered and are not served, with the values that ask for what is the case anyway.

Where a model of serving.api.schema has such a field, it is served there. `_NOTHING` asks for nothing in any of them.
"""
_NOTHING: tuple[object, ...] = (None, False, "", [], {})
_PLAIN = frozenset({str, int, float, bool})
_EMPTY_LISTS = frozenset({"tools", "tool_calls", "functions", "annotations", "modalities", "stop", "stop_token_ids"})
_GENERATION = (ChatCompletionBody, CompletionBody)  # what they serve, no other generation endpoint ignores

MOST_PARTS = 65_536  # messages and other items, and fields that are not served, of a body together: 2 to 8 µs each
MOST_NAMED = 16  # ignored fields that are named and counted, of one request
_MOST_LETTERS = 64  # of each step of a name
_UNSHOWN = re.compile(r"[^A-Za-z0-9_-]")
OTHER = "other"


@dataclass(frozen=True, slots=True)
class IgnoredFields:
    """What a request's body said in vain: names such as `messages.cache_control`, each once."""

    counted: Mapping[str, str] = field(default_factory=dict)  # name → what it is counted as: a hint, or OTHER
    more: bool = False  # there were others

    def and_hint(self, name: str, field: str) -> IgnoredFields:
        """With one more, `name`, that turned out to be a hint: `field`, or a value of it."""
        if len(self.counted) >= MOST_NAMED:
            return replace(self, more=True)
        return replace(self, counted={**self.counted, name: field})

    def header(self) -> str:
        """The value of a header that names them: letters, digits and `_-.`, bounded in length. Empty for none."""
        return ", ".join((*self.counted, "...") if self.more else self.counted)


def sort_fields(
    kind: type[Strict], body: Mapping[str, Any], *, strict: bool = False
) -> tuple[dict[str, Any], IgnoredFields]:
    """`body` with the fields of `kind` alone, less those that ask for nothing, and what was ignored of it.

    Counted before they are looked at, there are MOST_PARTS of fields and items at most.
    With `strict`, a field that is neither served nor a hint is refused. Raises InvalidRequest that names the field.
    """
    sorter = _Sorter(strict)
    kept = sorter.sort(kind, body, ())
    return kept, IgnoredFields(sorter.ignored, sorter.more)


class _Sorter:
    def __init__(self, strict: bool):
        self._strict = strict
        self._parts = 0
        self.ignored: dict[str, str] = {}
        self.more = False

    def sort(self, kind: type[Strict], given: Mapping[str, Any], path: tuple[str | int, ...]) -> dict[str, Any]:
        shape = _shape(kind)
        self._count(len(given.keys() - shape.inside.keys()), path)
        kept: dict[str, Any] = {}
        for name, value in given.items():
            inside = shape.inside.get(name)
            if inside is None:
                self._leave_out(shape, name, value, path)
            elif not (value is None and name not in shape.required) and not (value == [] and name in _EMPTY_LISTS):
                kept[name] = self._sort_value(inside, value, (*path, name)) if inside else value
        return kept

    def _sort_value(self, kinds: tuple[type[Strict], ...], value: Any, path: tuple[str | int, ...]) -> Any:
        if isinstance(value, list):
            self._count(len(value), path)
            shapes = [_shape(kind) for kind in kinds]
            return [
                item if any(shape.is_plain(item) for shape in shapes) else self._sort_value(kinds, item, (*path, i))
                for i, item in enumerate(value)
            ]
        if not isinstance(value, dict):
            return value
        kind = next((kind for kind in kinds if _shape(kind).fits(value)), None)
        return value if kind is None else self.sort(kind, value, path)  # of no form: validation says which there are

    def _count(self, more: int, path: tuple[str | int, ...]) -> None:
        self._parts += more
        if self._parts > MOST_PARTS:
            param = shown_path(path) or None
            where = f"{param}: " if param else ""
            raise InvalidRequest(
                f"{where}a body has at most {MOST_PARTS} messages, parts and unknown fields", param=param
            )

    def _leave_out(self, shape: _Shape, name: str, value: Any, path: tuple[str | int, ...]) -> None:
        contract = shape.contract or name in shape.contracts
        if contract and any(value == neutral for neutral in (*_NOTHING, *shape.contracts.get(name, ()))):
            return
        if contract or (self._strict and name not in shape.hints):
            param = shown_path((*path, name))
            raise InvalidRequest(f"{param}: is not a supported field", param=param)
        hint = name in shape.hints
        if value is not None and not (value == [] and hint):
            self._note(name, path, name if hint else OTHER)

    def _note(self, name: str, path: tuple[str | int, ...], counted: str) -> None:
        if self.more:
            return
        steps = (*(step for step in path if isinstance(step, str)), name)
        shown = ".".join(_UNSHOWN.sub("_", step[:_MOST_LETTERS]) or "_" for step in steps)
        if shown in self.ignored:
            return
        if len(self.ignored) == MOST_NAMED:
            self.more = True
            return
        self.ignored[shown] = counted


@dataclass(frozen=True, slots=True)
class _Shape:
    """What sorting has to know of a model."""

    inside: Mapping[str, tuple[type[Strict], ...]]  # by each field's name: the models its value may be made of
    required: frozenset[str]
    hints: frozenset[str]
    contracts: Mapping[str, tuple[object, ...]]
    contract: bool  # every field that it does not know is one
    literals: Mapping[str, tuple[object, ...]]  # fields that only have certain values: they tell models apart

    def is_plain(self, value: Any) -> bool:
        """True if there is nothing to sort in it: for most items of a list, told quickly."""
        if not isinstance(value, dict):
            return True
        return self.inside.keys() >= value.keys() and _PLAIN.issuperset(map(type, value.values()))

    def fits(self, value: Mapping[str, Any]) -> bool:
        return all(value.get(name) is None or value[name] in values for name, values in self.literals.items())


@cache
def _shape(kind: type[Strict]) -> _Shape:
    fields = {of.alias or name: of for name, of in kind.model_fields.items()}
    generates = issubclass(kind, GenerationBody)
    elsewhere = [name for other in _GENERATION for name in other.model_fields] if generates else []
    contracts = {**dict.fromkeys(elsewhere, ()), **CONTRACTS, **kind.contracts}
    return _Shape(
        inside={name: tuple(_models(of.annotation)) for name, of in fields.items()},
        required=frozenset(name for name, of in fields.items() if of.is_required()),
        hints=HINTS | kind.hints,
        contracts={name: neutral for name, neutral in contracts.items() if name not in kind.hints},
        contract=issubclass(kind, Contract),
        literals={name: get_args(of.annotation) for name, of in fields.items() if get_origin(of.annotation) is Literal},
    )


def _models(annotation: Any) -> Iterator[type[Strict]]:
    """The models that values of this type are made of."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _models(get_args(annotation)[0])
    elif origin in (Union, types.UnionType, list):
        for member in get_args(annotation):
            yield from _models(member)
    elif isinstance(annotation, type) and issubclass(annotation, Strict):
        yield annotation


def shown_path(path: tuple[str | int, ...] | list[str | int]) -> str:
    """`messages[0].role`, at most 200 characters."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).lstrip(".")[:200]
