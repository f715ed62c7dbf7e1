"""Per-head norm, rotary embedding, and the write of new keys and values into their pages, in one pass over qkv."""

from kernels.cpu.arguments import Arguments
from kernels.cpu.ir import I32, I64, Function, Value
from kernels.cpu.jit import Target
from kernels.cpu.norm import rms_scale
from kernels.cpu.vectors import Element, first_lanes

ROPE_ARGS = (
    "qkv",
    "cos_sin",
    "kv",
    "page_stride",  # strides in bytes
    "head_stride",
    "value_stride",
    "token_stride",
    "page_table",
    "page_table_stride",
    "positions",
    "sequence_ids",
    "q_out",
    "num_tokens",
    "num_q_heads",
    "num_kv_heads",
    "head_dim",
    "half",  # rotated dimensions / 2
    "page_size",
    "q_norm",  # 0: none
    "k_norm",
    "eps",
    "tokens_per_chunk",
)


def build_rope_and_store(target: Target, name: str) -> Function:
    """Chunk: some tokens: q heads rotated to q_out; k heads rotated, and v heads, to their rows of the pool."""
    f, e = Function(name, 2), Element(target, name.endswith("bf16"))
    a = Arguments(f, ROPE_ARGS)
    head_bytes = a.head_dim * e.size
    first = f.args[1] * a.tokens_per_chunk
    with f.loop(first, f.minimum(first + a.tokens_per_chunk, a.num_tokens)) as token:
        position = f.load(a.positions + token * 8, I64)
        cos = a.cos_sin + position * a.half * 8
        source = a.qkv + token * (a.num_q_heads + a.num_kv_heads * 2) * head_bytes
        with f.loop(0, a.num_q_heads) as head:
            out = a.q_out + (token * a.num_q_heads + head) * head_bytes
            _emit_head(f, e, a, source + head * head_bytes, a.q_norm, cos, out)
        row = _row_address(f, a, token, position)
        keys = source + a.num_q_heads * head_bytes
        values = keys + a.num_kv_heads * head_bytes
        with f.loop(0, a.num_kv_heads) as head:
            out = row + head * a.head_stride
            _emit_head(f, e, a, keys + head * head_bytes, a.k_norm, cos, out)
            _emit_copy(f, e, values + head * head_bytes, out + a.value_stride, f.const(0), a.head_dim)
    return f


def _row_address(f: Function, a: Arguments, token: Value, position: Value) -> Value:
    """Where key head 0 of the token lies in the pool."""
    sequence = f.cast("sext", f.load(a.sequence_ids + token * 4, I32), I64)
    entry = a.page_table + (sequence * a.page_table_stride + position // a.page_size) * 4
    page = f.cast("sext", f.load(entry, I32), I64)
    return a.kv + page * a.page_stride + position % a.page_size * a.token_stride


def _emit_head(f: Function, e: Element, a: Arguments, row: Value, norm: Value, cos: Value, out: Value) -> None:
    """Without a norm the row is rotated as it is; with one, scaled by its rms and the weights first."""
    with f.if_(norm.equals(0)):
        _emit_rotation(f, e, a, row, cos, out, None, None)
        _emit_copy(f, e, row, out, a.half * 2, a.head_dim)
    with f.if_(norm > 0):
        scale = rms_scale(f, e, row, a.head_dim, a.float("eps"))
        _emit_rotation(f, e, a, row, cos, out, norm, scale)
        _emit_copy(f, e, row, out, a.half * 2, a.head_dim, norm, scale)


def _scaled(
    f: Function, e: Element, row: Value, offset: Value, mask: Value, norm: Value | None, scale: Value | None
) -> Value:
    x = e.load_f32_masked(f, row + offset, mask)
    if norm is None or scale is None:
        return x
    return x * f.splat(scale, e.target.lanes) * e.load_f32_masked(f, norm + offset, mask)


def _emit_rotation(
    f: Function, e: Element, a: Arguments, row: Value, cos: Value, out: Value, norm: Value | None, scale: Value | None
) -> None:
    """out[i] = x[i] cos - x[i + R] sin; out[i + R] = x[i + R] cos + x[i] sin for i < R."""
    lanes = e.target.lanes
    single = Element(e.target, is_bf16=False)
    with f.loop(0, a.half, lanes) as i:
        mask = first_lanes(f, lanes, f.minimum(a.half - i, lanes))
        low, high = i * e.size, (i + a.half) * e.size
        x, y = (_scaled(f, e, row, offset, mask, norm, scale) for offset in (low, high))
        c, s = (single.load_f32_masked(f, cos + offset * 4, mask) for offset in (i, i + a.half))
        e.store_f32_masked(f, x * c - y * s, out + low, mask)
        e.store_f32_masked(f, y * c + x * s, out + high, mask)


def _emit_copy(
    f: Function,
    e: Element,
    row: Value,
    out: Value,
    start: Value,
    stop: Value,
    norm: Value | None = None,
    scale: Value | None = None,
) -> None:
    """Elements [start, stop) of a row, normalised if there is a norm."""
    lanes = e.target.lanes
    with f.loop(start, stop, lanes) as i:
        mask = first_lanes(f, lanes, f.minimum(stop - i, lanes))
        e.store_f32_masked(f, _scaled(f, e, row, i * e.size, mask, norm, scale), out + i * e.size, mask)
