"""Grammars that outputs have to follow: compiled once, and for each sequence the tokens that may come next.

A grammar is text that llguidance reads (serving.grammar.forms makes it at the door). What may come next is a function
of the grammar and the output so far alone, so it can be rebuilt at any moment, on any worker. No torch.
"""

from __future__ import annotations

import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np
import orjson

os.environ["RUST_LIB_BACKTRACE"] = "0"  # an error deep in a grammar takes seconds with a trace at each level

from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, get_version
from numpy.typing import NDArray

from serving.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from serving.text.tokenizer import Tokenizer

GRAMMAR_VERSION = f"llguidance {get_version()} unforced"  # workers of unequal ones may allow unequal tokens
KEPT = 64  # compiled grammars that are kept for the next request
STACK = 256 << 20  # bytes, of which only those used are taken
LIMITS = LLParserLimits(step_max_items=20_000, step_lexer_fuel=100_000)  # about 1 and 7 ms a token
# Where only one text can follow, the library allows a single way to write it in tokens, and takes twice a mask's time
# to find that. Without, a token may come if the grammar accepts its bytes, and `validate_tokens` says the same.
UNFORCED = '%llguidance {"no_forcing": true}'
OWN_LINE = re.compile(rf"\n *\d+ \| {re.escape(UNFORCED)}$")  # as the library shows it after a line with a mistake
AROUND = {"lark_grammar": f"start: @whole\n{UNFORCED}"}


class GrammarError(ValueError):
    """A grammar that cannot be compiled, or an output that does not follow it."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """The tokens that may come next; no token beyond the bits may.

    `bits` [V/8] uint8, a multiple of four, the lowest bit first; `ended`: nothing but an end of text may come.
    """

    bits: NDArray[np.uint8]
    ended: bool

    def mask(self, vocab: int) -> NDArray[np.bool_]:
        """[vocab]; tokens that the tokenizer does not know may not come."""
        return np.unpackbits(self.bits, count=vocab, bitorder="little").view(np.bool_)

    @property
    def address(self) -> int:
        """Where the bits are, which stay there as long as this does."""
        return self.bits.ctypes.data

    @property
    def tokens(self) -> int:
        """How many there are bits for."""
        return 8 * len(self.bits)

    def none_but(self, tokens: Collection[int]) -> bool:
        """True if no other token may come."""
        return int(np.unpackbits(self.bits).sum()) <= sum(_allows(self, token) for token in set(tokens))


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """`matcher` stands at the beginning, its mask computed, and is only copied.

    `ends` [V/32] int32: the tokens that end a text. `tokens`: how many the vocabulary has; a model may have more.
    """

    matcher: LLMatcher
    ends: NDArray[np.int32]
    tokens: int


class GrammarCompiler:
    """Compiles grammars for one model, in a thread of its own. `tokenizer` reads the model's, once needed.

    The thread's stack is large: the library descends as deep as a grammar does, and a process whose stack ends is gone.
    """

    def __init__(self, tokenizer: Callable[[], Tokenizer], eos_token_ids: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._compile: Compile | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def submit(self, grammar: str) -> Future[CompiledGrammar]:
        """The future raises GrammarError."""
        with self._lock:
            if self._thread is None:
                self._thread = deep_thread()
            return self._thread.submit(self._compiled, grammar)

    def _compiled(self, grammar: str) -> CompiledGrammar:
        if self._compile is None:
            self._compile = Compile(Vocabulary.of(self._tokenizer(), self._eos_token_ids))
        return self._compile(grammar)


class Compile:
    """Compiles grammars over a vocabulary, in whatever thread asks: one at a time."""

    def __init__(self, vocabulary: Vocabulary):
        self._tokens: LLTokenizer = vocabulary.read()
        self._executor = LLExecutor(1)  # masks computed by it leave the interpreter to other threads
        bits = np.zeros((self._tokens.vocab_size + 31) // 32 * 32, dtype=np.bool_)
        bits[vocabulary.ends] = True
        self._ends = np.packbits(bits, bitorder="little").view(np.int32)

    def __call__(self, grammar: str) -> CompiledGrammar:
        """With the first mask, which is a part of the cost and by which some grammars fail. Raises GrammarError."""
        matcher = LLMatcher(self._tokens, _unforced(grammar), log_level=0, limits=LIMITS)
        if not matcher.is_error():
            words = np.zeros_like(self._ends)
            self._executor.unsafe_compute_mask_ptr([(matcher, 0)], words.ctypes.data, words.nbytes, 1)
        if matcher.is_error():
            raise GrammarError(_told(matcher))
        return CompiledGrammar(matcher, self._ends, self._tokens.vocab_size)


def _unforced(grammar: str) -> str:
    """The same grammar, its text free to be written in any tokens. What is no grammar stays as it is.

    Text in Lark's form is told so after all its own options, which go on to hold; a schema is put into one that is.
    """
    if not grammar.startswith("{"):
        return f"{grammar}\n{UNFORCED}"
    try:  # JSON around one or several, of which the first is where it begins
        first, *others = [dict(part) for part in orjson.loads(grammar)["grammars"]]
        if isinstance(lark := first.get("lark_grammar"), str):
            grammars = [{**first, "lark_grammar": f"{lark}\n{UNFORCED}"}, *others]
        else:
            grammars = [AROUND, {**first, "name": "whole"}, *others]
        return orjson.dumps({"grammars": grammars}).decode()
    except (ValueError, KeyError, TypeError):  # orjson.dumps raises the last for what is nested too deep
        return grammar


def _told(matcher: LLMatcher) -> str:
    """What is wrong, in the library's words: after those of a mask that fails come its whole state and the grammar."""
    first: str = matcher.get_error().partition("\n<state>")[0].strip()
    first = OWN_LINE.sub("", first)
    return "no text follows it" if first == "NoExtensionBias" else first


