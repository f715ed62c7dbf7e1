"""A small expression layer that writes LLVM IR, so that CPU kernels can be written as Python that reads like C.

`Function` holds the text of one function; `Value` is one SSA value with the usual operators. Addresses are plain i64
values. Variables live in stack slots that LLVM's mem2reg turns into registers, so kernels never write phi nodes.
Why not numba: these kernels need exact vector types and the bf16 dot product, whole modules compile in tens of
milliseconds (no cache on disk to share, own or invalidate), and importing numba costs more than compiling all of them.
"""

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

I1, I8, I16, I32, I64, F32, BF16 = "i1", "i8", "i16", "i32", "i64", "float", "bfloat"
_SUFFIXES = {I16: "i16", I32: "i32", F32: "f32", BF16: "bf16"}  # of overloaded intrinsics' names
SIZES = {I8: 1, I16: 2, I32: 4, F32: 4, BF16: 2, I64: 8}


def vector(lanes: int, element: str) -> str:
    """The type of `lanes` elements side by side."""
    return f"<{lanes} x {element}>"


def lanes_of(type_: str) -> int:
    """Lanes of a vector type, 1 for a scalar."""
    return int(type_[1:].split(" ")[0]) if type_.startswith("<") else 1


def element_of(type_: str) -> str:
    """Element type of a vector type; a scalar is its own."""
    return type_[1:-1].split(" x ")[1] if type_.startswith("<") else type_


def like(type_: str, element: str) -> str:
    """`type_` with another element type; a scalar stays a scalar, a vector of one lane a vector."""
    return vector(lanes_of(type_), element) if type_.startswith("<") else element


def _literal(type_: str, number: int | float | bool) -> str:
    """A scalar constant as LLVM reads it (floats as the bits of a double, which is exact)."""
    if type_ == F32:
        as_single = struct.unpack("f", struct.pack("f", float(number)))[0]
        return f"0x{struct.unpack('Q', struct.pack('d', as_single))[0]:016X}"
    return str(int(number))


Number = int | float


class Value:
    """One SSA value of a function under construction. Operators emit instructions; numbers are converted (splat)."""

    __slots__ = ("fn", "name", "type")

    def __init__(self, fn: "Function", type_: str, name: str) -> None:
        self.fn, self.type, self.name = fn, type_, name

    def __str__(self) -> str:
        return f"{self.type} {self.name}"

    def _binary(self, other: "Value | Number", int_op: str, float_op: str = "") -> "Value":
        right = self.fn.as_value(other, self.type)
        op = float_op if element_of(self.type) == F32 else int_op
        if not op or right.type != self.type:
            raise TypeError(f"cannot apply {int_op} to {self.type} and {right.type}")
        return self.fn.emit(self.type, f"{op} {self}, {right.name}")

    def __add__(self, other: "Value | Number") -> "Value":
        return self._binary(other, "add", "fadd contract")

    __radd__ = __add__

    def __sub__(self, other: "Value | Number") -> "Value":
        return self._binary(other, "sub", "fsub contract")

    def __rsub__(self, other: "Value | Number") -> "Value":
        return self.fn.as_value(other, self.type) - self

    def __mul__(self, other: "Value | Number") -> "Value":
        return self._binary(other, "mul", "fmul contract")

    __rmul__ = __mul__

    def __truediv__(self, other: "Value | Number") -> "Value":
        return self._binary(other, "", "fdiv")

    def __rtruediv__(self, other: "Value | Number") -> "Value":
        return self.fn.as_value(other, self.type) / self

    def __floordiv__(self, other: "Value | Number") -> "Value":
        return self._binary(other, "sdiv")

    def __mod__(self, other: "Value | Number") -> "Value":
        return self._binary(other, "srem")

    def __lshift__(self, other: "Value | Number") -> "Value":
        return self._binary(other, "shl")

    def __rshift__(self, other: "Value | Number") -> "Value":
        return self._binary(other, "lshr")

    def __and__(self, other: "Value | Number") -> "Value":
        return self._binary(other, "and")

    def __or__(self, other: "Value | Number") -> "Value":
        return self._binary(other, "or")

    def _compare(self, other: "Value | Number", int_op: str, float_op: str) -> "Value":
        right = self.fn.as_value(other, self.type)
        op = f"fcmp {float_op}" if element_of(self.type) == F32 else f"icmp {int_op}"
        return self.fn.emit(like(self.type, I1), f"{op} {self}, {right.name}")

    def __lt__(self, other: "Value | Number") -> "Value":
        return self._compare(other, "slt", "olt")

    def __le__(self, other: "Value | Number") -> "Value":
        return self._compare(other, "sle", "ole")

    def __gt__(self, other: "Value | Number") -> "Value":
        return self._compare(other, "sgt", "ogt")

    def __ge__(self, other: "Value | Number") -> "Value":
        return self._compare(other, "sge", "oge")

    def equals(self, other: "Value | Number") -> "Value":
        return self._compare(other, "eq", "oeq")


