"""The way from a ChildContext to a worker that can take plans."""

import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from kernels.dispatch import get_backend
from kernels.interface import KernelBackend, KernelShapes, UnsupportedModelError
from models.config import ModelConfig
from models.errors import ModelError
from models.layers.decoder import kernel_shapes
from models.loader import LoadedModel, load_model
from models.parallel import TensorParallel
from models.sharding import shard_model
from models.source import ModelSource
from models.state_layout import StateLayout, derive_layout
from serve.config import ResolvedConfig
from serve.ipc.child import ChildContext, StartError
from serve.ipc.messages import ChildReady, Progress
from serve.ipc.process_control import freeze_start_up
from serve.ipc.request_table import RequestTable
from serve.model_infer.attention_state.base import TORCH_DTYPES
from serve.model_infer.attention_state.coordinator import StateCoordinator
from serve.model_infer.copy_probe import ProbeError, measure_copies
from serve.model_infer.graphs import DecodeGraphs, make_graphs
from serve.model_infer.input_batch import InputBatch
from serve.model_infer.job_answers import RefusedJobs
from serve.model_infer.memory_info import available_memory, resident_bytes
from serve.model_infer.memory_plan import MemoryPlan, MemoryRequest, PageCost, plan_memory
from serve.model_infer.model_runner import Model, ModelRunner
from serve.model_infer.page_table import PageTable, WorkingPages
from serve.model_infer.phases import PhaseClock
from serve.model_infer.profiler import StepProfiler
from serve.model_infer.sampler import Sampler
from serve.model_infer.staging import StagingEngine, StagingParts
from serve.model_infer.staging_setup import attach_arena, build_staging, workspace_bytes
from serve.model_infer.step_memory import step_bytes
from serve.model_infer.tp_group import join_group, smallest
from serve.model_infer.warmup import warm_up, warm_up_variants
from serve.model_infer.worker import Worker

logger = logging.getLogger(__name__)
# Progress messages at most for each this share of the weights: the launcher draws a bar, not a film.
_PROGRESS_STEPS = 50


@dataclass(frozen=True)
class _Model:
    """A model and what it takes to give it a batch."""

    config: ModelConfig
    layout: StateLayout
    loaded: LoadedModel


def start_worker(context: ChildContext) -> tuple[Worker, ChildReady]:
    """Load, plan memory, allocate, warm up. Raises StartError with one line for what the user can put right."""
    clock = PhaseClock()
    config = context.config
    device = _device(config, context.index)
    torch.set_num_threads(config.threads_per_worker)
    with clock.phase("join_group"):
        store = context.run_dir / f"tp-{context.epoch}.store"
        group = join_group(context.index, config.serve.tp, device, store, config.serve.step_timeout)
    backend = get_backend(device, num_threads=config.threads_per_worker)
    shapes = _checked_shapes(context, group, backend)
    compiling = _start_compiling(config, backend, shapes)
    with clock.phase("load_model"):
        model = _load(context, device, group, backend)
    with clock.phase("plan_memory"):
        states = StateCoordinator(model.layout, group.size, group.rank, device)
        staging_bytes = workspace_bytes(context, device)
        step_memory = _step_bytes(config, model.config, group, device)
        plan = _plan_memory(config, states, group, device, staging_bytes + step_memory)
        _allocate(states, plan)
    runner, graphs = _make_runner(context, model, states, plan, group, backend, device)
    with clock.phase("warm_up"):
        compiling.result()
        warm_up(model.loaded.model, states, config.batch_max_tokens, device)
    if graphs is not None:
        with clock.phase("compile"):
            _warm_up_variants(context, model, states, group, device)
        with clock.phase("capture"):
            graphs.capture_all()
    with clock.phase("staging"):
        arena, staging, copy_bytes_per_s = attach_arena(context, device), None, dict[str, float]()
        if arena is not None:
            staging = build_staging(context, arena, model.layout, states.pools(), group.size, group.rank)
            copy_bytes_per_s = _measure_copies(staging)
            arena.lock_in_background()
    memory = {**plan.summary(), "staging": staging_bytes, "steps": step_memory}
    ready = _ready(context, model.loaded, plan.num_pages, memory, clock)
    ready.info["copy_bytes_per_s"] = copy_bytes_per_s
    worker = Worker(context, runner, memory, RefusedJobs if staging is None else partial(StagingEngine, staging))
    freeze_start_up()
    return worker, ready


