"""Vector building blocks of the kernels: element types, multiply-accumulate, rounding, reductions, exp.

Everything is in terms of a `Target`: its float32 lanes L, and whether it has the dot product of bf16 pairs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kernels.cpu.ir import BF16, F32, I1, I16, I32, Function, Value, lanes_of, like, vector
from kernels.cpu.jit import Target


def fma(f: Function, a: Value, b: Value, c: Value) -> Value:
    """a * b + c, contracted to one instruction where the CPU has it."""
    suffix = f"v{lanes_of(a.type)}f32" if a.type.startswith("<") else "f32"
    return f.call(a.type, f"llvm.fmuladd.{suffix}", a, b, c)


def bf16_bits_to_f32(f: Function, bits: Value) -> Value:
    """i16 lanes that hold bf16 to float32, exactly."""
    return f.bitcast(f.cast("zext", bits, I32) << 16, like(bits.type, F32))


def f32_to_bf16_bits(f: Function, target: Target, value: Value) -> Value:
    """Float32 lanes to bf16 bits (i16), to nearest even; NaN stays NaN."""
    if target.has_bf16_dot and lanes_of(value.type) > 1:
        return f.bitcast(f.cast("fptrunc", value, BF16), like(value.type, I16))
    bits = f.bitcast(value, like(value.type, I32))
    odd = (bits >> 16) & 1
    rounded = (bits + (odd + 0x7FFF)) >> 16
    is_nan = f.emit(like(value.type, I1), f"fcmp uno {value}, {value.name}")
    return f.cast("trunc", f.select(is_nan, (bits >> 16) | 0x40, rounded), I16)


@dataclass(frozen=True)
class Element:
    """The model dtype as kernels see it. A block is what one multiply-accumulate of L lanes eats along K."""

    target: Target
    is_bf16: bool

    @property
    def size(self) -> int:
        return 2 if self.is_bf16 else 4

    @property
    def code(self) -> str:
        return "bf16" if self.is_bf16 else "f32"

    @property
    def pack(self) -> int:
        """Elements along K in one 32-bit lane."""
        return 2 if self.is_bf16 else 1

    @property
    def block(self) -> int:
        """Elements along K in one vector."""
        return self.target.lanes * self.pack

    @property
    def block_type(self) -> str:
        return vector(self.block, I16 if self.is_bf16 else F32)

    def load_block(self, f: Function, address: Value) -> Value:
        return f.load(address, self.block_type)

    def load_block_tail(self, f: Function, address: Value, count: Value) -> Value:
        """The first `count` (i64, below a block) elements, then zeros; nothing past them is read."""
        limit = f.splat(f.cast("trunc", count, I32), self.block)
        return f.masked_load(address, self.block_type, f.iota(self.block) < limit)

    def operands(self, f: Function, block: Value) -> tuple[Value, ...]:
        """A block as the factors that `multiply_add` takes: itself, or its even and odd halves as float32."""
        lanes = self.target.lanes
        if not self.is_bf16:
            return (block,)
        if self.target.has_bf16_dot:
            return (f.bitcast(block, vector(2 * lanes, BF16)),)
        words = f.bitcast(block, vector(lanes, I32))
        even = f.bitcast(words << 16, vector(lanes, F32))
        return even, f.bitcast(words & -65536, vector(lanes, F32))

    def broadcast_operands(self, f: Function, address: Value) -> tuple[Value, ...]:
        """The one lane's worth of elements (a pair of bf16, one float32) at `address`, in every lane."""
        word = f.splat(f.load(address, I32), self.target.lanes)
        return self.operands(f, f.bitcast(word, self.block_type))

    def multiply_add(self, f: Function, acc: Value, a: Sequence[Value], b: Sequence[Value]) -> Value:
        """acc [L] + the dot products of the lanes' elements, in float32."""
        if self.is_bf16 and self.target.has_bf16_dot:
            pairs = vector(self.block, BF16)
            assert {a[0].type, b[0].type} == {pairs}
            return f.call(acc.type, f"llvm.x86.avx512bf16.dpbf16ps.{32 * self.target.lanes}", acc, a[0], b[0])
        for left, right in zip(a, b, strict=True):
            acc = fma(f, left, right, acc)
        return acc

    # Single elements and L elements at a time, as float32

    def load_f32(self, f: Function, address: Value, lanes: int) -> Value:
        if not self.is_bf16:
            return f.load(address, vector(lanes, F32) if lanes > 1 else F32)
        return bf16_bits_to_f32(f, f.load(address, vector(lanes, I16) if lanes > 1 else I16))

    def load_vector_f32(self, f: Function, address: Value, lanes: int) -> Value:
        """As `load_f32`, but a vector even of one lane."""
        if not self.is_bf16:
            return f.load(address, vector(lanes, F32))
        return bf16_bits_to_f32(f, f.load(address, vector(lanes, I16)))

    def load_f32_masked(self, f: Function, address: Value, mask: Value) -> Value:
        lanes = lanes_of(mask.type)
        if not self.is_bf16:
            return f.masked_load(address, vector(lanes, F32), mask)
        return bf16_bits_to_f32(f, f.masked_load(address, vector(lanes, I16), mask))

    def round(self, f: Function, value: Value) -> Value:
        """Float32 lanes as they lie in memory: bf16 bits, or unchanged."""
        return f32_to_bf16_bits(f, self.target, value) if self.is_bf16 else value

    def store_f32(self, f: Function, value: Value, address: Value) -> None:
        f.store(self.round(f, value), address)

    def store_f32_masked(self, f: Function, value: Value, address: Value, mask: Value) -> None:
        f.masked_store(self.round(f, value), address, mask)


