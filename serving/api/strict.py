"""What the models of all request bodies have in common: no guessing of types, and no work beyond the first fault."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler
from pydantic_core import CoreSchema


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    hints: ClassVar[frozenset[str]] = frozenset()
    """Fields that are hints in this model, beside those of serving.api.fields.HINTS."""
    contracts: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    """Fields that are contracts in this model, as serving.api.fields.CONTRACTS has them."""


class Contract(Strict):
    """What an output has to be like: a field inside that is not known is refused, as it would not be kept."""


class _FirstFault:
    """Lets a list be judged up to its first wrong item alone: a body has room for very many."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return {**handler(source), "fail_fast": True}


T = TypeVar("T")
Items = Annotated[list[T], _FirstFault()]