def _device(config: ResolvedConfig, rank: int) -> torch.device:
    if config.device == "cpu":
        return torch.device("cpu")
    num_devices = torch.cuda.device_count()
    if rank >= num_devices:
        raise StartError(f"--tp {config.serve.tp} needs as many GPUs; there are {num_devices}")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    return device


def _checked_shapes(context: ChildContext, group: TensorParallel, backend: KernelBackend) -> KernelShapes:
    """What kernels are needed for. Raises StartError for a model that they, or so many ranks, cannot run."""
    config = context.config
    try:
        model = ModelConfig.from_dict(context.model["config"])
        shapes = kernel_shapes(model, shard_model(model, group.size, group.rank))
        backend.check_model(TORCH_DTYPES[config.data_type], shapes, config.page_size)
    except (ModelError, UnsupportedModelError) as error:
        raise StartError(str(error)) from error
    return shapes


def _start_compiling(config: ResolvedConfig, backend: KernelBackend, shapes: KernelShapes) -> Future[None]:
    """Compile kernels beside the loading of weights, on a thread that ends with it."""
    executor = ThreadPoolExecutor(1, thread_name_prefix="compile-kernels")
    try:
        return executor.submit(backend.warmup, TORCH_DTYPES[config.data_type], shapes)
    finally:
        executor.shutdown(wait=False)


def _load(context: ChildContext, device: torch.device, group: TensorParallel, backend: KernelBackend) -> _Model:
    config = context.config
    try:
        model_config = ModelConfig.from_dict(context.model["config"])
        layout = derive_layout(model_config, config.page_size, config.data_type)
        loaded = load_model(
            model_config,
            _source(context.model["source"]),
            device=device,
            dtype=TORCH_DTYPES[config.data_type],
            tp=group,
            backend=backend,
            progress=_ProgressReporter(context),
            dummy_seed=config.serve.dummy_seed,
            max_positions=config.max_req_total_len + 1,
        )
    except (ModelError, ValueError) as error:
        raise StartError(str(error)) from error
    return _Model(model_config, layout, loaded)


def _source(plain: object) -> ModelSource:
    """The launcher's ModelSource, which came as plain data."""

    def as_path(_: type[Any], text: str) -> Path:
        return Path(text)

    return msgspec.convert(plain, ModelSource, dec_hook=as_path)


def _step_bytes(config: ResolvedConfig, model: ModelConfig, group: TensorParallel, device: torch.device) -> int:
    """Memory of steps that the plan must leave: on the CPU it is little, and part of what --mem_fraction leaves."""
    if device.type != "cuda":
        return 0
    sharding = shard_model(model, group.size, group.rank)
    rows, length = config.serve.running_max_req_size, config.max_req_total_len
    return step_bytes(model, sharding, config.data_type, config.batch_max_tokens, rows, length)


def _plan_memory(
    config: ResolvedConfig, states: StateCoordinator, group: TensorParallel, device: torch.device, reserved_bytes: int
) -> MemoryPlan:
    """The same plan on every rank: the budget is the smallest of them. reserved_bytes: kept outside of the pools."""
    available = available_memory(device)
    ranks_here = group.size if device.type == "cpu" else 1  # ranks on the CPU share one memory
    budget = int(available * config.serve.mem_fraction) // ranks_here - reserved_bytes
    costs = {
        name: PageCost(
            state.group.page_tokens,
            _largest_page(group, state.bytes_per_page, device),
            state.group.hit_policy,
            state.group.window_tokens,
        )
        for name, state in states.states.items()
    }
    request = MemoryRequest(
        max_req_total_len=config.max_req_total_len,
        is_length_fixed=config.serve.max_req_total_len is not None,
        running_max_req_size=config.serve.running_max_req_size,
        max_total_token_num=config.serve.max_total_token_num,
        mem_fraction=config.serve.mem_fraction,
        budget_bytes=smallest(group, budget, device),
        is_cpu=device.type == "cpu",
        chunk_tokens=config.chunked_prefill_size,
        checkpoint_interval=config.serve.checkpoint_interval,
    )
    return plan_memory(costs, request)


