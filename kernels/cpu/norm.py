"""RMSNorm and SwiGLU's elementwise half, as kernels and as pieces that other kernels put before their work."""

from kernels.cpu.arguments import Arguments
from kernels.cpu.ir import F32, Function, Value
from kernels.cpu.jit import Target
from kernels.cpu.vectors import Element, first_lanes, fma, reduce_add, silu, zeros

NORM_ARGS = ("x", "weight", "out", "num_rows", "size", "rows_per_chunk", "eps")
SILU_ARGS = ("gate_up", "out", "num_rows", "size", "rows_per_chunk")


def _sum_of_squares(f: Function, e: Element, row: Value, size: Value) -> Value:
    lanes = e.target.lanes
    total = f.var(zeros(f, lanes))
    whole = size - size % lanes
    with f.loop(0, whole, lanes) as i:
        x = e.load_f32(f, row + i * e.size, lanes)
        total.set(fma(f, x, x, total.get()))
    with f.if_(whole < size):
        x = e.load_f32_masked(f, row + whole * e.size, first_lanes(f, lanes, size - whole))
        total.set(fma(f, x, x, total.get()))
    return reduce_add(f, total.get())


def rms_scale(f: Function, e: Element, row: Value, size: Value, eps: Value) -> Value:
    """1 / sqrt(mean(x^2) + eps) of the row at an address, float32."""
    mean = _sum_of_squares(f, e, row, size) / f.cast("sitofp", size, F32)
    return 1.0 / f.call(F32, "llvm.sqrt.f32", mean + eps)


def emit_norm_row(f: Function, e: Element, row: Value, weight: Value, out: Value, size: Value, eps: Value) -> None:
    """out[:size] = row * rms_scale * weight, rounded once; `out` may be `row`."""
    lanes = e.target.lanes
    scale = f.splat(rms_scale(f, e, row, size, eps), lanes)
    whole = size - size % lanes
    with f.loop(0, whole * e.size, lanes * e.size) as i:
        y = e.load_f32(f, row + i, lanes) * scale * e.load_f32(f, weight + i, lanes)
        e.store_f32(f, y, out + i)
    with f.if_(whole < size):
        mask, i = first_lanes(f, lanes, size - whole), whole * e.size
        y = e.load_f32_masked(f, row + i, mask) * scale * e.load_f32_masked(f, weight + i, mask)
        e.store_f32_masked(f, y, out + i, mask)


def build_rms_norm(target: Target, name: str) -> Function:
    """Chunk: some rows of out = rms_norm(x, weight)."""
    f, e = Function(name, 2), Element(target, name.endswith("bf16"))
    a, chunk = Arguments(f, NORM_ARGS), f.args[1]
    eps = a.float("eps")
    first = chunk * a.rows_per_chunk
    with f.loop(first, f.minimum(first + a.rows_per_chunk, a.num_rows)) as row:
        offset = row * a.size * e.size
        emit_norm_row(f, e, a.x + offset, a.weight, a.out + offset, a.size, eps)
    return f


def build_silu_and_mul(target: Target, name: str) -> Function:
    """Chunk: some rows of out [rows, size] = silu(gate) * up, of gate_up [rows, 2 * size]."""
    f, e = Function(name, 2), Element(target, name.endswith("bf16"))
    a, chunk = Arguments(f, SILU_ARGS), f.args[1]
    lanes, row_bytes = target.lanes, a.size * e.size
    first = chunk * a.rows_per_chunk
    whole = a.size - a.size % lanes
    with f.loop(first, f.minimum(first + a.rows_per_chunk, a.num_rows)) as row:
        gate, out = a.gate_up + row * row_bytes * 2, a.out + row * row_bytes
        up = gate + row_bytes
        with f.loop(0, whole * e.size, lanes * e.size) as i:
            e.store_f32(f, silu(f, e.load_f32(f, gate + i, lanes)) * e.load_f32(f, up + i, lanes), out + i)
        with f.if_(whole < a.size):
            mask, i = first_lanes(f, lanes, a.size - whole), whole * e.size
            y = silu(f, e.load_f32_masked(f, gate + i, mask)) * e.load_f32_masked(f, up + i, mask)
            e.store_f32_masked(f, y, out + i, mask)
    return f