class Variable:
    """A mutable slot of one type; read with `get`, written with `set`."""

    def __init__(self, fn: "Function", type_: str, pointer: str) -> None:
        self.fn, self.type, self.pointer = fn, type_, pointer

    def get(self) -> Value:
        return self.fn.emit(self.type, f"load {self.type}, ptr {self.pointer}")

    def set(self, value: Value | Number) -> None:
        self.fn.line(f"store {self.fn.as_value(value, self.type)}, ptr {self.pointer}")


class Function:
    """One function `void name(i64, ...)` (or of another return type) as it is being written."""

    def __init__(self, name: str, num_args: int, returns: str = "void", arg_types: Sequence[str] | None = None) -> None:
        self.name, self.returns = name, returns
        types = list(arg_types) if arg_types is not None else [I64] * num_args
        self.args = [Value(self, type_, f"%arg{i}") for i, type_ in enumerate(types)]
        self.declarations: set[str] = set()
        self._slots: list[str] = []
        self._lines: list[str] = []
        self._counter = 0

    # Emission

    def line(self, text: str) -> None:
        self._lines.append(f"  {text}")

    def emit(self, type_: str, text: str) -> Value:
        self._counter += 1
        name = f"%v{self._counter}"
        self.line(f"{name} = {text}")
        return Value(self, type_, name)

    def _label(self) -> str:
        self._counter += 1
        return f"b{self._counter}"

    def _start_block(self, label: str) -> None:
        self._lines.append(f"{label}:")

    def text(self) -> str:
        """The whole function; the last block returns void if nothing else was written."""
        arguments = ", ".join(str(arg) for arg in self.args)
        lines = [f"define {self.returns} @{self.name}({arguments}) #0 {{", "entry:", *self._slots, *self._lines]
        if self.returns == "void":
            lines.append("  ret void")
        return "\n".join([*lines, "}"])

    # Values

    def as_value(self, value: "Value | Number", type_: str) -> Value:
        if isinstance(value, Value):
            return value
        element = element_of(type_)
        literal = _literal(element, value)
        if type_.startswith("<"):
            literal = "<" + ", ".join([f"{element} {literal}"] * lanes_of(type_)) + ">"
        return Value(self, type_, literal)

    def const(self, number: Number, type_: str = I64) -> Value:
        return self.as_value(number, type_)

    def iota(self, lanes: int, element: str = I32) -> Value:
        return Value(self, vector(lanes, element), "<" + ", ".join(f"{element} {i}" for i in range(lanes)) + ">")

    def var(self, init: "Value | Number", type_: str = I64) -> Variable:
        slot_type = init.type if isinstance(init, Value) else type_
        self._counter += 1
        pointer = f"%s{self._counter}"
        self._slots.append(f"  {pointer} = alloca {slot_type}, align 64")
        variable = Variable(self, slot_type, pointer)
        variable.set(init)
        return variable

    def stack(self, num_bytes: int) -> Value:
        """Address of a 64-byte aligned scratch array of the call."""
        self._counter += 1
        pointer = f"%s{self._counter}"
        self._slots.append(f"  {pointer} = alloca [{num_bytes} x i8], align 64")
        return self.emit(I64, f"ptrtoint ptr {pointer} to i64")

    # Memory

    def pointer(self, address: Value) -> str:
        return self.emit("ptr", f"inttoptr {address} to ptr").name

    def load(self, address: Value, type_: str) -> Value:
        align = SIZES[element_of(type_)]
        return self.emit(type_, f"load {type_}, ptr {self.pointer(address)}, align {align}")

    def store(self, value: Value, address: Value) -> None:
        align = SIZES[element_of(value.type)]
        self.line(f"store {value}, ptr {self.pointer(address)}, align {align}")

    def masked_load(self, address: Value, type_: str, mask: Value) -> Value:
        """Lanes of `mask` from memory, zeros elsewhere; masked lanes are not touched."""
        suffix = f"v{lanes_of(type_)}{_SUFFIXES[element_of(type_)]}.p0"
        align = SIZES[element_of(type_)]
        pointer = Value(self, "ptr", self.pointer(address))
        zero = Value(self, type_, "zeroinitializer")
        return self.call(type_, f"llvm.masked.load.{suffix}", pointer, self.const(align, I32), mask, zero)

    def masked_store(self, value: Value, address: Value, mask: Value) -> None:
        element = _SUFFIXES[element_of(value.type)]
        align = self.const(SIZES[element_of(value.type)], I32)
        pointer = Value(self, "ptr", self.pointer(address))
        self.call("void", f"llvm.masked.store.v{lanes_of(value.type)}{element}.p0", value, pointer, align, mask)

    def prefetch(self, address: Value, locality: int = 3) -> None:
        """Ask for a cache line to read; locality 3 is the nearest cache, 0 non-temporal."""
        pointer = Value(self, "ptr", self.pointer(address))
        flags = [self.const(0, I32), self.const(locality, I32), self.const(1, I32)]
        self.call("void", "llvm.prefetch.p0", pointer, *flags)

    # Control

    @contextmanager
    def loop(self, start: "Value | Number", stop: "Value | Number", step: "Value | Number" = 1) -> Iterator[Value]:
        """for (i64 i = start; i < stop; i += step); the body may not leave early."""
        index = self.var(self.as_value(start, I64))
        stop_value, step_value = self.as_value(stop, I64), self.as_value(step, I64)
        head, body, end = self._label(), self._label(), self._label()
        self.line(f"br label %{head}")
        self._start_block(head)
        current = index.get()
        self.line(f"br {current < stop_value}, label %{body}, label %{end}")
        self._start_block(body)
        yield current
        index.set(index.get() + step_value)
        self.line(f"br label %{head}")
        self._start_block(end)

    @contextmanager
    def while_(self, condition: "object") -> Iterator[None]:
        """while (condition()); `condition` is a callable that emits its test each time round."""
        head, body, end = self._label(), self._label(), self._label()
        self.line(f"br label %{head}")
        self._start_block(head)
        self.line(f"br {condition()}, label %{body}, label %{end}")  # type: ignore[operator]
        self._start_block(body)
        yield
        self.line(f"br label %{head}")
        self._start_block(end)

    @contextmanager
    def if_(self, condition: Value) -> Iterator[None]:
        then, end = self._label(), self._label()
        self.line(f"br {condition}, label %{then}, label %{end}")
        self._start_block(then)
        yield
        self.line(f"br label %{end}")
        self._start_block(end)

    # Lane operations

    def select(self, condition: Value, yes: "Value | Number", no: "Value | Number") -> Value:
        type_ = yes.type if isinstance(yes, Value) else no.type  # type: ignore[union-attr]
        return self.emit(type_, f"select {condition}, {self.as_value(yes, type_)}, {self.as_value(no, type_)}")

    def minimum(self, a: Value, b: "Value | Number") -> Value:
        return self.select(a < b, a, b)

    def maximum(self, a: Value, b: "Value | Number") -> Value:
        return self.select(a > b, a, b)

    def cast(self, op: str, value: Value, element: str) -> Value:
        """One of LLVM's conversions (zext, trunc, sext, sitofp, fptosi, fptrunc) on every lane."""
        type_ = like(value.type, element)
        return self.emit(type_, f"{op} {value} to {type_}")

    def bitcast(self, value: Value, type_: str) -> Value:
        return value if value.type == type_ else self.emit(type_, f"bitcast {value} to {type_}")

    def splat(self, value: Value, lanes: int) -> Value:
        type_ = vector(lanes, value.type)
        first = self.emit(type_, f"insertelement {type_} poison, {value}, i64 0")
        return self.shuffle(first, first, [0] * lanes)

    def extract(self, value: Value, lane: int) -> Value:
        return self.emit(element_of(value.type), f"extractelement {value}, i64 {lane}")

    def shuffle(self, a: Value, b: Value, lanes: Sequence[int]) -> Value:
        mask = ", ".join(f"i32 {lane}" for lane in lanes)
        return self.emit(
            vector(len(lanes), element_of(a.type)), f"shufflevector {a}, {b}, <{len(lanes)} x i32> <{mask}>"
        )

    def call(self, returns: str, name: str, *args: Value) -> Value:
        """Call a declared function or intrinsic."""
        types = ", ".join(arg.type for arg in args)
        self.declarations.add(f"declare {returns} @{name}({types})")
        text = f"call {returns} @{name}({', '.join(map(str, args))})"
        if returns == "void":
            self.line(text)
            return Value(self, "void", "")
        return self.emit(returns, text)

    def call_pointer(self, address: Value, *args: Value) -> None:
        """Call the function `void (...)` at an address."""
        pointer = self.pointer(address)
        self.line(f"call void {pointer}({', '.join(map(str, args))})")
