"""Rotation of pairs against complex numbers."""

import torch

from kernels.torch_ops.rotary import rotate_pairs, rotate_tail
from unit_tests.kernels.builders import assert_close, cos_sin_table


def test_a_pair_turns_as_a_complex_number(generator):
    x, table = torch.randn(5, 3, 8, generator=generator), cos_sin_table(5, 4)
    turn = torch.complex(*table.double().chunk(2, dim=1))[:, None]
    expected = torch.view_as_real(torch.view_as_complex(x.double().unflatten(-1, (4, 2))) * turn).flatten(-2)
    assert_close(rotate_pairs(x, table), expected)
    assert_close(rotate_pairs(rotate_pairs(x, table), table, inverse=True), x)


def test_only_the_tail_turns(generator):
    x, table = torch.randn(5, 3, 12, generator=generator), cos_sin_table(5, 4)
    out = rotate_tail(x, table)
    assert torch.equal(out[..., :4], x[..., :4])
    assert torch.equal(out[..., 4:], rotate_pairs(x[..., 4:], table))
