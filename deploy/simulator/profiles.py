"""What the steps of known models take on known hardware: the truth of a simulation, which its workers have to learn.

Pure data and arithmetic. The A100 tables and their form are those of DistServe's artefact (Apache-2.0),
simdistserve/estimators/profile_data; milliseconds there and in the tables here, seconds everywhere else.

    prompts    a + b·Σl + c·Σl² + overhead         decoding    a + b·Σ(n + 1) + c·B + overhead
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, astuple, dataclass, replace
from typing import Protocol

import numpy as np

from serving.step_cost import StepCost, StepLoad, pairs

LARGE_BATCH = 95  # sequences from which on a decode step has the coefficients of large batches
PIPELINE_MS = 1.0  # a step, for each stage of a pipeline; there is one
STEP_MS = 2.0  # a step, of the system around the model
STEP_CONTEXT_MS = 1e-4  # the same for each token of context
LEARNED_FROM = 1000  # steps that a worker's fit is of, once it has served


@dataclass(slots=True)
class StepWork:
    """What a step computes: chunks of prompts, and sequences that decode a token each."""

    prompts: int = 0
    prompt_tokens: int = 0
    prompt_pairs: float = 0.0  # of a new token and one it attends to
    prompt_context: int = 0
    decoding: int = 0
    decoding_context: int = 0

    def add_prompt(self, start: int, count: int) -> None:
        """`count` tokens of a prompt from position `start` on."""
        self.prompts += 1
        self.prompt_tokens += count
        self.prompt_pairs += pairs(start, count)
        self.prompt_context += start + count

    def add_decode(self, computed: int, drafted: int = 0) -> None:
        """The token after `computed` ones. Drafted ones after it are computed like a prompt's; KV is read once."""
        self.decoding += 1
        self.decoding_context += computed + 1
        self.prompt_tokens += drafted
        self.prompt_pairs += pairs(computed + 1, drafted)

    @property
    def load(self) -> StepLoad:
        """The same in the form that workers fit their costs to."""
        return StepLoad(
            self.prompt_tokens + self.decoding,
            self.prompt_pairs + self.decoding_context,
            self.prompts + self.decoding,
            self.prompt_context + self.decoding_context,
        )


class CostModel(Protocol):
    """What steps take, wherever that is known from: tables, a worker's fit, or the hardware (hardware.py)."""

    def seconds(self, work: StepWork) -> float:
        """A step, from its begin to the next one's on a busy engine."""
        ...


@dataclass(frozen=True, slots=True)
class Linear:
    """Coefficients of one kind of step, in milliseconds: fixed, and for what the module's legend has after b and c."""

    a: float
    b: float
    c: float


@dataclass(frozen=True, slots=True)
class PhaseTables:
    """A model whose prompts and decode steps were measured apart. A step of both reads the weights once.

    Milliseconds of the system around the model: `step_ms` each step, `context_ms` for each token of context,
    `prompt_ms` and `sequence_ms` for each prompt and each sequence that decodes. `prompts` multiplies the prompts'.
    """

    prefill: Linear
    decode: Linear
    decode_large: Linear
    _: KW_ONLY
    step_ms: float = PIPELINE_MS + STEP_MS
    context_ms: float = STEP_CONTEXT_MS
    prompt_ms: float = 0.0
    sequence_ms: float = 0.0
    prompts: float = 1.0

    def seconds(self, work: StepWork) -> float:
        decode = self.decode_large if work.decoding >= LARGE_BATCH else self.decode
        fixed = max(self.prompts * self.prefill.a if work.prompts else 0.0, decode.a if work.decoding else 0.0)
        # l² new tokens squared are twice their pairs; a later chunk of a prompt attends to the earlier ones as well.
        prompts = self.prompts * (self.prefill.b * work.prompt_tokens + 2 * self.prefill.c * work.prompt_pairs)
        decoding = decode.b * work.decoding_context + decode.c * work.decoding
        overhead = self.step_ms + self.context_ms * (work.prompt_context + work.decoding_context)
        overhead += self.prompt_ms * work.prompts + self.sequence_ms * work.decoding
        return (fixed + prompts + decoding + overhead) / 1e3


