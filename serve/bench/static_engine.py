"""A ledger and a model runner in one process, without router, HTTP or any waiting: the engine's own step times."""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from kernels.dispatch import get_backend
from models.config import ModelConfig, load_model_config
from models.errors import ModelError
from models.loader import load_model
from models.parallel import SingleRank
from models.source import resolve_model
from models.state_layout import derive_layout
from serve.bench.cells import Cell, Phase
from serve.bench.flags import BenchError
from serve.bench.static_options import StaticBenchOptions
from serve.hashing import PageHasher
from serve.ipc.messages import JoinRow, StepPlan
from serve.model_infer.attention_state.base import TORCH_DTYPES
from serve.model_infer.attention_state.coordinator import StateCoordinator
from serve.model_infer.graphs import make_graphs
from serve.model_infer.input_batch import InputBatch
from serve.model_infer.memory_info import available_memory
from serve.model_infer.model_runner import Model, ModelRunner, RunningStep
from serve.model_infer.page_table import PageTable, WorkingPages
from serve.model_infer.sampler import Sampler
from serve.router.holding import Holding
from serve.router.ledger import Reservation, StateLedger
from serve.router.prefix_index import GroupSpec
from serve.types import SamplingParams


class PromptTable:
    """The runner's view of the request table, in plain memory: one slot a row, always of generation 1."""

    def __init__(self, max_rows: int) -> None:
        self._tokens = [np.zeros(0, dtype=np.uint32)] * max_rows
        self._sampling = SamplingParams(max_tokens=1 << 20, temperature=0.0, ignore_eos=True)

    def fill(self, slot: int, tokens: np.ndarray) -> None:
        """Put a prompt into a slot."""
        self._tokens[slot] = tokens

    def generation(self, slot: int) -> int:
        return 1

    def tokens(self, slot: int) -> np.ndarray:
        return self._tokens[slot]

    def sampling(self, slot: int) -> SamplingParams:
        return self._sampling


@dataclass(frozen=True)
class CellRun:
    """One repeat of a cell. step_seconds: of each timed step; cached_tokens: that the ledger gave, over the batch."""

    step_seconds: list[float]
    cached_tokens: int


@dataclass(frozen=True)
class _Shape:
    """Sizes that the cells of a run need. num_pages: of each state group."""

    max_rows: int
    max_pages: int
    num_pages: int