def first_lanes(f: Function, lanes: int, count: Value) -> Value:
    """Mask of the first `count` (i64) of `lanes` lanes."""
    return f.iota(lanes) < f.splat(f.cast("trunc", count, I32), lanes)


def zeros(f: Function, lanes: int) -> Value:
    return Value(f, vector(lanes, F32), "zeroinitializer")


def reduce_add(f: Function, value: Value) -> Value:
    """Sum of all lanes, halving each time (a fixed order)."""
    lanes = lanes_of(value.type)
    while lanes > 1:
        lanes //= 2
        low, high = list(range(lanes)), list(range(lanes, 2 * lanes))
        value = f.shuffle(value, value, low) + f.shuffle(value, value, high)
    return f.extract(value, 0)


def reduce_max(f: Function, value: Value) -> Value:
    lanes = lanes_of(value.type)
    while lanes > 1:
        lanes //= 2
        low, high = list(range(lanes)), list(range(lanes, 2 * lanes))
        value = f.maximum(f.shuffle(value, value, low), f.shuffle(value, value, high))
    return f.extract(value, 0)


def reduce_many(f: Function, values: Sequence[Value]) -> Value:
    """Sums of the lanes of up to L vectors of L lanes: lane i of the result is the sum of `values[i]`.

    A tree of pairwise half-additions: about three instructions a vector instead of eight.
    """
    lanes = lanes_of(values[0].type)
    count = 1
    while count < len(values):
        count *= 2
    level = list(values) + [values[-1]] * (count - len(values))
    parts = 1  # each vector of the level holds the partial sums of `parts` inputs, lanes / parts lanes each
    while len(level) > 1:
        width = lanes // parts
        low = [lane for part in range(parts) for lane in range(part * width, part * width + width // 2)]
        high = [lane + width // 2 for lane in low]
        half = len(level) // 2
        # Vector i is paired with i + half, so that at the end the inputs come out in bit-reversed halves, undone below.
        level = [_pair_halves(f, level[i], level[i + half], low, high, lanes) for i in range(half)]
        parts *= 2
    total, width = level[0], lanes // parts
    while width > 1:
        width //= 2
        low = [part * 2 * width + lane for part in range(parts) for lane in range(width)]
        high = [lane + width for lane in low]
        total = f.shuffle(total, total, low) + f.shuffle(total, total, high)
    return f.shuffle(total, total, [_leaf_position(i, count) for i in range(count)]) if count > 1 else total


def _pair_halves(f: Function, a: Value, b: Value, low: list[int], high: list[int], lanes: int) -> Value:
    first = f.shuffle(a, b, low + [lane + lanes for lane in low])
    second = f.shuffle(a, b, high + [lane + lanes for lane in high])
    return first + second


def _leaf_position(index: int, count: int) -> int:
    """Where input `index` of `count` ends up after pairing i with i + half at every level."""
    # One level: the result for a pair is [parts of a..., parts of b...]; so the first level's choice is the lowest bit.
    position, parts = 0, 1
    while count > 1:
        half = count // 2
        if index >= half:
            position += parts
            index -= half
        # After this level the vector has twice the parts; positions of b's parts follow a's.
        parts *= 2
        count = half
    return position


def transpose(f: Function, rows: Sequence[Value]) -> list[Value]:
    """Transpose of n vectors of n lanes (n a power of two)."""
    n = len(rows)
    out = list(rows)
    step = n // 2
    while step:
        mixed = list(out)
        for i in range(n):
            if i & step:
                continue
            a, b = out[i], out[i + step]
            keep = [lane if not lane & step else lane - step + n for lane in range(n)]
            take = [lane + step if not lane & step else lane + n for lane in range(n)]
            mixed[i], mixed[i + step] = f.shuffle(a, b, keep), f.shuffle(a, b, take)
        out = mixed
        step //= 2
    return out


def exp(f: Function, x: Value) -> Value:
    """e^x in float32, relative error below 2e-7 for x in [-87, 88]; 0 below -87.3 and for -inf.

    2^n * p(r) with r in [-ln2/2, ln2/2]; coefficients as in Cephes' expf.
    """
    clamped = f.maximum(f.minimum(x, 88.0), -87.3)
    suffix = f"v{lanes_of(x.type)}f32" if x.type.startswith("<") else "f32"
    n = f.call(x.type, f"llvm.rint.{suffix}", clamped * 1.4426950408889634)
    r = fma(f, n, f.as_value(-0.693359375, x.type), clamped)
    r = fma(f, n, f.as_value(2.12194440e-4, x.type), r)
    poly = f.as_value(1.9875691500e-4, x.type)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        poly = fma(f, poly, r, f.as_value(c, x.type))
    poly = fma(f, poly, r * r, r) + 1.0
    scale = f.bitcast((f.cast("fptosi", n, I32) + 127) << 23, x.type)
    return f.select(x < -87.3, f.as_value(0.0, x.type), poly * scale)


# 2^r for r in [-1/2, 1/2], highest power first, least relative error: 7.5e-5, and below float32's rounding.
_ROUGH_EXP2 = (0.05517165767, 0.2426111213, 0.6932609876, 0.9999280736)
_EXACT_EXP2 = (0.0001534581088, 0.001339993121, 0.009618488961, 0.05550328777, 0.2402264689, 0.6931472057, 1.0)


def exp2(f: Function, target: Target, x: Value, *, is_rough: bool) -> Value:
    """2^x of float32 lanes, x <= 0; about 0 below -126. `is_rough` is enough for a result that is rounded to bf16."""
    lanes = lanes_of(x.type)
    wide = target.lanes == 16 and lanes == 16
    clamped = x if wide else f.maximum(x, -126.0)
    n = f.call(x.type, f"llvm.rint.v{lanes}f32", clamped)
    r = clamped - n
    first, *rest = _ROUGH_EXP2 if is_rough else _EXACT_EXP2
    poly = f.as_value(first, x.type)
    for coefficient in rest:
        poly = fma(f, poly, r, f.as_value(coefficient, x.type))
    if wide:  # one instruction, and right for any n
        all_lanes, current_rounding = Value(f, "i16", "-1"), Value(f, I32, "4")
        return f.call(x.type, "llvm.x86.avx512.mask.scalef.ps.512", poly, n, poly, all_lanes, current_rounding)
    return poly * f.bitcast((f.cast("fptosi", n, I32) + 127) << 23, x.type)


def silu(f: Function, x: Value) -> Value:
    """x / (1 + e^-x)."""
    return x / (exp(f, 0.0 - x) + 1.0)
