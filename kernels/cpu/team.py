"""A team of native threads that shares the chunks of one job, woken in about a microsecond while it is busy.

Job: int64 words [body function, prologue function or 0, number of chunks, arguments...]. `launch` runs the prologue on
the calling thread (it may still set the number of chunks), posts the job, and takes chunks beside the workers until all
are done. A worker that is late takes nothing, so that a descheduled thread never holds up a job it has not begun. After
its last chunk a worker spins about 50 us (the next kernel of a decode step comes sooner) and then sleeps on a futex.

Workers are plain pthreads that never touch the interpreter. The control block is one word
`epoch << 32 | chunks << 16 | next`, so that claiming a chunk and knowing how many there are is one atomic step.
"""

import atexit
import ctypes
import os
import platform
import weakref
from functools import lru_cache

from kernels.cpu.ir import I32, I64, Function, Value
from kernels.cpu.jit import Compiler, Target, as_python_function

MAX_CHUNKS = 32_000  # well within the word's 16 bits, which also count what late workers claim in vain
JOB_BODY, JOB_PROLOGUE, JOB_CHUNKS, JOB_ARGS = 0, 1, 2, 3

# Byte offsets in the control block, on cache lines of their own.
_CLAIM, _DONE, _WAKE, _SLEEPERS, _STOP, _JOB = 0, 64, 128, 132, 192, 200
_BLOCK_BYTES = 256
_FUTEX_SYSCALL = {"x86_64": 202, "aarch64": 98}
_SPINS_BEFORE_SLEEP = 2_000  # of one pause each: about 50 us
_SPINS_BEFORE_YIELD = 4_000


def _atomic_load(f: Function, address: Value, type_: str = I64) -> Value:
    align = 8 if type_ == I64 else 4
    return f.emit(type_, f"load atomic {type_}, ptr {f.pointer(address)} seq_cst, align {align}")


def _atomic_store(f: Function, value: Value, address: Value) -> None:
    align = 8 if value.type == I64 else 4
    f.line(f"store atomic {value}, ptr {f.pointer(address)} seq_cst, align {align}")


def _atomic_add(f: Function, address: Value, number: int, type_: str = I64) -> Value:
    return f.emit(type_, f"atomicrmw add ptr {f.pointer(address)}, {type_} {number} seq_cst")


def _pause(f: Function) -> None:
    if platform.machine() in ("x86_64", "AMD64"):
        f.call("void", "llvm.x86.sse2.pause")


def _futex(f: Function, address: Value, operation: int, value: Value) -> None:
    number = f.const(_FUTEX_SYSCALL[platform.machine()])
    zero = f.const(0)
    f.declarations.add("declare i64 @syscall(i64, ...)")
    args = [number, address, f.const(operation | 128), value, zero, zero, zero]  # 128: private to the process
    f.emit(I64, f"call i64 (i64, ...) @syscall({', '.join(map(str, args))})")


def _chunks_of(claim: Value) -> Value:
    return (claim >> 16) & 0xFFFF


def _next_of(claim: Value) -> Value:
    return claim & 0xFFFF


def _run_chunk(f: Function, team: Value, claim: Value) -> None:
    """Run the chunk that `claim` won, and count it."""
    job = f.load(team + _JOB, I64)
    f.call_pointer(f.load(job + 8 * JOB_BODY, I64), job + 8 * JOB_ARGS, _next_of(claim))
    _atomic_add(f, team + _DONE, 1)


def build_launch(target: Target, name: str) -> Function:
    """void launch(team or 0, job): run a job to its end; without a team, alone."""
    f = Function(name, 2)
    team, job = f.args
    prologue = f.load(job + 8 * JOB_PROLOGUE, I64)
    with f.if_(prologue > 0):
        f.call_pointer(prologue, job + 8 * JOB_ARGS)
    chunks = f.load(job + 8 * JOB_CHUNKS, I64)
    alone = f.var(1)
    with f.if_(team > 0), f.if_(chunks > 1):
        alone.set(0)
    with f.if_(alone.get() > 0):
        body = f.load(job + 8 * JOB_BODY, I64)
        with f.loop(0, chunks) as chunk:
            f.call_pointer(body, job + 8 * JOB_ARGS, chunk)
    with f.if_(alone.get() < 1):
        _post_and_share(f, team, job, chunks)
    return f


