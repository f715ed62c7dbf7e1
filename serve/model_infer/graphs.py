"""Decode steps as CUDA graphs: one launch a step instead of some hundred, which take longer than the work itself.

A graph is captured for each of a few batch sizes and serves all batches up to its size, padded. It holds for any
context: attention splits each context into a number of parts that depends on the batch size alone.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from models.config import ModelConfig
from models.forward import ForwardBatch
from models.layer_types import LayerType
from models.parallel import TensorParallel
from serve.model_infer.attention_state.coordinator import StateCoordinator
from serve.model_infer.decode_buffers import DecodeBuffers, GroupPool
from serve.model_infer.page_table import PageTable
from serve.model_infer.tail_graph import TailGraph

# Padding costs little where a step reads mostly weights, and more in large batches.
_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


class Replay(Protocol):
    """A captured sequence of launches."""

    def replay(self) -> None: ...


Capture = Callable[[Callable[[], None]], Replay]


class _Model(Protocol):
    def forward(self, batch: ForwardBatch) -> torch.Tensor: ...


def graph_sizes(max_rows: int) -> list[int]:
    """Batch sizes that get a graph, ascending."""
    largest = min(max_rows, _SIZES[-1])
    return [*(size for size in _SIZES if size < largest), largest]


class CudaCapture:
    """Captures on a stream of its own, into memory that all graphs share: they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], None]) -> Replay:
        """Run once, so that all kernels are compiled and loaded, then capture a second run."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(self._stream):
            run()
            self._stream.synchronize()
            # Other threads (page copies) may call CUDA meanwhile.
            graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
            try:
                run()
            finally:
                graph.capture_end()
        torch.cuda.synchronize(self._device)
        return graph


class DecodeGraphs:
    """Runs decode steps of one model by replay. Used by the runner's thread only, in inference mode."""

    def __init__(
        self,
        model: _Model,
        groups: Mapping[str, GroupPool],
        max_rows: int,
        vocab_size: int,
        device: torch.device,
        capture: Capture | None = None,
    ) -> None:
        """capture: `CudaCapture`, or what stands in for it in tests."""
        self.sizes = graph_sizes(max_rows)
        self._model = model
        self._capture = CudaCapture(device) if capture is None else capture
        self._buffers = DecodeBuffers(groups, self.sizes[-1], device)
        # One result for all graphs: a tensor from each graph's own memory would keep it from the others.
        self._logits = torch.empty(self.sizes[-1], vocab_size, dtype=torch.float32, device=device)
        self._replays: dict[int, Replay] = {}
        has_tables = all(group.max_pages for group in groups.values())
        self._tail = TailGraph(model, groups, vocab_size, device, self._capture) if has_tables else None

    @torch.inference_mode()
    def capture_all(self) -> None:
        """Capture every size; without this a size is captured when it is first used."""
        self._buffers.clear()
        for size in reversed(self.sizes):  # the largest needs the most memory, which the others then find
            self._replay_of(size)
        if self._tail is not None:
            self._tail.capture()

    def forward_tail(self, batch: ForwardBatch) -> torch.Tensor | None:
        """Logits [1, vocab] of the last token of a batch of one sequence; None where there is no graph for it."""
        return None if self._tail is None else self._tail.forward(batch)

    def forward(self, batch: ForwardBatch) -> torch.Tensor | None:
        """Logits of a step in which every sequence has one new token and wants its logits, in packed order.

        They stay valid until the next call. None where no graph is large enough.
        """
        count = len(batch.token_ids)
        if count > self.sizes[-1] or not self._buffers.fits(batch):
            return None
        self._buffers.fill(batch)  # before a capture, which runs the step as well
        self._replay_of(next(size for size in self.sizes if size >= count)).replay()
        return self._logits[:count]

    def _replay_of(self, size: int) -> Replay:
        replay = self._replays.get(size)
        if replay is None:
            batch, logits = self._buffers.batch(size), self._logits[:size]

            def run() -> None:
                logits.copy_(self._model.forward(batch))

            replay = self._replays[size] = self._capture(run)
        return replay


def _has_full_attention(config: ModelConfig) -> bool:
    return all(config.layer_type(layer) is LayerType.FULL for layer in range(config.num_layers))


def make_graphs(
    model: _Model,
    config: ModelConfig,
    states: StateCoordinator,
    tables: Mapping[str, PageTable],
    group: TensorParallel,
    device: torch.device,
) -> DecodeGraphs | None:
    """Graphs for a model whose steps can be captured, else None.

    Not on other devices, and only where all layers have full attention: other states are not padded yet.
    """
    if device.type != "cuda" or not _has_full_attention(config):
        return None
    pools = {
        name: GroupPool(
            state.leaves, state.group.page_tokens, tables[name].max_pages if state.group.is_paged_by_place else 0
        )
        for name, state in states.states.items()
    }
    max_rows = min(len(table.counts) for table in tables.values())
    return DecodeGraphs(model, pools, max_rows, config.vocab_size, device)
