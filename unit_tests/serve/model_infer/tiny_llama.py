"""A tiny llama whose reference is transformers, and a driver that plays the router."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from kernels.dispatch import get_backend
from models.config import load_model_config
from models.loader import load_model
from models.parallel import SingleRank, TensorParallel
from models.source import resolve_model
from models.state_layout import derive_layout
from serve.ipc.messages import JoinRow, StepPlan, StepResult
from serve.model_infer.attention_state.coordinator import StateCoordinator
from serve.model_infer.input_batch import InputBatch
from serve.model_infer.model_runner import ModelRunner
from serve.model_infer.page_table import PageTable
from serve.model_infer.profiler import StepProfiler
from serve.model_infer.sampler import Sampler
from serve.types import SamplingParams
from unit_tests.serve.model_infer.builders import CPU, FakeTable

VOCAB = 320
PAGE = 16
NUM_PAGES = 200
EPOCH = 4


@cache
def _home() -> TemporaryDirectory[str]:
    """Removed when the process ends."""
    return TemporaryDirectory(prefix="vt-tiny-")


@cache
def model_dir() -> Path:
    """A llama of two layers, three kv heads and six query heads, saved once a process."""
    from transformers import LlamaConfig, LlamaForCausalLM

    path = Path(_home().name)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=96,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.3,  # large enough that greedy texts do not repeat one token
        eos_token_id=2,
        bos_token_id=1,
    )
    LlamaForCausalLM(config).float().save_pretrained(path)
    return path


@cache
def _reference() -> torch.nn.Module:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(model_dir(), dtype=torch.float32).eval()


def reference_logits(token_ids: list[int]) -> torch.Tensor:
    """float32 [num_tokens, V] by transformers."""
    with torch.inference_mode():
        return _reference()(torch.tensor([token_ids])).logits[0]


def follows_greedily(prompt: list[int], output: list[int]) -> bool:
    """Whether each token of `output` is transformers' most probable one after what stands before it."""
    best = reference_logits(prompt + output[:-1])[len(prompt) - 1 :].argmax(dim=-1)
    return best.tolist() == output


def make_runner(
    table: FakeTable, group: TensorParallel | None = None, directory: Path | None = None, max_rows: int = 8
) -> ModelRunner:
    """A runner of one rank over the tiny llama in float32."""
    group = group or SingleRank()
    source = resolve_model(str(directory or model_dir()), "auto", offline=True)
    config = load_model_config(source)
    backend = get_backend(CPU)
    loaded = load_model(config, source, device=CPU, dtype=torch.float32, tp=group, backend=backend)
    layout = derive_layout(config, PAGE, "float32")
    states = StateCoordinator(layout, group.size, group.rank, CPU)
    states.allocate({"full": NUM_PAGES})
    tables = {"full": PageTable("full", PAGE, NUM_PAGES, max_rows, 4)}
    batch = InputBatch(tables, {}, states.leaves(), table, max_rows, CPU)
    sampler = Sampler(max_rows, VOCAB, config.eos_token_ids, CPU)
    profiler = StepProfiler(backend, CPU)
    return ModelRunner(loaded.model, batch, states, sampler, table, group, EPOCH, profiler=profiler)


class Driver:
    """Plays the router: keeps tokens and pages of each row, sends plans, takes results."""

    def __init__(self, runner: ModelRunner, table: FakeTable) -> None:
        self.runner, self.table = runner, table
        self.step = 0
        self.outputs: dict[int, list[int]] = {}  # by slot
        self.slots: dict[int, int] = {}  # by row
        self.pages: dict[int, list[int]] = {}  # by slot
        self.lengths: dict[int, int] = {}  # computed tokens by slot
        self.free = list(range(NUM_PAGES - 1, -1, -1))
        self.prompts: dict[int, list[int]] = {}
        self.joins: list[JoinRow] = []

    def join(self, row: int, slot: int, prompt: list[int], params: SamplingParams | None = None) -> None:
        """A new request joins with the next plan."""
        self.prompts[slot] = prompt
        self.outputs[slot] = []
        self.pages[slot] = []
        self.lengths[slot] = 0
        self.table.fill(slot, prompt, params)
        self._join(row, slot, 0)

    def rejoin(self, row: int, slot: int, num_cached: int) -> None:
        """A request that left joins again with what it has generated; `num_cached` tokens stay in its pages."""
        known = self.prompts[slot] + self.outputs[slot]
        for place, token in enumerate(known):
            self.table.append(slot, place, token)
        kept = num_cached // PAGE
        self.free += self.pages[slot][kept:]
        self.pages[slot] = self.pages[slot][:kept]
        self._join(row, slot, num_cached)

    def _join(self, row: int, slot: int, num_cached: int) -> None:
        self.slots[row] = slot
        self.lengths[slot] = num_cached
        known = len(self.prompts[slot]) + len(self.outputs[slot])
        pages = {"full": list(self.pages[slot])}
        generation = self.table.generation(slot)
        self.joins.append(JoinRow(row, slot, generation, len(self.prompts[slot]), known, num_cached, pages))

    def run(
        self, chunks: dict[int, int] | None = None, leaves: list[int] | None = None, paused: list[int] | None = None
    ) -> StepResult:
        """One plan: chunks by row, all other rows whose known tokens are computed decode."""
        plan = StepPlan(EPOCH, self.step, leaves=leaves or [], joins=self.joins, paused=paused or [])
        plan.chunks = list((chunks or {}).items())
        self.step, self.joins = self.step + 1, []
        for row in set(plan.leaves) - {join.row for join in plan.joins}:
            del self.slots[row]
        for row, slot in self.slots.items():
            self._advance(plan, row, slot, (chunks or {}).get(row))
        result = self.runner.run(plan)
        for row, token in zip(result.rows, result.token_ids, strict=True):
            self.outputs[self.slots[row]].append(token)
        return result

    def _advance(self, plan: StepPlan, row: int, slot: int, chunk: int | None) -> None:
        known = len(self.prompts[slot]) + len(self.outputs[slot])
        is_decoding = self.lengths[slot] >= known - 1 and self.outputs[slot] and row not in plan.paused
        if chunk is None and not is_decoding:
            return
        self.lengths[slot] += 1 if chunk is None else chunk
        missing = -(-self.lengths[slot] // PAGE) - len(self.pages[slot])
        if missing > 0:
            new = [self.free.pop() for _ in range(missing)]
            self.pages[slot] += new
            plan.new_pages.append((row, "full", new))


def random_prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, length).tolist()