def deep_thread() -> ThreadPoolExecutor:
    """One thread, with the stack that grammars need."""
    made = ThreadPoolExecutor(1, thread_name_prefix="grammar")
    before = threading.stack_size(STACK)
    try:
        made.submit(int).result()  # the thread begins now
    finally:
        threading.stack_size(before)
    return made


class GrammarState:
    """Where one sequence's output stands in its grammar. Used by one thread at a time."""

    def __init__(self, compiled: Future[CompiledGrammar]):
        self._compiled = compiled
        self._matcher: LLMatcher | None = None
        self._ends: NDArray[np.int32] = np.zeros(0, dtype=np.int32)
        self._tokens = 0  # of the vocabulary; the matcher is of no more use once it is asked about one beyond them
        self._length = 0  # output tokens taken in

    @property
    def ready(self) -> bool:
        """False while the grammar is being compiled: following would wait for it."""
        return self._compiled.done()

    def when_ready(self, told: Callable[[], object]) -> None:
        """Call `told` once it is, in whatever thread; now if it is."""
        self._compiled.add_done_callback(lambda _: told())

    def follow(self, output: Sequence[int]) -> None:
        """Take in the tokens of `output` that are new; the others must be those taken in before. Raises GrammarError.

        Waits where the grammar is still being compiled.
        """
        if self._matcher is None:
            if (mistake := self._compiled.exception()) is not None:  # whatever it is, it is this grammar's alone
                raise GrammarError(str(mistake)) from mistake
            compiled = self._compiled.result()
            self._matcher, self._ends, self._tokens = compiled.matcher.deep_copy(), compiled.ends, compiled.tokens
        new = list(output[self._length :])
        if new and self._matcher.try_consume_tokens(new) < len(new):
            raise GrammarError(f"the output does not follow its grammar: {_told(self._matcher)}")
        self._length += len(new)

    def possible(self, output: Sequence[int], draft: Sequence[int]) -> int:
        """How many of the draft's first tokens may follow `output`: about 2 µs, without their masks.

        Before the first draw here it is not known, and all may; an output that does not follow shows at its draw.
        """
        if self._matcher is None:
            return len(draft)
        try:
            self.follow(output)
        except GrammarError:
            return 0
        valid: int = self._matcher.validate_tokens(list(takewhile(self._known, draft)))
        return valid

    def _known(self, token: int) -> bool:
        return 0 <= token < self._tokens

    def allowed(self, output: Sequence[int], draft: Sequence[int] = ()) -> list[Allowed | None]:
        """What may follow `output`, and it and each further token of `draft`: None after one that may not come.

        Raises GrammarError.
        """
        self.follow(output)
        matcher = self._matcher
        assert matcher is not None
        found: list[Allowed | None] = [self._next(matcher)]
        taken = 0
        for token in draft:
            if not _allows(found[-1], token) or not matcher.try_consume_tokens([token]):
                break
            taken += 1
            found.append(self._next(matcher))
        if taken:
            matcher.rollback(taken)
        return found + [None] * (len(draft) + 1 - len(found))

    def drawn(
        self, output: Sequence[int], draft: Sequence[int], best: Sequence[int], choose: Callable[[int, Allowed], int]
    ) -> list[int]:
        """The best token after `output`, and after each token of `draft` up to the first that is not the best.

        `best` has the best ones of all tokens, one more than the draft; `choose(i, allowed)` gives the i-th of those
        that may come, -1 for none. It is asked only where the best of all may not come: looking at one token takes a
        tenth of a mask's time. What follows a token that is not the draft's is left as it is. Raises GrammarError.
        """
        self.follow(output)
        matcher, found, taken = self._matcher, list(best), 0
        assert matcher is not None
        try:
            for i, token in enumerate(best):
                if not self._known(token) or matcher.validate_tokens([token]) < 1:
                    found[i] = choose(i, self._next(matcher))
                if i == len(draft) or found[i] != draft[i] or not matcher.try_consume_tokens([found[i]]):
                    break
                taken += 1
        finally:
            if taken:
                matcher.rollback(taken)
        return found

    def _next(self, matcher: LLMatcher) -> Allowed:
        words = np.zeros_like(self._ends)
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if matcher.is_error():
            raise GrammarError(_told(matcher))
        return Allowed(words.view(np.uint8), not (words & ~self._ends).any())


def _allows(allowed: Allowed | None, token: int) -> bool:
    if allowed is None or not 0 <= token < 8 * len(allowed.bits):
        return False
    return bool(allowed.bits[token >> 3] >> (token & 7) & 1)


class Grammars:
    """The grammars of one worker's sequences."""

    def __init__(self, compiler: GrammarCompiler):
        self.compiler = compiler
        self._compiled: OrderedDict[tuple[str, str], Future[CompiledGrammar]] = OrderedDict()
        self._lock = threading.Lock()

    def begin(self, grammar: str, owner: str = "") -> GrammarState:
        """The state before the first token. The grammar is compiled meanwhile, unless it has been for the owner lately.

        Owners share none: by time, one could tell what forms another asks for.
        """
        name = (owner, grammar)
        with self._lock:
            compiled = self._compiled.get(name)
            if compiled is None:
                compiled = self._compiled[name] = self.compiler.submit(grammar)
                if len(self._compiled) > KEPT:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(name)
        return GrammarState(compiled)
