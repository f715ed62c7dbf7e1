"""Tiny checkpoints, a paged runner and a tensor-parallel group of threads for the tests of `models`."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers

from kernels.interface import AttentionBatch, KernelBackend
from kernels.reference import ReferenceBackend
from models.config import ModelConfig, load_model_config
from models.forward import ForwardBatch
from models.layers.decoder import DecoderModel
from models.loader import LoadedModel, load_model
from models.parallel import SingleRank, TensorParallel
from models.source import ModelSource, resolve_model
from models.state_layout import StateGroup, derive_layout
from serve.model_infer.attention_state.coordinator import StateCoordinator

CPU = torch.device("cpu")
TINY = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "max_position_embeddings": 512,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"head_dim": None}),
    "qwen3": ("Qwen3", {}),
    "qwen3_moe": ("Qwen3Moe", EXPERTS),
}


def hf_model(name: str, **changes) -> transformers.PreTrainedModel:
    """A tiny random model of transformers in float32, whose weights are large enough for mistakes to show."""
    stem, extra = FAMILIES[name]
    settings = {
        key: value for key, value in {**TINY, **extra, **changes}.items() if value is not None or key in changes
    }
    config = getattr(transformers, f"{stem}Config")(**settings)
    torch.manual_seed(0)
    model = getattr(transformers, f"{stem}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if "norm" in key:
                weight.copy_(1 + 0.3 * torch.randn(weight.shape))
            elif key.endswith("bias"):
                weight.copy_(0.3 * torch.randn(weight.shape))
            else:
                weight.mul_(5)
    return model


def save(model: transformers.PreTrainedModel, directory: Path, **kwargs) -> Path:
    """Write the model as safetensors; returns the directory."""
    model.save_pretrained(directory, **kwargs)
    return directory


def hf_logits(model: transformers.PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """float32 [len(tokens), vocab]."""
    with torch.no_grad():
        return model(torch.tensor([tokens]), use_cache=False).logits[0].float()


def load(
    where: Path | ModelSource,
    *,
    tp: TensorParallel | None = None,
    backend: KernelBackend | None = None,
    dtype: torch.dtype = torch.float32,
    **kwargs,
) -> LoadedModel:
    """Resolve, read the config and load in one go."""
    source = where if isinstance(where, ModelSource) else resolve_model(str(where))
    config = load_model_config(source)
    return load_model(
        config,
        source,
        device=CPU,
        dtype=dtype,
        tp=tp or SingleRank(),
        backend=backend or ReferenceBackend(),
        **kwargs,
    )


@dataclass
class PagedRunner:
    """Runs steps of several sequences over pools whose pages are handed out in a scattered order.

    What no step may read is poisoned: pools hold 7 at first, and NaN where a window has left a page.
    """

    model: DecoderModel
    page_size: int = 16
    num_pages: int = 24
    dtype: torch.dtype = torch.float32
    lengths: dict[int, int] = field(default_factory=dict)
    pages: dict[str, dict[int, list[int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sharding = self.model.sharding
        name = str(self.dtype).removeprefix("torch.")
        self.layout = derive_layout(self.model.config, self.page_size, name)
        self.states = StateCoordinator(self.layout, sharding.size, sharding.rank, CPU)
        self.states.allocate({group.name: self.num_pages for group in self.layout.groups})
        for leaves in self.states.leaves().values():
            for leaf in leaves.values():
                leaf.fill_(7.0)
        order = [page for start in (1, 0, 2) for page in range(start, self.num_pages, 3)]
        self.free = {group.name: list(order) for group in self.layout.groups}
        self.pages = {group.name: {} for group in self.layout.groups}

    def step(self, rows: list[tuple[int, list[int]]], wanted: list[int] | None = None) -> torch.Tensor:
        """Run new tokens of each (sequence, tokens); logits [R, vocab] of the wanted packed tokens, or of all."""
        for sequence, tokens in rows:
            self.lengths[sequence] = self.lengths.get(sequence, 0) + len(tokens)
            for group in self.layout.groups:
                self._grow(group, sequence)
        attention = {group.name: self._attention_batch(group, rows) for group in self.layout.groups}
        working = {
            group.name: torch.tensor([self.pages[group.name][sequence][0] for sequence, _ in rows])
            for group in self.layout.groups
            if not group.is_paged_by_place
        }
        token_ids = torch.tensor([token for _, tokens in rows for token in tokens])
        logits_rows = torch.arange(len(token_ids)) if wanted is None else torch.tensor(wanted, dtype=torch.int64)
        logits = self.model.forward(ForwardBatch(token_ids, attention, self.states.leaves(), logits_rows, working))
        for sequence, _ in rows:
            self._leave_window(sequence)
        return logits

    def snapshot(self, sequence: int) -> int:
        """Copy all working pages of a sequence to fresh ones; gives the sequence's length at which they hold."""
        for group in self.layout.groups:
            if not group.is_paged_by_place:
                held = self.pages[group.name][sequence]
                held.append(self.free[group.name].pop())
                self.states.snapshot([(group.name, held[0], held[-1])])
        return self.lengths[sequence]

    def resume(self, sequence: int, source: int, length: int) -> None:
        """A new sequence begins with the first `length` tokens of `source`, whose last snapshot was taken there.

        Pages by place are shared, and must be whole: `length` is a multiple of the page size.
        """
        self.lengths[sequence] = length
        for group in self.layout.groups:
            held = self.pages[group.name][source]
            if group.is_paged_by_place:
                self.pages[group.name][sequence] = held[: length // self.page_size]
                continue
            working = self.free[group.name].pop()
            self.pages[group.name][sequence] = [working]
            self.states.states[group.name].restore([(held[-1], working)])

    def _grow(self, group: StateGroup, sequence: int) -> None:
        held = self.pages[group.name].setdefault(sequence, [])
        if group.is_paged_by_place:
            while len(held) * self.page_size < self.lengths[sequence]:
                held.append(self.free[group.name].pop())
        elif not held:
            held.append(self.free[group.name].pop())
            self.states.states[group.name].clear(held)

    def _leave_window(self, sequence: int) -> None:
        for group in self.layout.groups:
            if not group.window_tokens:
                continue
            held, first = self.pages[group.name][sequence], self.lengths[sequence] - group.window_tokens
            others = {page for other, pages in self.pages[group.name].items() if other != sequence for page in pages}
            for place in range(max(0, first) // self.page_size):
                if held[place] >= 0 and held[place] not in others:
                    for leaf in self.states.leaves()[group.name].values():
                        leaf[held[place]] = float("nan")
                    held[place] = -1

    def _attention_batch(self, group: StateGroup, rows: list[tuple[int, list[int]]]) -> AttentionBatch:
        counts = [len(tokens) for _, tokens in rows]
        contexts = [self.lengths[sequence] for sequence, _ in rows]
        table = [[max(page, 0) for page in self.pages[group.name][sequence]] for sequence, _ in rows]
        width = max(map(len, table)) if group.is_paged_by_place else 0
        table = [(pages + [0] * width)[:width] for pages in table]
        spans = [torch.arange(context - count, context) for count, context in zip(counts, contexts, strict=True)]
        return AttentionBatch(
            query_starts=torch.tensor([0, *counts]).cumsum(0).int(),
            context_lens=torch.tensor(contexts).int(),
            page_table=torch.tensor(table, dtype=torch.int32).view(len(rows), width),
            positions=torch.cat(spans),
            sequence_ids=torch.arange(len(rows)).repeat_interleave(torch.tensor(counts)).int(),
            max_query_len=max(counts),
            max_context_len=max(contexts),
            page_size=self.page_size,
        )


class ThreadGroup:
    """Ranks that are threads of this process; `member(rank)` is what a rank's model gets."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=60)
        self._slots: list[torch.Tensor | None] = [None] * size

    def member(self, rank: int) -> "ThreadRank":
        return ThreadRank(self, rank)

    def exchange(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor, in order of rank."""
        self._slots[rank] = tensor.clone()
        self._barrier.wait()
        found = [slot for slot in self._slots if slot is not None]
        self._barrier.wait()
        return found

    def run(self, work: Callable[[TensorParallel], object]) -> list:
        """work(member) on every rank at once; results in order of rank."""
        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(work, [self.member(rank) for rank in range(self.size)]))


@dataclass
class ThreadRank:
    """One rank of a ThreadGroup, as `models.parallel.TensorParallel` wants it."""

    group: ThreadGroup
    rank: int

    @property
    def size(self) -> int:
        return self.group.size

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.copy_(torch.stack(self.group.exchange(self.rank, tensor)).sum(0))

    def all_gather_columns(self, tensor: torch.Tensor, widths: list[int]) -> torch.Tensor:
        parts = self.group.exchange(self.rank, tensor)
        assert [part.shape[1] for part in parts] == widths
        return torch.cat(parts, dim=1)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        return tensor.copy_(self.group.exchange(self.rank, tensor)[source])


def tiny_config(**changes) -> ModelConfig:
    """SmolLM2-135M's config, with `changes`."""
    from models.config import RopeConfig

    settings = {
        "architecture": "LlamaForCausalLM",
        "family": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_layers": 30,
        "num_q_heads": 9,
        "num_kv_heads": 3,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope": RopeConfig("default", 100000.0, 64),
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }
    return ModelConfig(**{**settings, **changes})
