"""The thread team: every chunk exactly once, whatever the number of threads; no thread outlives it."""

import ctypes
import os
import subprocess
import sys
import time

import pytest
import torch

from kernels.cpu.ir import I64, Function
from kernels.cpu.jit import Target, best_instruction_set, get_compiler
from kernels.cpu.runtime import Runtime
from kernels.cpu.team import MAX_CHUNKS, ThreadTeam


def build_increment(target: Target, name: str) -> Function:
    """Chunk i: words[i] += 1."""
    f = Function(name, 2)
    word = f.load(f.args[0], I64) + f.args[1] * 8
    f.store(f.load(word, I64) + 1, word)
    return f


@pytest.mark.parametrize("num_threads", [1, 2, 4])
@pytest.mark.parametrize("num_chunks", [0, 1, 2, 7, 1000])
def test_every_chunk_runs_once(num_threads: int, num_chunks: int) -> None:
    compiler = get_compiler(best_instruction_set())
    team = ThreadTeam(compiler, num_threads)
    counts = torch.zeros(num_chunks + 1, dtype=torch.int64)
    body = compiler.address("test_increment", build_increment)
    job = (ctypes.c_int64 * 4)(body, 0, num_chunks, counts.data_ptr())
    for repeat in range(50):
        if repeat % 10 == 9:
            time.sleep(0.001)  # the workers fall asleep
        team.launch(ctypes.addressof(job), is_long=repeat % 2 == 0)
    assert counts[:num_chunks].eq(50).all()
    assert counts[num_chunks] == 0
    team.close()
    team.launch(ctypes.addressof(job), is_long=False)
    assert counts[:num_chunks].eq(51).all()


def test_close_ends_the_threads() -> None:
    before = len(os.listdir("/proc/self/task"))
    team = ThreadTeam(get_compiler(best_instruction_set()), 3)
    assert len(os.listdir("/proc/self/task")) == before + 2
    team.close()
    team.close()
    assert len(os.listdir("/proc/self/task")) == before


def test_at_least_one_thread() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        ThreadTeam(get_compiler(best_instruction_set()), 0)


def test_a_forgotten_backend_does_not_block_exit_and_a_fork_goes_on_alone() -> None:
    code = """
import os, torch
from kernels.cpu.backend import CpuBackend
backend = CpuBackend(num_threads=2)
x, w = torch.ones(2, 64), torch.ones(256, 64)
assert backend.linear(x, w).eq(64).all()
if os.fork() == 0:
    os._exit(0 if backend.linear(x, w).eq(64).all() else 1)
assert os.wait()[1] == 0
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_job_of_more_chunks_than_can_be_counted_is_refused() -> None:
    runtime = Runtime(1, None)
    body = runtime.kernel("test_increment", build_increment)
    counts = torch.zeros(MAX_CHUNKS + 1, dtype=torch.int64)
    runtime.run(body, 0, MAX_CHUNKS, (counts.data_ptr(),))
    with pytest.raises(ValueError, match="32001 chunks"):
        runtime.run(body, 0, MAX_CHUNKS + 1, (counts.data_ptr(),))
    assert counts.sum() == MAX_CHUNKS
