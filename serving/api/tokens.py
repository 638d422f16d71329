"""Reads the bodies of /tokenize and /detokenize, in vLLM's shapes, and tells of the tokenizer."""

from __future__ import annotations

from typing import Any

import orjson

from serving.api.body import parse_body, telling
from serving.api.fields import IgnoredFields
from serving.api.prompts import PromptReader, check_token_ids
from serving.api.schema import DetokenizeBody, TokenizeBody
from serving.api.settings import ServedModel
from serving.errors import InvalidRequest
from serving.text.tokenizer import Tokenizer

Answer = tuple[bytes, IgnoredFields]  # JSON, written where the body is read: it may be longer than that


class TokenReader:
    """`tokenize` and `detokenize` raise `InvalidRequest` or `NotFound`, naming the field."""

    def __init__(
        self, *, tokenizer: Tokenizer, served: ServedModel, prompts: PromptReader, strict_fields: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._served = served
        self._prompts = prompts
        self._strict_fields = strict_fields

    def tokenize(self, body: bytes) -> Answer:
        fields, ignored = parse_body(TokenizeBody, body, strict=self._strict_fields)
        with telling(ignored):
            return orjson.dumps(self._tokens(fields)), ignored

    def _tokens(self, fields: TokenizeBody) -> dict[str, Any]:
        self._prompts.model(fields.model)
        if (fields.prompt is None) == (fields.messages is None):
            raise InvalidRequest("give either prompt or messages", param="prompt")
        if fields.messages is not None:
            tokens = self._prompts.of_messages(
                fields.messages,
                fields,
                tools=fields.tools or (),
                add_special_tokens=bool(fields.add_special_tokens),
            ).tokens
        else:
            adds = fields.add_special_tokens is not False
            tokens = tuple(self._tokenizer.encode(fields.prompt or "", add_special_tokens=adds))
        strings = [self._tokenizer.token_text(token) for token in tokens] if fields.return_token_strs else None
        return {
            "count": len(tokens),
            "max_model_len": self._served.max_model_len,
            "tokens": tokens,
            "token_strs": strings,
        }

    def info(self) -> dict[str, Any]:
        """What a client that renders and counts prompts itself asks for: special tokens, template, context."""
        roles = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"))
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",  # what reads any such tokenizer in `transformers`
            **roles,
            **self._tokenizer.special_tokens,
            "chat_template": self._tokenizer.chat_template,
            "model_max_length": self._served.max_model_len,
        }

    def detokenize(self, body: bytes) -> Answer:
        fields, ignored = parse_body(DetokenizeBody, body, strict=self._strict_fields)
        with telling(ignored):
            self._prompts.model(fields.model)
            check_token_ids(fields.tokens, "tokens", self._served.vocab_size)
        text = self._tokenizer.decode(fields.tokens, skip_special_tokens=False)
        return orjson.dumps({"prompt": text}), ignored
