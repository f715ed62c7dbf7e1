"""Tensors in huge pages."""

import torch

from kernels.cpu.memory import empty_huge


def test_empty_huge_is_aligned_zeroed_and_writable() -> None:
    tensor = empty_huge((3, 5), torch.bfloat16)
    assert tensor.data_ptr() % (2 << 20) == 0
    assert not tensor.any()
    tensor.fill_(2)
    assert tensor.sum() == 30


def test_views_keep_the_memory() -> None:
    view = empty_huge((1000, 10), torch.float32)[5:7]
    view.fill_(1)
    assert view.sum() == 20