class StaticEngine:
    """Runs cells one after another. Device pools are filled with random values, so that cached pages are data."""

    def __init__(self, options: StaticBenchOptions, cells: list[Cell]) -> None:
        self.device = _device(options.device)
        if self.device.type == "cpu":
            torch.set_num_threads(options.cpu_threads or len(os.sched_getaffinity(0)))
        self._options = options
        self._rng = np.random.default_rng(0)
        shape = _shape(cells, options)
        try:
            source = resolve_model(options.model, options.load_format)
            self.config = load_model_config(source)
            _check_context(self.config, shape.max_pages * options.page_size, cells)
            self.data_type = _data_type(options.data_type, self.config.dtype)
            self.layout = derive_layout(self.config, options.page_size, self.data_type)
            self._check_memory(shape)
            loaded = load_model(
                self.config,
                source,
                device=self.device,
                dtype=TORCH_DTYPES[self.data_type],
                tp=SingleRank(),
                backend=get_backend(self.device),
                max_positions=shape.max_pages * options.page_size,
            )
        except (ModelError, ValueError, NotImplementedError) as error:
            raise BenchError(str(error)) from error
        self._table = PromptTable(shape.max_rows)
        specs = [GroupSpec.of(group, options.page_size) for group in self.layout.groups]
        counts = {group.name: shape.num_pages for group in self.layout.groups}
        self._ledger = StateLedger(specs, counts, options.page_size)
        self._hasher = PageHasher(bytes(32), b"bench", options.page_size)
        self._runner = self._make_runner(loaded.model, shape, counts)
        self._step = 0

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype."""
        return TORCH_DTYPES[self.data_type]

    def run(self, cell: Cell) -> CellRun:
        """One repeat with fresh prompts. PREFILL times every step up to the first tokens, DECODE `decode_steps`."""
        prompts = self._rng.integers(0, self.config.vocab_size, size=(cell.batch, cell.context), dtype=np.uint32)
        num_known = cell.context if cell.phase is Phase.PREFILL else cell.context - 1
        wanted = cell.cached if cell.phase is Phase.PREFILL else num_known
        holdings = [self._hold(row, prompt[:num_known], wanted) for row, prompt in enumerate(prompts)]
        cached = [match * self._options.page_size for _, match in holdings]
        joins = [
            JoinRow(
                row, row, 1, num_known, num_known, cached[row], holding.pages, holding.first_places, holding.restores
            )
            for row, (holding, _) in enumerate(holdings)
        ]
        plans = self._prefill_plans(joins)
        seconds = self._timed(plans)
        if cell.phase is Phase.DECODE:
            seconds = self._timed([StepPlan(0, 0) for _ in range(self._options.decode_steps)])
        self._timed([StepPlan(0, 0, leaves=list(range(cell.batch)), paused=[])])
        for holding, _ in holdings:
            self._ledger.release(holding)
        self._ledger.flush()
        return CellRun(seconds, sum(cached))

    def check_integrity(self) -> list[str]:
        """Problems of ledger and batch, one line each."""
        return self._ledger.check_integrity() + self._runner.batch.check_integrity()

    def _hold(self, row: int, tokens: np.ndarray, cached: int) -> tuple[Holding, int]:
        """Put the first `cached` tokens into the prefix index, then admit the prompt as the router would.

        Returns what it holds, with room for the decode steps, and the number of pages that were hits.
        """
        self._table.fill(row, tokens)
        names = self._hasher.chain(self._hasher.root(None, None), tokens)
        self._publish(names[: cached // self._options.page_size])
        match = self._ledger.match(names, len(tokens))
        holding = self._ledger.acquire(match)
        total = -(-(len(tokens) + self._options.decode_steps + 1) // self._options.page_size)
        self._reserve(holding, total - match.num_pages)  # beside the one page that a state is worked on in
        return holding, match.num_pages

    def _publish(self, names: list[bytes]) -> None:
        """Pages of these names, idle in the index, as an ended request leaves them."""
        if not names:
            return
        holding = self._ledger.open()
        self._reserve(holding, len(names))
        for group, pages in holding.pages.items():
            for page, name in zip(pages, names[-len(pages) :], strict=True):
                self._ledger.publish(group, page, name)
        self._ledger.release(holding)

    def _reserve(self, holding: Holding, count: int) -> None:
        """So many pages of the groups that are paged by place, and one of each other."""
        groups = self._ledger.groups.items()
        counts = {name: 1 if group.spec.has_checkpoints else count for name, group in groups}
        if self._ledger.reserve(holding, counts) is not Reservation.GRANTED:
            raise BenchError("the pool is too small for this cell")

    def _prefill_plans(self, joins: list[JoinRow]) -> list[StepPlan]:
        """Chunks of all rows, packed into steps of `batch_max_tokens`; rows that are through wait for the others."""
        plans: list[StepPlan] = []
        plan, room, done = StepPlan(0, 0, joins=joins), self._options.batch_max_tokens, list[int]()
        for join in joins:
            left = join.num_known - join.num_cached
            while left:
                if room == 0:
                    plans.append(plan)
                    plan, room = StepPlan(0, 0, paused=list(done)), self._options.batch_max_tokens
                count = min(left, room)
                plan.chunks.append((join.row, count))
                left, room = left - count, room - count
            done.append(join.row)
        return [*plans, plan]

    def _timed(self, plans: list[StepPlan]) -> list[float]:
        """Seconds from the end of each step to the end of the next one; like the worker, this launches a plan while
        the one before it runs."""
        seconds: list[float] = []
        begin, running = time.perf_counter(), list[RunningStep]()
        for plan in plans:
            plan.step = self._step
            self._step += 1
            running.append(self._runner.launch(plan))
            while len(running) > 1 or (running and running[0].is_done()):
                begin = self._complete(running.pop(0), begin, seconds)
        for step in running:
            begin = self._complete(step, begin, seconds)
        return seconds

    def _complete(self, step: RunningStep, begin: float, seconds: list[float]) -> float:
        """Note the seconds since `begin`; returns the time of the end."""
        result = self._runner.complete(step)
        if result.failed_rows:
            raise BenchError(f"a row failed: {next(iter(result.failed_rows.values()))}")
        end = time.perf_counter()
        seconds.append(end - begin)
        return end

    def _make_runner(self, model: Model, shape: _Shape, counts: Mapping[str, int]) -> ModelRunner:
        states = StateCoordinator(self.layout, 1, 0, self.device)
        states.allocate(counts)
        self.leaves = states.leaves()
        for leaves in states.leaves().values():
            for leaf in leaves.values():
                leaf.normal_(generator=torch.Generator(self.device).manual_seed(0))
        tables = {
            group.name: PageTable(group.name, group.page_tokens, counts[group.name], shape.max_rows, shape.max_pages)
            for group in self.layout.groups
            if group.is_paged_by_place
        }
        working = {
            group.name: WorkingPages(group.name, group.page_tokens, counts[group.name], shape.max_rows)
            for group in self.layout.groups
            if not group.is_paged_by_place
        }
        batch = InputBatch(tables, working, states.leaves(), self._table, shape.max_rows, self.device)
        sampler = Sampler(shape.max_rows, self.config.vocab_size, self.config.eos_token_ids, self.device)
        graphs = None
        if not self._options.disable_cuda_graph:
            graphs = make_graphs(model, self.config, states, tables, SingleRank(), self.device)
        return ModelRunner(model, batch, states, sampler, self._table, SingleRank(), 0, graphs)

    def _check_memory(self, shape: _Shape) -> None:
        needed = shape.num_pages * sum(group.bytes_per_page for group in self.layout.groups)
        room = available_memory(self.device)
        if needed > room:
            raise BenchError(f"the largest cell needs a pool of {needed >> 20} MiB, {room >> 20} MiB are free")


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise BenchError("--device cuda: no CUDA device")
    return torch.device(name)


def _data_type(wanted: str, checkpoint: str) -> str:
    if wanted != "auto":
        return wanted
    return "float32" if checkpoint == "float32" else "bfloat16"


def _shape(cells: list[Cell], options: StaticBenchOptions) -> _Shape:
    """Rows and pages for the largest cell: a sequence's pages, and as many again while a hit is being set up."""
    pages = {cell: -(-(cell.context + options.decode_steps + 1) // options.page_size) for cell in cells}
    return _Shape(
        max_rows=max(cell.batch for cell in cells),
        max_pages=max(pages.values()),
        num_pages=max(cell.batch * pages[cell] for cell in cells),
    )


def _check_context(config: ModelConfig, needed: int, cells: list[Cell]) -> None:
    longest = max(cell.context for cell in cells)
    if longest > config.max_position_embeddings:
        raise BenchError(f"--context {longest} is beyond the model's {config.max_position_embeddings} positions")
