"""Warm-up compiles everything: a step after it compiles nothing."""

import pytest
import torch

from kernels.cpu.backend import CpuBackend
from kernels.cpu.jit import Compiler
from kernels.interface import KernelShapes
from unit_tests.kernels.builders import cos_sin_table, paged_case, randn


def test_a_step_after_warmup_compiles_nothing(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = CpuBackend(num_threads=1)
    calls: list[tuple[int, int]] = []
    shapes = KernelShapes(
        linear_inputs=(64,), residual_inputs=(64,), gate_up_inputs=(64,), logits_inputs=(64,), head_dims=(32,)
    )
    backend.warmup(torch.bfloat16, shapes, lambda done, total: calls.append((done, total)))
    assert calls[-1][0] == calls[-1][1] == len(calls)

    def fail(*_: object) -> int:
        raise AssertionError("compiled after warm-up")

    monkeypatch.setattr(Compiler, "_compile", fail)
    weight, gate_up = randn(generator, 64, 64, dtype=torch.bfloat16), randn(generator, 32, 64, dtype=torch.bfloat16)
    for num_tokens in (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 33, 48, 49, 64, 100, 200):
        stream = randn(generator, num_tokens, 64, dtype=torch.float32)
        norm = torch.ones(64, dtype=torch.bfloat16)
        x = backend.norm_linear(stream, norm, 1e-5, weight)
        backend.linear_residual(x, weight, stream)
        backend.norm_gate_up(stream, norm, 1e-5, gate_up)
        backend.logits(stream, norm, 1e-5, weight)
        backend.silu_and_mul(backend.rms_norm(stream, norm, 1e-5))
    case = paged_case(
        generator, [20, 3], [1, 3], num_kv_heads=1, head_dim=32, page_size=16, dtype=torch.bfloat16, is_filled=True
    )
    qkv = randn(generator, 4, 4 * 32, dtype=torch.bfloat16)
    q = backend.rope_and_store(qkv, cos_sin_table(32, 16), case.kv_layer, case.batch, 2)
    backend.paged_attention(q, case.kv_layer, case.batch, 1.0)
