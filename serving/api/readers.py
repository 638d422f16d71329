"""What reads bodies for one model, made from settings that can be sent to another process.

Readers are pure: bytes and what was said beside them in, a plan or an answer out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from serving.api.completions import ChatCompletions, Completions
from serving.api.dialect import Dialect
from serving.api.embedding_plan import EmbeddingPreparer
from serving.api.messages import Messages
from serving.api.objectives import PromiseReader
from serving.api.prepare import Preparer
from serving.api.prompts import PromptReader
from serving.api.responses import Responses
from serving.api.settings import ServedModel
from serving.api.thinking import ThinkingReader
from serving.api.tokens import TokenReader
from serving.api.tools import ToolReader
from serving.config import HttpConfig
from serving.service_class import ServiceClass
from serving.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class ReaderSettings:
    """All that readers are made from. Of `config`, how fields, tools and thoughts are read."""

    tokenizer: Tokenizer
    served: ServedModel
    config: HttpConfig
    classes: Mapping[str, ServiceClass]
    default_class: str


class Readers:
    """Raises `ValueError` when the tokenizer's chat template is not valid."""

    def __init__(self, settings: ReaderSettings):
        tokenizer, served, config = settings.tokenizer, settings.served, settings.config
        prompts = PromptReader(tokenizer=tokenizer, served=served, tool_call_parser=config.tool_call_parser)
        objectives = PromiseReader(settings.classes, settings.default_class)
        thinking = ThinkingReader(tokenizer, config.reasoning_parser)
        preparer = Preparer(
            served=served,
            prompts=prompts,
            objectives=objectives,
            strict_fields=config.strict_fields,
            tools=ToolReader(tokenizer, prompts.tool_prompt),
            thinking=thinking,
        )
        self.chat_completions, self.completions = ChatCompletions(preparer), Completions(preparer)
        self.responses = Responses(preparer)
        self.messages = Messages(preparer, prompts, thinking, served)
        self.embeddings = EmbeddingPreparer(served, prompts, objectives, strict_fields=config.strict_fields)
        self.tokens = TokenReader(
            tokenizer=tokenizer, served=served, prompts=prompts, strict_fields=config.strict_fields
        )

    @property
    def dialects(self) -> tuple[Dialect, ...]:
        """Those that generate."""
        return self.chat_completions, self.completions, self.responses, self.messages

    def name_of(self, work: object) -> tuple[str, str] | None:
        """A method of one of them by names that hold in any process; None for anything else."""
        owner = getattr(work, "__self__", None)
        method = getattr(work, "__name__", "")
        return next(((name, method) for name, reader in vars(self).items() if reader is owner), None)
