"""The ranks that share a model: collectives over torch.distributed, gloo on the CPU and NCCL on CUDA."""

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from models.parallel import SingleRank, TensorParallel


class DistributedGroup:
    """`TensorParallel` of more than one rank. Every rank must call the same collectives in the same order.

    A collective that a peer does not join raises RuntimeError after the group's time-out (NCCL ends the process).
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place."""
        dist.all_reduce(tensor)
        return tensor

    def all_gather_columns(self, tensor: torch.Tensor, widths: list[int]) -> torch.Tensor:
        """[R, width of this rank] of every rank -> [R, sum(widths)]. Parts travel at the largest width."""
        widest = max(widths)
        if tensor.shape[1] < widest:
            tensor = torch.nn.functional.pad(tensor, (0, widest - tensor.shape[1]))
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in widths]
        dist.all_gather(parts, tensor.contiguous())
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Copy of `source`'s tensor on every rank, in place."""
        dist.broadcast(tensor, src=source)
        return tensor

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()


def join_group(rank: int, size: int, device: torch.device, store_path: Path, timeout_s: float) -> TensorParallel:
    """The group of `size` ranks, or the group of one. Blocks until all ranks have come.

    store_path: a file that the ranks of one epoch share and nobody else writes. gloo listens on loopback only.
    """
    if size == 1:
        return SingleRank()
    if device.type == "cuda":
        os.environ["NCCL_NVLS_ENABLE"] = "0"
        backend = "nccl"
    else:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        backend = "gloo"
    dist.init_process_group(
        backend,
        init_method=f"file://{store_path}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
    )
    return DistributedGroup(rank, size)


def smallest(group: TensorParallel, number: int, device: torch.device) -> int:
    """The least `number` of all ranks."""
    if group.size == 1:
        return number
    numbers = torch.zeros(group.size, dtype=torch.int64, device=device)
    numbers[group.rank] = number
    return int(group.all_reduce(numbers).min())
