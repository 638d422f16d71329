"""One choice of a response as it grows: tokens in, showable text out, with one ending.

It decides what the client sees of the tokens (stop strings, special tokens, logprobs, counts), not how it is written.
"""

from __future__ import annotations

from dataclasses import dataclass

from serving.api.logprobs import LogprobEntry
from serving.api.plan import ChoiceRequest, ResponsePlan
from serving.errors import InternalError
from serving.messages import Delta, FinishReason
from serving.text.detokenizer import Detokenizer, MatchedText, StopMatcher
from serving.text.reasoning import ReasoningSplitter
from serving.text.tokenizer import Tokenizer
from serving.text.tools.events import CallDelta, Parsed, Part
from serving.text.tools.parser import ToolCallParser


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """What one delta adds to a choice."""

    text: str
    entries: list[LogprobEntry]  # logprobs of the tokens whose text begins in what has been shown so far
    tokens: tuple[int, ...]
    finish: FinishReason | None
    stop_reason: str | int | None = None  # the stop string, or the stop token id the client asked for

    @property
    def ending(self) -> str | None:
        """`finish_reason`, as the API names it."""
        return self.finish


@dataclass(frozen=True, slots=True)
class ParsedDelta(ChoiceDelta):
    """The same of a choice that is read for thoughts and tool calls: `text` is its content."""

    thoughts: str = ""
    parts: tuple[Part, ...] = ()  # content and calls, in the order of the text
    called: bool = False  # it ends with tool calls, all of them whole

    @property
    def calls(self) -> tuple[CallDelta, ...]:
        return Parsed(self.parts).calls

    @property
    def lead(self) -> int:
        return Parsed(self.parts).lead

    @property
    def ending(self) -> str | None:
        return "tool_calls" if self.called else self.finish


class Choice:
    """Push deltas until one of the outputs has a `finish`; then close the iterator they came from."""

    def __init__(self, plan: ResponsePlan, sequence: ChoiceRequest, tokenizer: Tokenizer) -> None:
        self.index = sequence.index
        self.prompt_number = sequence.prompt_number
        self.request = sequence.request
        self.completion_tokens = 0
        self.cached_tokens: int | None = None  # known from the first delta on
        self.finish: FinishReason | None = None
        self._plan = plan
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(
            tokenizer, skip_special_tokens=plan.skip_special_tokens, shown=plan.shown_tokens
        )
        self._matcher = StopMatcher(plan.stops, include=plan.include_stop) if plan.stops else None
        self.reasoning_tokens = 0
        self._echo = sequence.prompt_text
        self._read = len(sequence.prompt_text or "")  # characters that the tokens so far stand for
        self._shown = self._read  # characters given out; the rest is held back as a possible stop string
        self._waiting: list[LogprobEntry] = []

    def push(self, delta: Delta) -> ChoiceDelta:
        """What `delta` lets the client see. Tokens after a stop string are neither shown nor counted."""
        assert self.finish is None, "a choice that has ended gets no more tokens"
        if delta.index != self.completion_tokens:
            raise InternalError(f"output token {self.completion_tokens} was due and token {delta.index} came")
        if delta.finish is FinishReason.ERROR:
            raise InternalError("the generation ended with an error that has no name")
        entries = self._begin(delta) if self.cached_tokens is None else []
        if not self._plan.shows_output:
            return self._prompt_only(entries)
        shown, stop = self._read_tokens(delta)
        count = self.completion_tokens - delta.index
        if stop is not None:
            self.finish = FinishReason.STOP
        elif delta.finish is not None:
            tail, stop = self._end()
            shown.append(tail)
            self.finish = delta.finish if stop is None else FinishReason.STOP
        text = "".join(shown)
        self._shown += len(text)
        if self._waiting:
            entries = entries + self._release(stop)
        if self._echo is not None:
            text, self._echo = self._echo + text, None
        reason = stop if stop is not None else self._stop_token(delta)
        return ChoiceDelta(text, entries, delta.tokens[:count], self.finish, reason)

    def _read_tokens(self, delta: Delta) -> tuple[list[str], str | None]:
        """The text to show for the tokens, and the stop string that ended it."""
        hidden = len(delta.tokens) - 1 if delta.finish is FinishReason.STOP and not self._plan.include_stop else None
        shown: list[str] = []
        for position, token in enumerate(delta.tokens):
            self.completion_tokens += 1
            if position == hidden:
                break
            text = self._detokenizer.push(token)
            self._note(self._read)
            if self._plan.logprobs is not None:
                self._waiting.append(LogprobEntry(token, delta.logprobs[position], self._read))
            self._read += len(text)
            matched = self._match(text)
            shown.append(matched.text)
            if matched.stop is not None:
                return shown, matched.stop
        return shown, None

    def _note(self, start: int) -> None:
        """A token's text begins here, in characters of the answer."""

    def _match(self, text: str) -> MatchedText:
        if self._matcher is None:
            return MatchedText(text)
        if self.completion_tokens <= self._plan.min_tokens:
            return self._matcher.skip(text)
        return self._matcher.push(text)

    def _end(self) -> tuple[str, str | None]:
        """The last text when no token follows, and the stop string if it completes one."""
        tail = self._detokenizer.finish()
        self._read += len(tail)
        matched = self._match(tail)
        if matched.stop is None and self._matcher is not None:
            return matched.text + self._matcher.finish(), None
        return matched.text, matched.stop

    def _release(self, stop: str | None) -> list[LogprobEntry]:
        """Entries of tokens whose text has begun to be shown; at the end all, unless a stop string cut them off."""
        if self.finish is not None and stop is None:
            ready, self._waiting = self._waiting, []
            return ready
        ready = [entry for entry in self._waiting if entry.start < self._shown]
        self._waiting = self._waiting[len(ready) :]
        return ready

    def _stop_token(self, delta: Delta) -> int | None:
        stopped = self.finish is FinishReason.STOP and delta.tokens
        return delta.tokens[-1] if stopped and delta.tokens[-1] in self.request.sampling.stop_token_ids else None

    def _begin(self, delta: Delta) -> list[LogprobEntry]:
        """The first delta says how much of the prompt was cached, and brings its logprobs when it is echoed."""
        self.cached_tokens = delta.cached_tokens
        if self.request.prompt_logprobs is None:
            return []
        if len(delta.prompt_logprobs) != len(self.request.prompt):
            raise InternalError("the log-probabilities of the prompt are not one for each token")
        reader = Detokenizer(self._tokenizer, skip_special_tokens=self._plan.skip_special_tokens, continues=False)
        entries, start = [], 0
        for token, logprob in zip(self.request.prompt, delta.prompt_logprobs, strict=True):
            entries.append(LogprobEntry(token, logprob, start))
            start += len(reader.push(token))
        return entries

    def _prompt_only(self, entries: list[LogprobEntry]) -> ChoiceDelta:
        self.finish = FinishReason.LENGTH
        return ChoiceDelta(self._echo or "", entries, (), self.finish)


