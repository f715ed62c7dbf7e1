"""Turns IR into machine code for this CPU, and names the instruction sets that kernels are written for."""

import ctypes
import enum
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import llvmlite.binding as llvm  # type: ignore[import-untyped]

from kernels.cpu.ir import Function


class InstructionSet(enum.Enum):
    """What a kernel may use. A CPU that has one has all below it."""

    AVX512_BF16 = "avx512_bf16"  # 16 float lanes and a dot product of bf16 pairs
    AVX512 = "avx512"  # 16 float lanes; bf16 is shifted to float32
    GENERIC = "generic"  # 8 float lanes of whatever the CPU has (AVX2, NEON)


@dataclass(frozen=True)
class Target:
    """The part of the instruction set that kernel writers choose by."""

    instruction_set: InstructionSet
    lanes: int  # float32 lanes of a vector
    has_bf16_dot: bool
    num_registers: int  # vector registers

    @staticmethod
    def of(instruction_set: InstructionSet) -> "Target":
        wide = instruction_set is not InstructionSet.GENERIC
        has_dot = instruction_set is InstructionSet.AVX512_BF16
        return Target(instruction_set, 16 if wide else 8, has_dot, 32 if wide else 16)


@lru_cache
def host_features() -> dict[str, bool]:
    return dict(llvm.get_host_cpu_features())


@lru_cache
def best_instruction_set() -> InstructionSet:
    """The best that this CPU has."""
    features = host_features()
    if not all(features.get(f"avx512{part}", False) for part in ("f", "bw", "vl", "dq")):
        return InstructionSet.GENERIC
    return InstructionSet.AVX512_BF16 if features.get("avx512bf16", False) else InstructionSet.AVX512


def _feature_string(instruction_set: InstructionSet) -> str:
    """Host features without those above `instruction_set`, so that a test of a lower one really runs it."""
    features = dict(host_features())
    for name in features:
        drop_all = instruction_set is InstructionSet.GENERIC and name.startswith("avx512")
        if drop_all or (instruction_set is InstructionSet.AVX512 and name == "avx512bf16"):
            features[name] = False
    return ",".join(f"{'+' if on else '-'}{name}" for name, on in sorted(features.items()))


class Compiler:
    """Owns the machine code of one instruction set for the life of the process. Safe to use from any thread."""

    def __init__(self, instruction_set: InstructionSet) -> None:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        self.target = Target.of(instruction_set)
        self._lock = threading.RLock()
        self._addresses: dict[str, int] = {}
        self._machine = llvm.Target.from_default_triple().create_target_machine(
            cpu=llvm.get_host_cpu_name(), features=_feature_string(instruction_set), opt=3, jit=True
        )
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), self._machine)

    def address(self, name: str, build: Callable[[Target, str], Function]) -> int:
        """Address of the function `name`, compiled from `build(target, name)` on first use."""
        with self._lock:
            found = self._addresses.get(name)
            if found is None:
                found = self._addresses[name] = self._compile(build(self.target, name))
            return found

    def _module(self, function: Function) -> llvm.ModuleRef:
        parts = [
            *sorted(function.declarations),
            function.text(),
            'attributes #0 = { nounwind "no-trapping-math"="true" }',
        ]
        module = llvm.parse_assembly("\n".join(parts))
        module.verify()
        builder = llvm.create_pass_builder(self._machine, llvm.create_pipeline_tuning_options())
        passes = llvm.create_new_module_pass_manager()
        passes.add_sroa_pass()
        passes.add_simplify_cfg_pass()
        passes.add_instruction_combine_pass()
        passes.add_loop_rotate_pass()
        passes.add_simplify_cfg_pass()
        passes.run(module, builder)
        return module

    def _compile(self, function: Function) -> int:
        self._engine.add_module(self._module(function))
        self._engine.finalize_object()
        return int(self._engine.get_function_address(function.name))


@lru_cache
def get_compiler(instruction_set: InstructionSet) -> Compiler:
    """The process's compiler for one instruction set."""
    return Compiler(instruction_set)


def as_python_function(address: int, num_args: int, *, release_gil: bool) -> Callable[..., None]:
    """A callable of int64 arguments at a machine code address."""
    make = ctypes.CFUNCTYPE if release_gil else ctypes.PYFUNCTYPE
    return make(None, *[ctypes.c_int64] * num_args)(address)