def _post_and_share(f: Function, team: Value, job: Value, chunks: Value) -> None:
    f.store(job, team + _JOB)
    _atomic_store(f, f.const(0), team + _DONE)
    epoch = (_atomic_load(f, team + _CLAIM) >> 32) + 1
    _atomic_store(f, (epoch << 32) | (chunks << 16), team + _CLAIM)
    _atomic_add(f, team + _WAKE, 1, I32)
    with f.if_(_atomic_load(f, team + _SLEEPERS, I32) > 0):
        _futex(f, team + _WAKE, 1, f.const(0x7FFFFFFF))
    claim = f.var(_atomic_add(f, team + _CLAIM, 1))
    with f.while_(lambda: _next_of(claim.get()) < chunks):
        _run_chunk(f, team, claim.get())
        claim.set(_atomic_add(f, team + _CLAIM, 1))
    spins = f.var(0)
    with f.while_(lambda: _atomic_load(f, team + _DONE) < chunks):
        _pause(f)
        spins.set(spins.get() + 1)
        with f.if_(spins.get() > _SPINS_BEFORE_YIELD):
            f.call(I32, "sched_yield")


def build_worker(target: Target, name: str) -> Function:
    """i64 worker(team): the life of a worker thread."""
    f = Function(name, 1, returns=I64)
    team = f.args[0]
    spins = f.var(0)
    with f.while_(lambda: _atomic_load(f, team + _STOP).equals(0)):
        claim = _atomic_load(f, team + _CLAIM)
        has_work = f.var(0)
        with f.if_(_next_of(claim) < _chunks_of(claim)):
            won = _atomic_add(f, team + _CLAIM, 1)
            with f.if_(_next_of(won) < _chunks_of(won)):
                _run_chunk(f, team, won)
                has_work.set(1)
        with f.if_(has_work.get() > 0):
            spins.set(0)
        with f.if_(has_work.get() < 1):
            _pause(f)
            spins.set(spins.get() + 1)
            with f.if_(spins.get() > _SPINS_BEFORE_SLEEP):
                _sleep_until_posted(f, team)
                spins.set(0)
    f.line("ret i64 0")
    return f


def _sleep_until_posted(f: Function, team: Value) -> None:
    """Sleep unless a job is there; the poster bumps the word that the futex compares, so no wake-up is lost."""
    _atomic_add(f, team + _SLEEPERS, 1, I32)
    seen = f.cast("zext", _atomic_load(f, team + _WAKE, I32), I64)
    claim = _atomic_load(f, team + _CLAIM)
    with f.if_(_next_of(claim) >= _chunks_of(claim)), f.if_(_atomic_load(f, team + _STOP).equals(0)):
        _futex(f, team + _WAKE, 0, seen)
    _atomic_add(f, team + _SLEEPERS, -1, I32)


_teams: "weakref.WeakSet[ThreadTeam]" = weakref.WeakSet()


class ThreadTeam:
    """`num_threads - 1` workers beside the calling thread. One thread at a time may launch jobs."""

    def __init__(self, compiler: Compiler, num_threads: int) -> None:
        self._threads: list[ctypes.c_ulong] = []
        if num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, got {num_threads}")
        self.num_threads = num_threads
        launch = compiler.address("launch", build_launch)
        self._launch_short = as_python_function(launch, 2, release_gil=False)
        self._launch_long = as_python_function(launch, 2, release_gil=True)
        self._memory = ctypes.create_string_buffer(_BLOCK_BYTES + 64)
        self._block = (ctypes.addressof(self._memory) + 63) // 64 * 64
        if num_threads > 1:
            self._start(compiler.address("worker", build_worker))
            _register_exit()
            _teams.add(self)

    def _start(self, worker: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        for _ in range(self.num_threads - 1):
            thread = ctypes.c_ulong()
            error = libc.pthread_create(
                ctypes.byref(thread), None, ctypes.c_void_p(worker), ctypes.c_void_p(self._block)
            )
            if error:
                raise OSError(error, os.strerror(error), "pthread_create")
            self._threads.append(thread)

    def launch(self, job_address: int, is_long: bool) -> None:
        """Run the job at an address; a long one lets other Python threads run meanwhile."""
        (self._launch_long if is_long else self._launch_short)(self._block if self._threads else 0, job_address)

    def close(self) -> None:
        """End and join the workers; later jobs run on the calling thread alone."""
        if not self._threads:
            return
        libc = ctypes.CDLL(None)
        ctypes.c_int64.from_address(self._block + _STOP).value = 1
        wake = ctypes.c_int32.from_address(self._block + _WAKE)
        wake.value += 1
        futex = _FUTEX_SYSCALL[platform.machine()]
        libc.syscall(
            ctypes.c_long(futex), ctypes.c_void_p(self._block + _WAKE), ctypes.c_long(1 | 128), ctypes.c_long(64)
        )
        for thread in self._threads:
            libc.pthread_join(thread, None)
        self._threads.clear()

    def forget(self) -> None:
        """In a forked child the workers do not exist: go on alone."""
        self._threads.clear()

    def __del__(self) -> None:
        self.close()


def _close_all() -> None:
    for team in list(_teams):
        team.close()


def _forget_all() -> None:
    for team in list(_teams):
        team.forget()


@lru_cache
def _register_exit() -> None:
    atexit.register(_close_all)
    os.register_at_fork(after_in_child=_forget_all)