class ParsedChoice(Choice):
    """A choice whose thoughts and tool calls are taken out of its text."""

    def __init__(self, plan: ResponsePlan, sequence: ChoiceRequest, tokenizer: Tokenizer) -> None:
        super().__init__(plan, sequence, tokenizer)
        tools, thinking = plan.tools, plan.thinking
        self._splitter = None if thinking is None else ReasoningSplitter(thinking.form, begun=thinking.begun)
        self._parser = None if tools is None else ToolCallParser(tools.form, tools.names, many=tools.many)
        self._begun = 0
        self._ended = 0
        self._starts: list[int] = []  # of tokens that may be thoughts

    def _note(self, start: int) -> None:
        if self._splitter is not None and self._splitter.over is None:
            self._starts.append(start)

    def push(self, delta: Delta) -> ParsedDelta:
        output = super().push(delta)
        ends = output.finish is not None
        thoughts, content = self._split(output.text, ends)
        parsed = self._parse(content, ends)
        called = output.finish is FinishReason.STOP and 0 < self._begun == self._ended
        return ParsedDelta(
            parsed.content,
            output.entries,
            output.tokens,
            output.finish,
            output.stop_reason,
            thoughts,
            parsed.parts,
            called,
        )

    def _split(self, text: str, ends: bool) -> tuple[str, str]:
        if self._splitter is None:
            return "", text
        thoughts, answer = self._splitter.push(text)
        if ends:
            last, rest = self._splitter.finish()
            thoughts, answer = thoughts + last, answer + rest
        self._count(self._splitter)
        return thoughts, answer

    def _count(self, splitter: ReasoningSplitter) -> None:
        """Tokens count as thoughts up to the one that ends the mark behind them."""
        if splitter.over is not None and self._starts:
            self.reasoning_tokens = sum(start < splitter.over for start in self._starts)
            self._starts = []

    def _parse(self, text: str, ends: bool) -> Parsed:
        if self._parser is None:
            return Parsed((text,) if text else ())
        parsed = self._parser.push(text)
        if ends:
            parsed += self._parser.finish()
        for call in parsed.calls:
            self._begun += call.name is not None
            self._ended += call.ended
        return parsed


def choice_of(plan: ResponsePlan, sequence: ChoiceRequest, tokenizer: Tokenizer) -> Choice:
    """What parsing an answer costs, only choices pay that are parsed."""
    return (ParsedChoice if plan.parsed else Choice)(plan, sequence, tokenizer)