def _largest_page(group: TensorParallel, bytes_per_page: int, device: torch.device) -> int:
    """The largest page of all ranks (heads may be split unequally): the rank with most heads sets the page count."""
    return -smallest(group, -bytes_per_page, device)


def _allocate(states: StateCoordinator, plan: MemoryPlan) -> None:
    try:
        states.allocate(plan.num_pages)
    except (OSError, RuntimeError) as error:
        raise StartError(
            f"cannot allocate a pool of {plan.pool_bytes} bytes ({error}): lower --mem_fraction"
        ) from error


def _make_runner(
    context: ChildContext,
    model: _Model,
    states: StateCoordinator,
    plan: MemoryPlan,
    group: TensorParallel,
    backend: KernelBackend,
    device: torch.device,
) -> tuple[ModelRunner, DecodeGraphs | None]:
    config = context.config
    max_rows = config.serve.running_max_req_size
    table = RequestTable.attach(context.fds["table"])
    tables = {
        state_group.name: PageTable(
            state_group.name,
            state_group.page_tokens,
            plan.num_pages[state_group.name],
            max_rows,
            config.max_req_total_len // state_group.page_tokens + 1,
        )
        for state_group in model.layout.groups
        if state_group.is_paged_by_place
    }
    working = {
        state_group.name: WorkingPages(
            state_group.name, state_group.page_tokens, plan.num_pages[state_group.name], max_rows
        )
        for state_group in model.layout.groups
        if not state_group.is_paged_by_place
    }
    batch = InputBatch(tables, working, states.leaves(), table, max_rows, device)
    sampler = Sampler(max_rows, model.config.vocab_size, model.config.eos_token_ids, device)
    network: Model = model.loaded.model
    graphs = None
    if not config.serve.disable_cuda_graph:
        graphs = make_graphs(network, model.config, states, tables, group, device)
    profiler = StepProfiler(backend, device)
    return ModelRunner(network, batch, states, sampler, table, group, context.epoch, graphs, profiler), graphs


def _warm_up_variants(
    context: ChildContext, model: _Model, states: StateCoordinator, group: TensorParallel, device: torch.device
) -> None:
    config = context.config
    num_threads = min(config.threads_per_worker, 8) if group.size == 1 else 1
    network, progress = model.loaded.model, _ProgressReporter(context)
    longest = config.max_req_total_len
    warm_up_variants(network, states, config.batch_max_tokens, longest, device, num_threads, progress)


def _measure_copies(staging: StagingParts) -> dict[str, float]:
    try:
        return measure_copies(staging.groups, staging.arena.shape.slot_bytes)
    except ProbeError as error:
        raise StartError(str(error)) from error


def _ready(
    context: ChildContext,
    loaded: LoadedModel,
    num_pages: dict[str, int],
    memory: dict[str, object],
    clock: PhaseClock,
) -> ChildReady:
    logger.info("ready: %s", ", ".join(f"{name} {seconds:.2f} s" for name, seconds in clock.seconds.items()))
    info: dict[str, object] = {
        "block_digests": {index: digest.hex() for index, digest in loaded.block_digests.items()},
        "num_pages": num_pages,
        "memory": {**memory, "resident": resident_bytes()},
        "phases": clock.seconds,
    }
    return ChildReady(role=context.role, index=context.index, info=info)


class _ProgressReporter:
    """Passes loading progress on to the launcher, thinned out; may be called from the loader's threads."""

    def __init__(self, context: ChildContext) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._last: tuple[str, int] = ("", -1)

    def __call__(self, phase: str, done: int, total: int) -> None:
        step = done * _PROGRESS_STEPS // max(1, total)
        with self._lock:
            if (phase, step) == self._last:
                return
            self._last = (phase, step)
        self._context.parent.send(Progress(self._context.role, self._context.index, phase, done, total))
