"""Which recorded systems there are: their engines' costs and limits, and what their processes add around the engines.

Pure data. Every constant is the system's, for all of its runs; docs/simulator.md says where each comes from.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from deploy.simulator.profiles import PhaseTables, Profile, profile_of

BLOCK_SIZE = 16  # tokens, of all of them
UNBOUNDED_TOKENS = 1 << 24  # of KV, where a system has no bound


@dataclass(frozen=True, slots=True)
class SplitSystem:
    """Prompts on one engine, decoding on another of `stages` pipeline stages; a finished prompt waits where it is.

    `decode` gives a step's way through all stages. `handling` seconds pass for each sequence of a step before the next
    is begun. A prompt is taken over while those that wait to decode hold less than `waiting_share` of the KV: its
    transfer takes `move_seconds` and `move_token_seconds` a token, shared among the stages, and no step begins
    meanwhile.
    """

    prefill: Profile
    decode: Profile
    _: KW_ONLY
    stages: int = 1
    handling: float = 0.0
    move_seconds: float = 0.0
    move_token_seconds: float = 0.0
    waiting_share: float = 1.0

    @property
    def model(self) -> Profile:
        """Whose lengths and objectives a workload is drawn for."""
        return self.decode


@dataclass(frozen=True, slots=True)
class ColocatedSystem:
    """One engine whose steps compute whole prompts, where any wait, or else decode.

    A prompt is begun where the share `spare` of all KV blocks stays free.
    """

    engine: Profile
    _: KW_ONLY
    spare: float = 0.0

    @property
    def model(self) -> Profile:
        return self.engine


RecordedSystem = SplitSystem | ColocatedSystem


def paced(name: str, **pace: Any) -> Profile:
    """A profile whose tables have other milliseconds around the model (profiles.PhaseTables)."""
    profile = profile_of(name)
    assert isinstance(profile.steps, PhaseTables)
    return replace(profile, steps=replace(profile.steps, **pace))


def distserve(stages: int = 1) -> SplitSystem:
    """OPT-13B, prompts on two devices in tensor parallel, decoding on as many as there are stages."""
    prefill = replace(paced("a100-opt13b-tp2", step_ms=5.0, prompts=0.97), max_num_seqs=128)
    decode = paced("a100-opt13b", step_ms=1.0 * stages, context_ms=3e-5)
    return SplitSystem(
        replace(prefill, max_num_batched_tokens=8192),
        replace(decode, max_num_seqs=1024, kv_tokens=decode.kv_tokens if stages == 1 else 163_008),
        stages=stages,
        handling=1.2e-4,
        move_seconds=1e-3,
        move_token_seconds=6e-6,
        waiting_share=0.05,
    )


def vllm() -> ColocatedSystem:
    """OPT-13B on one device, as vLLM 0.2 served it."""
    engine = paced("a100-opt13b-vllm", step_ms=0.0, context_ms=0.0, prompt_ms=10.5, sequence_ms=0.44, prompts=0.82)
    engine = replace(engine, max_num_seqs=1024, max_num_batched_tokens=16_384, kv_tokens=57_000)
    return ColocatedSystem(engine, spare=0.01)


SYSTEMS: dict[str, RecordedSystem] = {
    "distserve-c21d11": distserve(),
    "distserve-c21d12": distserve(stages=2),
    "vllm-tp1": vllm(),
}
