"""Torch checksums equal the numpy ones bit for bit."""

import numpy as np
import pytest
import torch

from kernels.checksum import _as_words, _has_whole_rows, _sum_with_torch, _sum_with_triton, page_checksums
from serve.multi_level_cache.checksum import object_checksums, unit_seeds

SIZES = [8, 40, 512, 5000, 512 * 700]


@pytest.mark.parametrize("size", SIZES)
def test_the_loop_on_the_cpu_agrees_with_numpy(size: int):
    pages = np.random.default_rng(size).integers(0, 256, (3, 2, size), dtype=np.uint8)
    seeds = unit_seeds([bytes([n]) * 32 for n in range(3)], 1, [size, size])
    sums = page_checksums(torch.from_numpy(pages), torch.from_numpy(seeds.view(np.int64)))
    expected = [object_checksums(page.reshape(-1), [size, size], seed) for page, seed in zip(pages, seeds, strict=True)]
    assert (sums.numpy().view(np.uint64) == np.stack(expected)).all()


@pytest.mark.parametrize("num_rows", [1, 3, 4097, 40000])
def test_torch_operations_agree_with_the_loop(num_rows: int):
    data = torch.randint(0, 256, (2, num_rows * 512), dtype=torch.uint8)
    zeros = torch.zeros(2, dtype=torch.int64)
    assert torch.equal(_sum_with_torch(_as_words(data).view(2, num_rows, 64)), page_checksums(data, zeros))


@pytest.mark.parametrize("num_rows", [1, 3, 70])
def test_the_gpu_kernel_agrees_with_the_loop_on_parts_of_pages(num_rows: int):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pages = torch.randint(0, 256, (3, 4, num_rows * 512 + 64), dtype=torch.uint8)
    seeds = torch.randint(-(2**62), 2**62, (3, 5))[:, 1:3]
    part = pages[:, 1:3, 64:]
    assert _has_whole_rows(part)
    sums = _sum_with_triton(pages.to(device)[:, 1:3, 64:], seeds.to(device))
    assert torch.equal(sums.cpu(), page_checksums(part.contiguous(), seeds))


def test_views_that_start_between_words_are_copied():
    data = torch.randint(0, 256, (2, 2 * 512 + 3), dtype=torch.uint8)
    zeros = torch.zeros(2, dtype=torch.int64)
    view = data[:, 3:]
    assert torch.equal(page_checksums(view, zeros), page_checksums(view.clone(), zeros))


def test_wrong_dtypes_and_shapes_are_refused():
    with pytest.raises(ValueError, match="uint8"):
        page_checksums(torch.zeros(2, 512), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="uint8"):
        page_checksums(torch.zeros(2, 512, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64))


@pytest.mark.gpu
def test_cuda_agrees_with_the_cpu():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    data = torch.randint(0, 256, (4, 3, 70000), dtype=torch.uint8)
    seeds = torch.randint(-(2**62), 2**62, (4, 3))
    assert torch.equal(page_checksums(data.cuda(), seeds.cuda()).cpu(), page_checksums(data, seeds))
