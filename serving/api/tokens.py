"""The /tokenize and /detokenize endpoints, in vLLM's shapes. They ask nothing of the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.requests import Request

from serving.api.body import parse_body, read_body
from serving.api.fields import IgnoredFields
from serving.api.generation import off_loop, tell_ignored
from serving.api.prompts import PromptReader, check_token_ids
from serving.api.schema import DetokenizeBody, TokenizeBody
from serving.api.settings import ApiObserver, ServedModel
from serving.config import HttpConfig
from serving.errors import InvalidRequest
from serving.text.tokenizer import Tokenizer

Answer = tuple[dict[str, Any], IgnoredFields]


class TokenEndpoints:
    """Both methods raise `InvalidRequest` or `NotFound`, naming the field."""

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        served: ServedModel,
        prompts: PromptReader,
        config: HttpConfig,
        observer: ApiObserver,
    ) -> None:
        self._config = config
        self._observer = observer
        self._tokenizer = tokenizer
        self._served = served
        self._prompts = prompts

    async def answer(self, request: Request, work: Callable[[bytes], Answer]) -> dict[str, Any]:
        """Read the body within its limits, and do `work` on it, in a thread when it is large."""
        answer, ignored = await off_loop(work, await read_body(request.receive, request.headers, self._config))
        tell_ignored(ignored, request.state.answer_headers, self._observer)
        return answer

    def tokenize(self, body: bytes) -> Answer:
        fields, ignored = parse_body(TokenizeBody, body, strict=self._config.strict_fields)
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
        answer = {
            "count": len(tokens),
            "max_model_len": self._served.max_model_len,
            "tokens": tokens,
            "token_strs": strings,
        }
        return answer, ignored

    def detokenize(self, body: bytes) -> Answer:
        fields, ignored = parse_body(DetokenizeBody, body, strict=self._config.strict_fields)
        self._prompts.model(fields.model)
        check_token_ids(fields.tokens, "tokens", self._served.vocab_size)
        return {"prompt": self._tokenizer.decode(fields.tokens, skip_special_tokens=False)}, ignored
