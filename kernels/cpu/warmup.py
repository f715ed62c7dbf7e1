"""Compiles every kernel that a model needs, ahead of its first step."""

from collections.abc import Callable
from functools import partial

import torch

from kernels.cpu.attention_op import AttentionOps
from kernels.cpu.linear import MAX_DOT_TOKENS
from kernels.cpu.linear_op import LinearOp
from kernels.cpu.norm_op import NormOps
from kernels.interface import KernelShapes, Progress


def compile_all(
    linears: tuple[LinearOp, LinearOp, LinearOp, LinearOp],
    attention: AttentionOps,
    norms: NormOps,
    max_groups: int,
    dtype: torch.dtype,
    shapes: KernelShapes,
    progress: Progress | None,
) -> None:
    """`linears` are those of `shapes`, in its order."""
    bf16 = dtype is torch.bfloat16
    jobs: list[Callable[[], object]] = [partial(norms.compile, bf16)]
    jobs += [partial(attention.compile, head_dim, bf16) for head_dim in set(shapes.head_dims)]
    inputs = (shapes.linear_inputs, shapes.residual_inputs, shapes.gate_up_inputs, shapes.logits_inputs)
    for linear, sizes in zip(linears, inputs, strict=True):
        for k in set(sizes):
            jobs += [partial(linear.compile, True, tokens, k, bf16) for tokens in range(1, MAX_DOT_TOKENS + 1)]
            jobs += [partial(linear.compile, False, groups, k, bf16) for groups in range(1, max_groups + 1)]
    for done, job in enumerate(jobs):
        job()
        if progress is not None:
            progress(done + 1, len(jobs))
