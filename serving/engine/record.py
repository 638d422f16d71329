"""What one engine step did and how long each part took: the metrics, the trace and the cost model are fed by these."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """Counts, and seconds on the engine's clock. What is neither forward nor sample is Python."""

    began: float
    sequences: int
    new_tokens: int
    context_tokens: int  # tokens of KV read, summed over the batch
    schedule_seconds: float
    batch_seconds: float  # building the ragged batch
    forward_seconds: float  # in the model
    sample_seconds: float
    step_seconds: float
    waited_seconds: float = 0.0  # of those in the model, for KV on its way from elsewhere
    hidden_seconds: float = 0.0  # Python for this step while another computed: no part of the others

    @property
    def busy_seconds(self) -> float:
        return self.step_seconds - self.waited_seconds

    @property
    def python_seconds(self) -> float:
        return self.step_seconds - self.forward_seconds - self.sample_seconds


@dataclass(slots=True)
class StepTotals:
    """Running sums over all steps of a worker's life."""

    steps: int = 0
    tokens: int = 0
    step_seconds: float = 0.0
    forward_seconds: float = 0.0
    sample_seconds: float = 0.0
    python_seconds: float = 0.0
    waited_seconds: float = 0.0

    def add(self, record: StepRecord) -> None:
        self.steps += 1
        self.tokens += record.new_tokens
        self.step_seconds += record.step_seconds
        self.forward_seconds += record.forward_seconds
        self.sample_seconds += record.sample_seconds
        self.python_seconds += record.python_seconds
        self.waited_seconds += record.waited_seconds
