"""Latent attention, absorbed and expanded, against attention over keys and values that are made one by one."""

import pytest
import torch

from kernels.reference import ReferenceBackend
from unit_tests.kernels.builders import assert_close
from unit_tests.kernels.torch_ops.builders import STEPS, runs_of, spread, step_of

BACKEND = ReferenceBackend()
HEADS, NOPE, ROTARY, VALUE, RANK = 3, 8, 4, 6, 16


def by_definition(q, rows, kv_b, positions, scale):
    """One sequence, q [t, H, N + R] -> [t, H, V]."""
    out = torch.empty(q.shape[0], HEADS, VALUE, dtype=torch.float64)
    for token, position in enumerate(positions.tolist()):
        seen = rows[: position + 1].double()
        for head in range(HEADS):
            made = seen[:, :RANK] @ kv_b[head].double().T  # [s, N + V]
            keys = torch.cat((made[:, :NOPE], seen[:, RANK:]), dim=1)
            weights = (keys @ q[token, head].double() * scale).softmax(0)
            out[token, head] = weights @ made[:, NOPE:]
    return out


@pytest.mark.parametrize("step", STEPS)
def test_it_is_attention_over_expanded_keys_and_values(generator, step):
    contexts, counts = STEPS[step]
    batch = step_of(generator, contexts, counts)
    rows = [torch.randn(length, RANK + ROTARY, generator=generator) for length in contexts]
    q = torch.randn(sum(counts), HEADS, NOPE + ROTARY, generator=generator)
    kv_b = torch.randn(HEADS, NOPE + VALUE, RANK, generator=generator)
    out = BACKEND.latent_attention(q, spread(batch, rows), kv_b, batch, 0.3)
    parts = zip(runs_of(batch, q), rows, runs_of(batch, batch.positions), strict=True)
    expected = torch.cat([by_definition(part, row, kv_b, positions, 0.3) for part, row, positions in parts])
    assert_close(out, expected)


def test_bfloat16_gives_bfloat16(generator):
    batch = step_of(generator, [20, 3], [1, 3])
    rows = [torch.randn(length, RANK + ROTARY, generator=generator).bfloat16() for length in (20, 3)]
    q = torch.randn(4, HEADS, NOPE + ROTARY, generator=generator).bfloat16()
    kv_b = torch.randn(HEADS, NOPE + VALUE, RANK, generator=generator).bfloat16()
    out = BACKEND.latent_attention(q, spread(batch, rows), kv_b, batch, 0.3)
    exact = BACKEND.latent_attention(q.float(), spread(batch, [row.float() for row in rows]), kv_b.float(), batch, 0.3)
    assert out.dtype == torch.bfloat16
    assert_close(out, exact, 1e-2)
