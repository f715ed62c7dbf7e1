"""Which part of each weight a tensor-parallel rank holds."""

from dataclasses import dataclass

from models.config import ModelConfig
from models.errors import ModelError
from models.state_layout import HeadShard, shard_heads, split_range

_GRANULE = 32


@dataclass(frozen=True)
class Sharding:
    """One rank's half-open ranges: heads, columns of the MLP, of each expert and of the shared one, vocabulary rows.

    vocab_widths: number of vocabulary rows of every rank.
    """

    rank: int
    size: int
    heads: HeadShard
    mlp: tuple[int, int]
    expert: tuple[int, int]
    vocab: tuple[int, int]
    vocab_widths: list[int]
    shared_expert: tuple[int, int] = (0, 0)


def shard_model(config: ModelConfig, size: int, rank: int) -> Sharding:
    """The ranges of `rank`; ModelError if the model cannot be cut into `size` parts."""
    try:
        heads = shard_heads(config.num_q_heads, config.num_kv_heads, size, rank)
    except ValueError as error:
        raise ModelError(f"--tp {size} is too large for this model: {error}") from error
    _check_parts(config, size)
    vocab = [_split(config.vocab_size, size, r) for r in range(size)]
    shared = config.moe.shared_intermediate_size if config.moe else 0
    return Sharding(
        rank=rank,
        size=size,
        heads=heads,
        mlp=_split(config.intermediate_size, size, rank),
        expert=_split(config.moe.intermediate_size, size, rank) if config.moe else (0, 0),
        vocab=vocab[rank],
        vocab_widths=[end - start for start, end in vocab],
        shared_expert=_split(shared, size, rank) if shared else (0, 0),
    )


def _check_parts(config: ModelConfig, size: int) -> None:
    """Raise ModelError if a state that is divided by whole heads has fewer than ranks."""
    parts = {}
    if config.linear_attention is not None:
        parts["key heads in its linear attention"] = config.linear_attention.num_k_heads
    if config.compression is not None:
        parts["groups in its output projection"] = config.compression.output_groups
    for what, count in parts.items():
        if size > count:
            raise ModelError(f"--tp {size} is too large for this model: it has {count} {what}")


def _split(total: int, parts: int, index: int) -> tuple[int, int]:
    """Like `split_range`, at multiples of 32 where possible: quantized blocks and vector lanes stay whole."""
    if total < parts:
        raise ModelError(f"--tp {parts} is too large for this model: a dimension of {total} cannot be cut so often")
    granule = _GRANULE if total % _GRANULE == 0 and total // _GRANULE >= parts else 1
    start, end = split_range(total // granule, parts, index)
    return start * granule, end * granule
