"""One model on this process's device, and sequences whose pages are put together by hand."""

from dataclasses import dataclass, field

import torch

from kernels.dispatch import get_backend
from kernels.interface import AttentionBatch
from models.config import ModelConfig
from models.forward import ForwardBatch
from models.loader import load_model
from models.parallel import SingleRank
from models.source import ModelSource
from models.state_layout import StateGroup, derive_layout
from serve.model_infer.attention_state.base import TORCH_DTYPES
from serve.model_infer.attention_state.checkpoint import CheckpointState
from serve.model_infer.attention_state.coordinator import StateCoordinator

_POISON = 0xFF  # no number in any type of float


@dataclass
class Sequence:
    """length: tokens that are computed. pages: by group, a page a place, or the working page alone."""

    length: int = 0
    pages: dict[str, list[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Snapshot:
    """What a prefix of `length` tokens needs to be used again: objects of each group, as bytes on the host.

    objects: by group and place; a checkpoint has the place of the page that ends at its boundary.
    """

    length: int
    objects: dict[str, dict[int, torch.Tensor]]


class StateEngine:
    """Runs single sequences. Not thread-safe. Pages are never given back: an engine serves a few sequences."""

    def __init__(
        self,
        config: ModelConfig,
        source: ModelSource,
        data_type: str,
        page_size: int,
        device: torch.device,
        num_tokens: int,
        num_sequences: int,
    ) -> None:
        """Room for so many sequences of so many tokens. Raises ModelError, ValueError and NotImplementedError."""
        self.layout = derive_layout(config, page_size, data_type)
        self.vocab_size = config.vocab_size
        self._page_size, self._device = page_size, device
        loaded = load_model(
            config,
            source,
            device=device,
            dtype=TORCH_DTYPES[data_type],
            tp=SingleRank(),
            backend=get_backend(device),
            max_positions=num_tokens,
        )
        self._model = loaded.model
        self.states = StateCoordinator(self.layout, 1, 0, device)
        places = -(-num_tokens // page_size)
        counts = {
            group.name: num_sequences * (places if group.is_paged_by_place else 2) for group in self.layout.groups
        }
        self.states.allocate(counts)
        for pool in self.states.pools().values():
            pool.fill_(_POISON)
        self._free = {name: list(range(count)) for name, count in counts.items()}

    @torch.inference_mode()
    def compute(self, sequence: Sequence, tokens: list[int]) -> torch.Tensor:
        """One step of new tokens; logits float32 [len(tokens), vocab] on the host."""
        sequence.length += len(tokens)
        for group in self.layout.groups:
            self._grow(group, sequence)
        attention = {group.name: self._attention(group, sequence, len(tokens)) for group in self.layout.groups}
        working = {
            group.name: torch.tensor(sequence.pages[group.name], device=self._device)
            for group in self.layout.groups
            if not group.is_paged_by_place
        }
        token_ids = torch.tensor(tokens, device=self._device)
        rows = torch.arange(len(tokens), device=self._device)
        return self._model.forward(ForwardBatch(token_ids, attention, self.states.leaves(), rows, working)).cpu()

    def snapshot(self, sequence: Sequence) -> Snapshot:
        """Of a sequence at a page boundary: exactly the objects that the rule of each group asks for."""
        objects = {}
        for group in self.layout.groups:
            pool, held = self.states.pools()[group.name], sequence.pages[group.name]
            places = self._needed(group, sequence.length)
            pages = {place: held[place] if group.is_paged_by_place else held[0] for place in places}
            objects[group.name] = {place: pool[page].to("cpu", copy=True) for place, page in pages.items()}
        return Snapshot(sequence.length, objects)

    def restore(self, snapshot: Snapshot) -> Sequence:
        """A new sequence of those objects; whatever else it could read is no number."""
        sequence = Sequence(snapshot.length)
        for group in self.layout.groups:
            state, objects = self.states.states[group.name], snapshot.objects[group.name]
            if isinstance(state, CheckpointState):
                checkpoint, working = self._take(group), self._take(group)
                state.pool[checkpoint] = next(iter(objects.values())).to(self._device)
                state.restore([(checkpoint, working)])
                self._free[group.name].append(checkpoint)
                sequence.pages[group.name] = [working]
                continue
            pages = [self._take(group) for _ in range(snapshot.length // self._page_size)]
            for place, data in objects.items():
                state.pool[pages[place]] = data.to(self._device)
            sequence.pages[group.name] = pages
        return sequence

    def drop(self, sequence: Sequence, group: str, leaf: str) -> None:
        """Zero one leaf in all pages of a sequence."""
        self.states.leaves()[group][leaf][sequence.pages[group]] = 0

    def release(self, sequence: Sequence) -> None:
        """Its pages may be given to another; they are poisoned first."""
        for name, pages in sequence.pages.items():
            self.states.pools()[name][pages] = _POISON
            self._free[name] += pages

    def _needed(self, group: StateGroup, length: int) -> range:
        last = length // self._page_size
        if not group.is_paged_by_place:
            return range(last - 1, last)
        first = max(0, length - group.window_tokens) // self._page_size if group.window_tokens else 0
        return range(first, last)

    def _grow(self, group: StateGroup, sequence: Sequence) -> None:
        held = sequence.pages.setdefault(group.name, [])
        state = self.states.states[group.name]
        if isinstance(state, CheckpointState):
            if not held:
                held.append(self._take(group))
                state.clear(held)
            return
        while len(held) * self._page_size < sequence.length:
            held.append(self._take(group))

    def _take(self, group: StateGroup) -> int:
        return self._free[group.name].pop()

    def _attention(self, group: StateGroup, sequence: Sequence, count: int) -> AttentionBatch:
        table = sequence.pages[group.name] if group.is_paged_by_place else []

        def numbers(values: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=self._device)

        return AttentionBatch(
            query_starts=numbers([0, count]),
            context_lens=numbers([sequence.length]),
            page_table=numbers(table).view(1, -1),
            positions=numbers(list(range(sequence.length - count, sequence.length)), torch.int64),
            sequence_ids=numbers([0] * count),
            max_query_len=count,
            max_context_len=sequence.length,
            page_size=self._page_size,
        )
