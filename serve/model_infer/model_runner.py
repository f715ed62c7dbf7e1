"""Runs plans: changes the batch, computes the step, samples."""

import time
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from models.forward import ForwardBatch
from models.parallel import TensorParallel
from serve.ipc.messages import JoinRow, StepPlan, StepResult, TokenLogprobs
from serve.model_infer.attention_state.coordinator import StateCoordinator
from serve.model_infer.errors import PlanError
from serve.model_infer.graphs import DecodeGraphs
from serve.model_infer.input_batch import InputBatch, TokenSource
from serve.model_infer.logprobs import token_logprobs
from serve.model_infer.profiler import Phase, StepProfiler
from serve.model_infer.readback import Readback
from serve.model_infer.sampler import PendingTokens, SampledTokens, Sampler
from serve.model_infer.step_inputs import StepInputs
from serve.types import SamplingParams


class Model(Protocol):
    """What the loader gives."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor: ...


class RequestSource(TokenSource, Protocol):
    """The part of the request table that a worker reads."""

    def sampling(self, slot: int) -> SamplingParams: ...


@dataclass(frozen=True)
class RunningStep:
    """A launched step. rows: int64 [S], batch rows that sample; sampled: their tokens, on rank 0; end: of its work."""

    result: StepResult
    begun: float
    rows: np.ndarray | None
    sampled: PendingTokens | None
    end: Readback

    def is_done(self) -> bool:
        """Whether `complete` would not have to wait."""
        return self.end.is_done()


class ModelRunner:
    """One rank's side of a step. One thread.

    Any exception leaves the batch undefined: the worker must end, and with it the engine group. A row whose logits are
    not finite, or whose parameters do not fit, is not an exception: it is named in the result and stays until a plan
    takes it out.
    """

    def __init__(
        self,
        model: Model,
        batch: InputBatch,
        states: StateCoordinator,
        sampler: Sampler,
        source: RequestSource,
        group: TensorParallel,
        epoch: int,
        graphs: DecodeGraphs | None = None,
        profiler: StepProfiler | None = None,
    ) -> None:
        """graphs: for decode steps, where the device has them; all other steps go to the model itself.

        profiler: what `start_profile` switches on.
        """
        self.batch = batch
        self.num_steps = 0
        self.num_tokens = 0
        self._model = model
        self._states = states
        self._sampler = sampler
        self._source = source
        self._group = group
        self._epoch = epoch
        self._graphs = graphs
        self._profiler = profiler
        self._recording: StepProfiler | None = None
        self._next_step: int | None = None
        self._last_completed = 0.0
        self._num_prompt_logprobs: dict[int, int] = {}

    def run(self, plan: StepPlan) -> StepResult:
        """`launch` and `complete` in one."""
        return self.complete(self.launch(plan))

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> RunningStep:
        """Start a plan; what it samples stays on the device, so that the next plan can be launched before its end.

        Raises PlanError for a plan that is stale, out of order or inconsistent.
        """
        begun = time.perf_counter()
        self._mark(Phase.WAIT)
        self._check_order(plan)
        self.batch.apply(plan)
        self._states.begin(plan.joins)
        for row in plan.leaves:
            self._sampler.remove(row)
            self._num_prompt_logprobs.pop(row, None)
        for join in plan.joins:
            self._admit(join)
        result = StepResult(plan.epoch, plan.step, self._group.rank, 0.0)
        inputs = self.batch.build(plan)
        self._mark(Phase.PREPARE)
        sampled = None if inputs is None else self._compute(inputs, result)
        if plan.snapshots:
            self._states.snapshot(self.batch.snapshots(plan))
        self.num_steps += 1
        if self._recording is not None:
            self._recording.end_step(0 if inputs is None else inputs.num_tokens, inputs is None or inputs.is_decode)
        rows = None if inputs is None else inputs.sample_rows
        return RunningStep(result, begun, rows, sampled, Readback([], self.batch.device))

    @torch.inference_mode()
    def complete(self, step: RunningStep) -> StepResult:
        """Wait for a launched step, the oldest that is not complete, and say what it gave."""
        step.end.wait()
        if step.sampled is not None and step.rows is not None:
            _fill_result(step.result, step.rows, step.sampled.result())
        now = time.perf_counter()
        step.result.compute_s = now - max(step.begun, self._last_completed)
        self._last_completed = now
        return step.result

    def start_profile(self) -> None:
        """Record where the time of steps goes, until `stop_profile`; steps do not run as graphs meanwhile."""
        if self._profiler is not None:
            self._profiler.start()
            self._recording = self._profiler

    def stop_profile(self) -> dict[str, Any]:
        """What was recorded, see `StepProfiler.stop`; empty when nothing was."""
        recording, self._recording = self._recording, None
        return {} if recording is None else recording.stop()

    def _mark(self, phase: Phase) -> None:
        if self._recording is not None:
            self._recording.mark(phase)

    def _check_order(self, plan: StepPlan) -> None:
        if plan.epoch != self._epoch:
            raise PlanError(f"plan of epoch {plan.epoch} in an engine of epoch {self._epoch}")
        if self._next_step is not None and plan.step != self._next_step:
            raise PlanError(f"plan {plan.step} where {self._next_step} was due")
        self._next_step = plan.step + 1

    def _admit(self, join: JoinRow) -> None:
        params = self._source.sampling(join.slot)
        # After a preemption in decoding the prompt's log-probabilities have been delivered already. Every rank asks for
        # the same logits rows: they are gathered from all.
        if params.prompt_logprobs is not None and join.num_known == join.num_prompt:
            self._num_prompt_logprobs[join.row] = params.prompt_logprobs
            self.batch.score_prompt(join.row)
        if self._group.rank == 0:
            tokens = self._source.tokens(join.slot)
            prompt, output = tokens[: join.num_prompt], tokens[join.num_prompt : join.num_known]
            self._sampler.add(join.row, params, prompt, output)

    def _compute(self, inputs: StepInputs, result: StepResult) -> PendingTokens | None:
        logits = self._forward(inputs)
        self._mark(Phase.FORWARD)
        num_sampling = len(inputs.sample_rows)
        if self._group.rank == 0 and inputs.prompt_spans:
            result.prompt_logprobs = self._score_prompts(inputs, logits)
        sampled = self._sample(inputs, logits[:num_sampling]) if num_sampling else None
        self._mark(Phase.SAMPLE)
        self.num_tokens += inputs.num_tokens
        return sampled

    def _forward(self, inputs: StepInputs) -> torch.Tensor:
        logits = None
        if self._graphs is not None and self._recording is None:
            if inputs.is_decode:
                logits = self._graphs.forward(inputs.forward)
            elif inputs.is_tail:
                logits = self._graphs.forward_tail(inputs.forward)
        return self._model.forward(inputs.forward) if logits is None else logits

    def _sample(self, inputs: StepInputs, logits: torch.Tensor) -> PendingTokens | None:
        """Rank 0 samples; the ids reach every rank's batch."""
        if self._group.rank != 0:
            token_ids = torch.zeros(len(inputs.sample_rows), dtype=torch.int64, device=logits.device)
            self.batch.store_sampled(inputs, self._group.broadcast(token_ids))
            return None
        sampled = self._sampler.launch(logits, inputs.sample_rows, inputs.sample_positions)
        self.batch.store_sampled(inputs, self._group.broadcast(sampled.token_ids))
        return sampled

    def _score_prompts(self, inputs: StepInputs, logits: torch.Tensor) -> dict[int, list[TokenLogprobs]]:
        scores = {}
        for span in inputs.prompt_spans:
            count = len(span.targets)
            rows = logits[span.first_logit : span.first_logit + count]
            targets = torch.from_numpy(span.targets).to(logits.device)
            scores[span.row] = token_logprobs(rows, targets, [self._num_prompt_logprobs[span.row]] * count)
        return scores


def _fill_result(result: StepResult, rows: np.ndarray, sampled: SampledTokens) -> None:
    """A failed row has no token in the result."""
    result.failed_rows = sampled.failed
    result.rows = rows.tolist()
    result.token_ids = sampled.id_list
    result.logprobs = sampled.logprobs
    if sampled.failed:
        kept = [pair for pair in zip(result.rows, result.token_ids, strict=True) if pair[0] not in sampled.failed]
        result.rows = [row for row, _ in kept]
        result.token_ids = [token for _, token in kept]