@dataclass(frozen=True, slots=True)
class Fitted:
    """A model known by one cost for steps of every kind, as workers fit it."""

    cost: StepCost

    def seconds(self, work: StepWork) -> float:
        return self.cost.seconds(work.load)


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """A model on a worker: what its steps take, and what its KV cache holds.

    `kv_bytes` are bytes of KV a token, `layers` the model's: with each, a share of a prompt's KV may leave.
    """

    name: str
    model: str
    steps: CostModel
    kv_tokens: int
    kv_bytes: int
    layers: int
    max_model_len: int = 2048
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 512

    def seconds(self, work: StepWork) -> float:
        """A step without noise."""
        return self.steps.seconds(work)

    def prompt_seconds(self, tokens: int) -> float:
        """A prompt alone on the worker, in steps of the most tokens."""
        seconds = 0.0
        for start in range(0, tokens, self.max_num_batched_tokens):
            work = StepWork()
            work.add_prompt(start, min(self.max_num_batched_tokens, tokens - start))
            seconds += self.seconds(work)
        return seconds

    def fitted(self) -> StepCost:
        """The cost in the workers' form that is nearest over steps of many kinds: least squares of relative errors.

        Coefficients that come out negative are left out, since none may be. `error` is what the form cannot say.
        """
        loads = list(_loads(self.max_num_batched_tokens))
        seconds = np.array([self.seconds(work) for work in loads])
        columns = np.array([[1.0, *astuple(work.load)] for work in loads]) / seconds[:, None]
        kept = list(range(columns.shape[1]))
        while True:
            found = np.linalg.lstsq(columns[:, kept], np.ones(len(loads)), rcond=None)[0]
            if found.min() >= 0:
                break
            kept.pop(int(found.argmin()))
        values = dict(zip(kept, found.tolist(), strict=True))
        fixed, token, pair, sequence, context = (values.get(index, 0.0) for index in range(5))
        error = float(np.log(columns[:, kept] @ found).std())
        return StepCost(fixed=fixed, token=token, pair=pair, sequence=sequence, context=context, error=error)

    def learned(self) -> StepCost:
        """What workers with this profile have learned of their steps once they have served."""
        cost = self.steps.cost if isinstance(self.steps, Fitted) else self.fitted()
        return replace(cost, samples=max(cost.samples, LEARNED_FROM))

    def decode_seconds(self, sequences: int, context: int) -> float:
        """A decode step of sequences with so much context each."""
        return self.seconds(StepWork(decoding=sequences, decoding_context=sequences * context))


