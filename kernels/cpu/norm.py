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


def emit_norm_row(
    f: Function, source: Element, e: Element, row: Value, weight: Value, out: Value, size: Value, eps: Value
) -> None:
    """out[:size] = row * rms_scale * weight, rounded once. `row` has elements of `source`, the others of `e`."""
    lanes = e.target.lanes
    scale = f.splat(rms_scale(f, source, row, size, eps), lanes)
    whole = size - size % lanes
    with f.loop(0, whole, lanes) as i:
        y = source.load_f32(f, row + i * source.size, lanes) * scale * e.load_f32(f, weight + i * e.size, lanes)
        e.store_f32(f, y, out + i * e.size)
    with f.if_(whole < size):
        mask = first_lanes(f, lanes, size - whole)
        x = source.load_f32_masked(f, row + whole * source.size, mask)
        y = x * scale * e.load_f32_masked(f, weight + whole * e.size, mask)
        e.store_f32_masked(f, y, out + whole * e.size, mask)


def build_rms_norm(target: Target, name: str) -> Function:
    """Chunk: some rows of out = rms_norm(x, weight). Name: rms_norm-<dtype of x>-<dtype>."""
    _, source_code, code = name.split("-")
    f, source, e = (
        Function(name.replace("-", "_"), 2),
        Element(target, source_code == "bf16"),
        Element(target, code == "bf16"),
    )
    a, chunk = Arguments(f, NORM_ARGS), f.args[1]
    eps = a.float("eps")
    first = chunk * a.rows_per_chunk
    with f.loop(first, f.minimum(first + a.rows_per_chunk, a.num_rows)) as row:
        offset = row * a.size
        emit_norm_row(f, source, e, a.x + offset * source.size, a.weight, a.out + offset * e.size, a.size, eps)
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
