"""The gated delta rule in chunks and steps against its definition, token by token."""

import pytest
import torch

from kernels.reference import ReferenceBackend
from unit_tests.kernels.builders import assert_close
from unit_tests.kernels.torch_ops.builders import STEPS, runs_of, step_of

BACKEND = ReferenceBackend()
NUM_K_HEADS, GROUP, K_DIM, V_DIM = 2, 3, 8, 12


def by_definition(q, k, v, log_decay, rate, state):
    """One sequence in float64; state [Hv, Dk, Dv] -> outputs [t, Hv, Dv] and the last state."""
    outputs = []
    for token in range(len(q)):
        out = torch.empty(v.shape[1:], dtype=torch.float64)
        for head in range(v.shape[1]):
            query, key = (x[token, head // GROUP].double() for x in (q, k))
            query, key = (x / (x.square().sum() + 1e-6).sqrt() for x in (query, key))
            state[head] *= log_decay[token, head].double().exp()
            update = rate[token, head].double() * (v[token, head].double() - key @ state[head])
            state[head] += torch.outer(key, update)
            out[head] = query @ state[head] / K_DIM**0.5
        outputs.append(out)
    return torch.stack(outputs), state


def inputs_of(generator, count):
    def randn(*shape):
        return torch.randn(count, *shape, generator=generator)

    num_v_heads = NUM_K_HEADS * GROUP
    q, k, v = randn(NUM_K_HEADS, K_DIM), randn(NUM_K_HEADS, K_DIM), randn(num_v_heads, V_DIM)
    return q, k, v, -0.2 * randn(num_v_heads).abs(), randn(num_v_heads).sigmoid()


@pytest.mark.parametrize("step", STEPS)
def test_outputs_and_states_are_those_of_the_definition(generator, step):
    batch = step_of(generator, *STEPS[step])
    inputs = inputs_of(generator, batch.positions.shape[0])
    pool = torch.randn(9, NUM_K_HEADS, 2, GROUP, K_DIM, V_DIM, generator=generator)
    before, pages = pool.clone(), torch.tensor([5, 2, 7, 0][: len(STEPS[step][0])])
    out = BACKEND.gated_delta_rule(*inputs, pool[:, :, 1], pages, batch)
    parts = zip(*(runs_of(batch, tensor) for tensor in inputs), strict=True)
    for page, part, found in zip(pages.tolist(), parts, runs_of(batch, out), strict=True):
        expected, state = by_definition(*part, before[page, :, 1].flatten(0, 1).double())
        assert_close(found, expected, 1e-5)
        assert_close(pool[page, :, 1].flatten(0, 1), state, 1e-5)
    others = [page for page in range(9) if page not in pages.tolist()]
    assert torch.equal(pool[others], before[others])
    assert torch.equal(pool[:, :, 0], before[:, :, 0])


def test_a_long_decay_does_not_overflow(generator):
    batch = step_of(generator, [200], [200])
    q, k, v, _, rate = inputs_of(generator, 200)
    log_decay = torch.full(rate.shape, -30.0)
    pool = torch.ones(1, NUM_K_HEADS, GROUP, K_DIM, V_DIM)
    out = BACKEND.gated_delta_rule(q, k, v, log_decay, rate, pool, torch.tensor([0]), batch)
    assert out.isfinite().all()
    assert pool.isfinite().all()


def test_a_state_stays_float32_with_bfloat16_inputs(generator):
    batch = step_of(generator, [9], [9])
    inputs = inputs_of(generator, 9)
    pools = [torch.zeros(1, NUM_K_HEADS, GROUP, K_DIM, V_DIM) for _ in range(2)]
    rounded = [tensor.bfloat16() for tensor in inputs]
    out = BACKEND.gated_delta_rule(*rounded, pools[0], torch.tensor([0]), batch)
    exact = BACKEND.gated_delta_rule(*(tensor.float() for tensor in rounded), pools[1], torch.tensor([0]), batch)
    assert out.dtype == torch.bfloat16
    assert_close(out, exact, 1e-2)
    assert torch.equal(pools[0], pools[1])
