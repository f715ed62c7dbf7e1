"""What a model needs to know of tensor parallelism; `serve.model_infer.tp_group` implements it."""

from typing import Protocol

import torch


class TensorParallel(Protocol):
    """Ranks that share a model. With one rank every collective returns its input."""

    rank: int
    size: int

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place."""

    def all_gather_columns(self, tensor: torch.Tensor, widths: list[int]) -> torch.Tensor:
        """Concatenate [R, width of rank] along dim 1 -> [R, sum(widths)] on every rank."""

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Copy of `source`'s tensor on every rank, in place."""


class SingleRank:
    """The group of one."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather_columns(self, tensor: torch.Tensor, widths: list[int]) -> torch.Tensor:
        return tensor

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        return tensor
