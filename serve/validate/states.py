"""Checks of a model's states in one process: restored ones go on as if nothing had happened, and every leaf matters."""

import random
from dataclasses import dataclass

import torch

from serve.validate.sequences import Sequence, Snapshot, StateEngine

NUM_CONTINUED = 24
# Of the largest logit. What rounding alone does to logits of the same tokens, computed in other pieces.
ROUNDING = {"float32": 1e-3, "bfloat16": 1e-1}
_LEAST_LOSS = 1e-6
_LAST_CHUNK = 7  # tokens before a boundary: a chunk that ends there does not begin at one


@dataclass(frozen=True)
class LeafCheck:
    """One leaf. object_bytes: of it in an object. lost: by how much the logits of the next tokens change without it,
    as a part of the largest."""

    group: str
    leaf: str
    kind: str
    dtype: str
    object_bytes: int
    lost: float
    is_noticed: bool


@dataclass(frozen=True)
class StateReport:
    """Of one boundary. restored, missed: greatest difference of logits to the sequence that went on, and to one that is
    computed from its first token in one piece, as a part of the largest logit."""

    boundary: int
    restored: float
    missed: float
    is_restored: bool
    is_hit_equal: bool
    leaves: list[LeafCheck]

    @property
    def problems(self) -> list[str]:
        """One line each."""
        found = []
        if not self.is_restored:
            found.append(f"at {self.boundary} tokens a restored state gives other logits (by {self.restored:.1e})")
        if not self.is_hit_equal:
            found.append(f"at {self.boundary} tokens a hit gives other logits than a miss (by {self.missed:.1e})")
        return found


def unnoticed(reports: list[StateReport]) -> list[str]:
    """One line a leaf whose loss changes nothing at any boundary; at a near one an indexer still chooses all."""
    return [
        f"the loss of {leaves[0].group}.{leaves[0].leaf} is not noticed"
        for leaves in zip(*(report.leaves for report in reports), strict=True)
        if not any(leaf.is_noticed for leaf in leaves)
    ]


def check_states(engine: StateEngine, data_type: str, boundary: int) -> StateReport:
    """All checks at `boundary` tokens, a multiple of the page size, with random tokens."""
    generator = random.Random(boundary)
    tokens = [generator.randrange(engine.vocab_size) for _ in range(boundary + NUM_CONTINUED)]
    prompt, rest = tokens[:boundary], tokens[boundary:]
    snapshot, expected = _live(engine, prompt, rest)
    scale = float(expected.abs().max())
    restored = _difference(_resumed(engine, snapshot, rest), expected, scale)
    missed = _difference(_in_one_piece(engine, tokens)[boundary:], expected, scale)
    leaves = []
    for group in engine.layout.groups:
        for leaf in (*group.head_leaves, *group.replicated_leaves):
            lost = _difference(_resumed(engine, snapshot, rest, (group.name, leaf.name)), expected, scale)
            size = group.layer_bytes(leaf) * len(leaf.layers) * leaf.num_heads
            is_noticed = lost > max(10 * restored, _LEAST_LOSS)
            leaves.append(LeafCheck(group.name, leaf.name, group.kind.value, leaf.dtype, size, lost, is_noticed))
    limit = ROUNDING[data_type]
    return StateReport(boundary, restored, missed, restored <= limit / 100, missed <= limit, leaves)


def _live(engine: StateEngine, prompt: list[int], rest: list[int]) -> tuple[Snapshot, torch.Tensor]:
    """A snapshot behind the prompt, which comes in two chunks, and the logits of the sequence that goes on."""
    sequence, cut = Sequence(), len(prompt) - _LAST_CHUNK
    engine.compute(sequence, prompt[:cut])
    engine.compute(sequence, prompt[cut:])
    snapshot = engine.snapshot(sequence)
    logits = _continued(engine, sequence, rest)
    engine.release(sequence)
    return snapshot, logits


def _in_one_piece(engine: StateEngine, tokens: list[int]) -> torch.Tensor:
    sequence = Sequence()
    logits = engine.compute(sequence, tokens)
    engine.release(sequence)
    return logits


def _resumed(
    engine: StateEngine, snapshot: Snapshot, rest: list[int], dropped: tuple[str, str] | None = None
) -> torch.Tensor:
    sequence = engine.restore(snapshot)
    if dropped is not None:
        engine.drop(sequence, *dropped)
    logits = _continued(engine, sequence, rest)
    engine.release(sequence)
    return logits


def _continued(engine: StateEngine, sequence: Sequence, tokens: list[int]) -> torch.Tensor:
    """A chunk and then single tokens: both ways in which a state is read."""
    half = len(tokens) // 2
    parts = [tokens[:half], *([token] for token in tokens[half:])]
    return torch.cat([engine.compute(sequence, part) for part in parts])


def _difference(logits: torch.Tensor, expected: torch.Tensor, scale: float) -> float:
    """Infinite where a logit is no number: something was read that the hit does not have."""
    if not bool(logits.isfinite().all()):
        return float("inf")
    return float((logits - expected).abs().max()) / scale
