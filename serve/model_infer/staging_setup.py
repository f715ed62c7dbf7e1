"""Builds the staging engine's parts for a rank, and measures what copies cost."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from models.state_layout import StateLayout
from serve.ipc.child import ChildContext, StartError
from serve.ipc.shm_segment import SegmentError
from serve.model_infer.copy_engine import Bytes, CopyEngine
from serve.model_infer.cpu_copy_engine import CpuCopyEngine
from serve.model_infer.host_pages import RankPages
from serve.model_infer.page_mover import PageLoader, PageMover, PageStorer
from serve.model_infer.staging import StagingParts
from serve.model_infer.transfer import Direction
from serve.multi_level_cache.fault_injector import FaultInjector, parse_faults
from serve.multi_level_cache.host_arena import HostArena
from serve.multi_level_cache.object_format import object_formats

if TYPE_CHECKING:
    from serve.model_infer.cuda_copy_engine import LockedSlots

# Temporaries of the checksum on CUDA: three of 16 MiB at a time on each of two streams.
_CUDA_WORKSPACE_BYTES = 96 << 20
# Of a batch on a CPU.
_CPU_LOAD_BYTES, _CPU_STORE_BYTES = 1 << 30, 16 << 20


def workspace_bytes(context: ChildContext, device: torch.device) -> int:
    """Device memory that staging needs beside the pools. A CPU copies between the pool and the arena directly."""
    return _CUDA_WORKSPACE_BYTES if "arena" in context.fds and device.type == "cuda" else 0


@dataclass(frozen=True)
class AttachedArena:
    """The host arena; payload_fd: of its memory. locked: on CUDA, what page-locks it."""

    arena: HostArena
    payload_fd: int
    locked: "LockedSlots | None" = None

    def lock_in_background(self) -> None:
        """Page-lock what is backed with memory. It takes seconds and slows down all that calls CUDA: not in a start."""
        if self.locked is not None:
            watched = os.dup(self.payload_fd)  # the arena closes its own
            self.locked.follow(lambda: os.fstat(watched).st_blocks * 512)


def attach_arena(context: ChildContext, device: torch.device) -> AttachedArena | None:
    """None when the server has no host tier. Raises StartError."""
    if "arena" not in context.fds:
        return None
    payload = context.fds["arena"]
    try:
        arena = HostArena.attach(payload, context.fds["arena_header"])
    except SegmentError as error:
        raise StartError(str(error)) from error
    if device.type != "cuda":
        return AttachedArena(arena, payload)
    from serve.model_infer.cuda_copy_engine import LockedSlots

    return AttachedArena(arena, payload, LockedSlots(arena.payload))


def build_staging(
    context: ChildContext,
    attached: AttachedArena,
    layout: StateLayout,
    pools: Mapping[str, torch.Tensor],
    tp: int,
    rank: int,
) -> StagingParts:
    """The staging of one rank over an arena."""
    arena = attached.arena
    serve = context.config.serve
    rules = parse_faults(serve.fault_inject)
    injector = FaultInjector(rules, seed=rank) if rules else None
    groups = rank_pages(layout, pools, arena.shape.slot_bytes, tp, rank)
    return make_parts(arena, groups, injector, serve.cpu_cache_sync, attached.locked)


def rank_pages(
    layout: StateLayout, pools: Mapping[str, torch.Tensor], slot_bytes: int, tp: int, rank: int
) -> dict[str, RankPages]:
    """The pages of every group that has bytes."""
    formats = {form.group: form for form in object_formats(layout)}
    return {
        group.name: RankPages.build(group, formats[group.name], pools[group.name], slot_bytes, tp, rank)
        for group in layout.groups
        if group.name in formats
    }


def make_parts(
    arena: HostArena,
    groups: dict[str, RankPages],
    injector: FaultInjector | None = None,
    is_sync: bool = False,
    locked: "LockedSlots | None" = None,
) -> StagingParts:
    """Parts with the copy engines that fit the pools' device."""
    device = next(iter(groups.values())).pool.device
    return StagingParts(arena, groups, make_movers(arena, device, injector, locked), injector, is_sync)


def make_movers(
    arena: HostArena,
    device: torch.device,
    injector: FaultInjector | None = None,
    locked: "LockedSlots | None" = None,
) -> dict[Direction, PageMover]:
    """One a direction, with an engine of its own each."""
    load_engine, store_engine = make_engines(device, arena.payload, locked)
    return {
        Direction.LOAD: PageLoader(arena, load_engine, injector),
        Direction.STORE: PageStorer(arena, store_engine, injector),
    }


def make_engines(
    device: torch.device, host: Bytes, locked: "LockedSlots | None" = None
) -> tuple[CopyEngine, CopyEngine]:
    """For loads and for stores. locked: on CUDA, what page-locks `host`, if that has begun."""
    if device.type == "cuda":
        from serve.model_infer.cuda_copy_engine import CudaCopyEngine, LockedSlots

        locked = LockedSlots(host) if locked is None else locked
        return CudaCopyEngine(device, locked), CudaCopyEngine(device, locked)
    return CpuCopyEngine(_CPU_LOAD_BYTES), CpuCopyEngine(_CPU_STORE_BYTES)