def _loads(most: int) -> Iterator[StepWork]:
    """Steps as they come: a chunk of a prompt or none, beside decoding sequences or none."""
    for start, count in ((0, 0), (0, most // 4), (0, most), (most, most), (2 * most, most // 2)):
        for decoding in (0, 1, 8, 32, 64):
            for context in (100, 500, 1500):
                work = StepWork(decoding=decoding, decoding_context=decoding * context)
                if count:
                    work.add_prompt(start, count)
                if count or decoding:
                    yield work


def _opt(model: str, kv_tokens: int, prefill: Linear, decode: Linear, large: Linear) -> Profile:
    """Keys and values of every layer, 2 bytes a number."""
    hidden, layers = {"opt-13b": (5120, 40), "opt-66b": (9216, 64)}[model]
    return Profile(
        name="",
        model=model,
        steps=PhaseTables(prefill, decode, large),
        kv_tokens=kv_tokens,
        kv_bytes=2 * 2 * hidden * layers,
        layers=layers,
    )


# DistServe's own engine, tensor parallel over 1, 2 and 4 devices (66B: 2, 4 and 8); vLLM of its time where so named.
_A100 = {
    "a100-opt13b": _opt(
        *("opt-13b", 66_144),
        Linear(18.10254647486372, 0.1019122572698738, 7.122264314252114e-06),
        Linear(19.934702624895458, 0.0006269356524350583, 0.03850697740828398),
        Linear(7.1661889468253595, 0.0005798000403396046, 0.15831096191764046),
    ),
    "a100-opt13b-vllm": _opt(
        *("opt-13b", 66_144),
        Linear(22.052204789310185, 0.14050923870128956, 8.076584822611088e-06),
        Linear(23.475041008414784, 0.000592934466077393, 0.060726861260369455),
        Linear(20.206356173691958, 0.0004907727036234946, 0.1200031385587413),
    ),
    "a100-opt13b-tp2": _opt(
        *("opt-13b", 163_008),
        Linear(14.742973695171262, 0.06857720739764, 2.4495727400243586e-06),
        Linear(13.294796350285385, 0.00034109219700723494, 0.06296393225243659),
        Linear(10.638741913126715, 0.00031183369638295723, 0.08562913604102729),
    ),
    "a100-opt13b-tp4": _opt(
        *("opt-13b", 356_736),
        Linear(12.062297033449054, 0.03808140082550695, 5.226249731787869e-07),
        Linear(10.256231678259395, 0.00018786702316166354, 0.03269273629225551),
        Linear(10.483514938375274, 0.00017120888562939117, 0.04566648525887034),
    ),
    "a100-opt66b-tp2": _opt(
        *("opt-66b", 11_600),
        Linear(43.05881348288936, 0.2742292870458432, 2.2478042467169447e-05),
        Linear(48.288015489286245, 0.0009424343535737985, 0.12755020094383188),
        Linear(28.727693993711597, 0.00047448475459061987, 0.29617792360743994),
    ),
    "a100-opt66b-tp4": _opt(
        *("opt-66b", 78_496),
        Linear(29.441636037717455, 0.151352180625198, 8.317450765979451e-06),
        Linear(30.760284619429587, 0.000451947603788462, 0.063284195750671),
        Linear(27.47082137429487, 0.0004046845541646486, 0.12480667738300383),
    ),
    "a100-opt66b-tp8": _opt(
        *("opt-66b", 212_304),
        Linear(25.490662375045222, 0.10659177664763161, 3.3910502518615973e-06),
        Linear(23.15511135047022, 0.00022691488497826264, 0.04800638397272423),
        Linear(21.71772781576609, 0.0003758089655762475, 0.08978614175851013),
    ),
}

# SmolLM2-135M-Instruct in bfloat16 on two cores of a server's x86-64 CPU: a fit by hand to TTFT and TPOT in
# bench/results/2026-11-20-c1.json, 2026-11-20-c8-c32.json and 2026-11-20-2048.json, within 6 %.
_CPU = Profile(
    name="cpu-smollm2",
    model="smollm2-135m",
    steps=Fitted(StepCost(fixed=3.17e-3, token=2.42e-4, pair=8.6e-8, sequence=8e-5, context=3.2e-7, error=0.1)),
    kv_tokens=93_200,
    kv_bytes=23_040,
    layers=30,
    max_num_seqs=128,
)

# The same in INT8 on one thread, as the workers of bench.policies are: 1,024 tokens of a prompt take 1.05 s there, a
# decode step 10 ms (bench/results/2026-11-22-goodput-real.md); by hand, within 6 %.
_CPU_THREAD = replace(
    _CPU,
    name="cpu-smollm2-int8",
    steps=Fitted(StepCost(fixed=9e-3, token=8.5e-4, pair=2e-7, sequence=1e-4, context=1e-6, error=0.1)),
    kv_tokens=16_704,
)

_NAMED = {**_A100, _CPU.name: _CPU, _CPU_THREAD.name: _CPU_THREAD}
PROFILES: dict[str, Profile] = {name: replace(found, name=name) for name, found in _NAMED.items()}


def profile_of(name: str) -> Profile:
    """Raises ValueError for a name that is not in PROFILES."""
    if name not in PROFILES:
        raise ValueError(f"there is no profile {name!r}, but {', '.join(PROFILES)}")
    return PROFILES[name]
