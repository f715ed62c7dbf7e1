"""Linear layers of small batches: two streaming kernels over plain row-major weights [N, K].

`dot` (a few tokens): a block of weight rows times all tokens, both read along K, lanes summed at the end.
`lanes` (tens of tokens): tokens lie in the lanes; activations are packed [K / pack][tokens][pack] once by the prologue,
weights are broadcast pair by pair, so that nothing is summed across lanes.
Both read each weight once, from memory in order. Larger batches belong to oneDNN; the weights are the same bits.
"""

import enum
from dataclasses import dataclass

from kernels.cpu.arguments import Arguments
from kernels.cpu.ir import F32, I32, Function, Value, Variable, lanes_of, vector
from kernels.cpu.jit import Target
from kernels.cpu.norm import emit_norm_row
from kernels.cpu.vectors import Element, first_lanes, reduce_many, silu, transpose, zeros

LINEAR_ARGS = (
    "x",  # what the body reads: rows [T, K], or packed
    "weight",
    "out",
    "bias",  # 0: none
    "num_tokens",
    "k",
    "n",  # rows of weight; of one half in gate-up mode
    "rows_per_chunk",
    "source",  # what the prologue reads: rows [T, K]
    "normed",  # where the prologue puts normalised rows [T, K]
    "norm_weight",
    "eps",
)
MAX_DOT_TOKENS = 8


class Epilogue(enum.Enum):
    """What becomes of the products."""

    STORE = "store"
    RESIDUAL = "residual"  # added to what `out` holds
    GATE_UP = "gate_up"  # rows n of weight are gates, rows N + n are ups: silu(gate) * up


@dataclass(frozen=True)
class Shape:
    """A register block: `rows` weight rows (of each half, in gate-up mode) times `columns` tokens or lane groups."""

    rows: int
    columns: int


def dot_shape(target: Target, epilogue: Epilogue, num_tokens: int) -> Shape:
    """Rows such that the accumulators fill the registers but leave room for operands; a power of two."""
    room = (24 if target.num_registers >= 32 else 10) // (2 if epilogue is Epilogue.GATE_UP else 1)
    rows = 4
    while rows > 1 and rows * num_tokens > room:
        rows //= 2
    return Shape(rows, num_tokens)


def lanes_shape(target: Target, epilogue: Epilogue, groups: int) -> Shape:
    """`groups` vectors of tokens at a time."""
    room = (24 if target.num_registers >= 32 else 8) // groups
    rows = min(room, target.lanes)
    return Shape(max(1, rows // 2) if epilogue is Epilogue.GATE_UP else rows, groups)


def _row_addresses(f: Function, e: Element, a: Arguments, shape: Shape, row: Value, epilogue: Epilogue) -> list[Value]:
    """Addresses of the block's weight rows; rows past the end repeat the last one, and are not stored."""
    rows = [f.minimum(row + i, a.n - 1) for i in range(shape.rows)]
    if epilogue is Epilogue.GATE_UP:
        rows += [i + a.n for i in rows]
    return [a.weight + i * (a.k * e.size) for i in rows]


def _finish(f: Function, e: Element, a: Arguments, y: Value, token: Value, row: Value, epilogue: Epilogue) -> None:
    """Lanes of y are rows row, row + 1, ... of one token: add what is to be added, round and store."""
    mask = first_lanes(f, lanes_of(y.type), a.n - row)
    target = a.out + (token * a.n + row) * e.size
    total = f.var(y)
    with f.if_(a.bias > 0):
        total.set(total.get() + e.load_f32_masked(f, a.bias + row * e.size, mask))
    if epilogue is Epilogue.RESIDUAL:
        total.set(total.get() + e.load_f32_masked(f, target, mask))
    e.store_f32_masked(f, total.get(), target, mask)


# dot


def build_dot(target: Target, name: str) -> Function:
    """Chunk: some rows of weight times all tokens. Name: dot_<epilogue>_<tokens>_<dtype>."""
    _, kind, tokens, code = name.split("-")
    f, e, epilogue = Function(name.replace("-", "_"), 2), Element(target, code == "bf16"), Epilogue(kind)
    a, chunk = Arguments(f, LINEAR_ARGS), f.args[1]
    shape = dot_shape(target, epilogue, int(tokens))
    first = chunk * a.rows_per_chunk
    with f.loop(first, f.minimum(first + a.rows_per_chunk, a.n), shape.rows) as row:
        _dot_block(f, e, a, shape, row, epilogue)
    return f


def _dot_block(f: Function, e: Element, a: Arguments, shape: Shape, row: Value, epilogue: Epilogue) -> None:
    weights = _row_addresses(f, e, a, shape, row, epilogue)
    inputs = [a.x + token * (a.k * e.size) for token in range(shape.columns)]
    sums = [[f.var(zeros(f, e.target.lanes)) for _ in inputs] for _ in weights]

    def accumulate(load: object, offset: Value) -> None:
        columns = [e.operands(f, load(address + offset)) for address in inputs]  # type: ignore[operator]
        for address, row_sums in zip(weights, sums, strict=True):
            block = e.operands(f, load(address + offset))  # type: ignore[operator]
            for column, total in zip(columns, row_sums, strict=True):
                total.set(e.multiply_add(f, total.get(), block, column))

    whole = a.k - a.k % e.block
    with f.loop(0, whole * e.size, e.block * e.size) as offset:
        accumulate(lambda address: e.load_block(f, address), offset)
    with f.if_(whole < a.k):
        accumulate(lambda address: e.load_block_tail(f, address, a.k - whole), whole * e.size)
    _dot_finish(f, e, a, shape, sums, row, epilogue)


def _dot_finish(
    f: Function, e: Element, a: Arguments, shape: Shape, sums: list[list[Variable]], row: Value, epilogue: Epilogue
) -> None:
    """Sum lanes, as many vectors at a time as one vector has lanes."""
    per_group = max(1, e.target.lanes // shape.rows)
    for start in range(0, shape.columns, per_group):
        columns = range(start, min(start + per_group, shape.columns))

        def total(rows: range, columns: range = columns) -> Value:
            return reduce_many(f, [sums[r][c].get() for c in columns for r in rows])

        y = total(range(shape.rows))
        if epilogue is Epilogue.GATE_UP:
            y = silu(f, y) * total(range(shape.rows, 2 * shape.rows))
        for index, column in enumerate(columns):
            part = f.shuffle(y, y, [index * shape.rows + r for r in range(shape.rows)])
            _finish(f, e, a, part, f.const(column), row, epilogue)


# lanes


def packed_tokens(target: Target, num_tokens: int) -> int:
    """Tokens of the packed activations: whole vectors."""
    return -(-num_tokens // target.lanes) * target.lanes


def lanes_groups(target: Target, num_tokens: int) -> int:
    """Vectors of tokens that one register block takes."""
    vectors = packed_tokens(target, num_tokens) // target.lanes
    return vectors if vectors <= 3 else 2


def build_lanes(target: Target, name: str) -> Function:
    """Chunk: some rows of weight times all tokens. Name: lanes-<epilogue>-<groups>-<dtype>."""
    _, kind, groups, code = name.split("-")
    f, e, epilogue = Function(name.replace("-", "_"), 2), Element(target, code == "bf16"), Epilogue(kind)
    a, chunk = Arguments(f, LINEAR_ARGS), f.args[1]
    shape = lanes_shape(target, epilogue, int(groups))
    tile = f.stack(shape.columns * target.lanes * target.lanes * 4)
    padded = (a.num_tokens + (target.lanes - 1)) // target.lanes * target.lanes
    first = chunk * a.rows_per_chunk
    with f.loop(first, f.minimum(first + a.rows_per_chunk, a.n), shape.rows) as row:
        weights = _row_addresses(f, e, a, shape, row, epilogue)
        with f.loop(0, padded, target.lanes * shape.columns) as token:
            sums = _lanes_block(f, e, a, shape, weights, padded, token)
            _lanes_finish(f, e, a, shape, sums, tile, token, row, epilogue)
    return f


def _lanes_block(
    f: Function, e: Element, a: Arguments, shape: Shape, weights: list[Value], padded: Value, token: Value
) -> list[list[Value]]:
    """Sums [weight row][group of tokens]. The last group of an odd count is computed twice rather than branched on."""
    lanes = e.target.lanes
    groups = [f.minimum(token + i * lanes, padded - lanes) for i in range(shape.columns)]
    inputs = [a.x + group * 4 for group in groups]
    sums = [[f.var(zeros(f, lanes)) for _ in groups] for _ in weights]

    def accumulate(word: Value, weight_word: object) -> None:
        columns = [e.operands(f, e.load_block(f, address + word * (padded * 4))) for address in inputs]
        for address, row_sums in zip(weights, sums, strict=True):
            factor = weight_word(address + word * 4)  # type: ignore[operator]
            for column, total in zip(columns, row_sums, strict=True):
                total.set(e.multiply_add(f, total.get(), column, factor))

    words = a.k // e.pack
    with f.loop(0, words) as word:
        accumulate(word, lambda address: e.broadcast_operands(f, address))
    if e.pack == 2:
        with f.if_(words * 2 < a.k):
            accumulate(words, lambda address: _broadcast_half(f, e, address))
    return [[total.get() for total in row_sums] for row_sums in sums]


def _broadcast_half(f: Function, e: Element, address: Value) -> tuple[Value, ...]:
    """The last element of an odd K, beside a zero; reads two bytes only."""
    word = f.splat(f.cast("zext", f.load(address, "i16"), I32), e.target.lanes)
    return e.operands(f, f.bitcast(word, e.block_type))


def _lanes_finish(
    f: Function,
    e: Element,
    a: Arguments,
    shape: Shape,
    sums: list[list[Value]],
    tile: Value,
    token: Value,
    row: Value,
    epilogue: Epilogue,
) -> None:
    """Turn [row][token lanes] into [token][row lanes] through a scratch tile, then finish token by token."""
    lanes = e.target.lanes
    for group in range(shape.columns):
        rows = [sums[r][group] for r in range(shape.rows)]
        if epilogue is Epilogue.GATE_UP:
            rows = [silu(f, gate) * sums[shape.rows + r][group] for r, gate in enumerate(rows)]
        rows += [rows[-1]] * (lanes - shape.rows)
        for lane, out in enumerate(transpose(f, rows)):
            f.store(out, tile + (group * lanes + lane) * lanes * 4)
    with f.loop(token, f.minimum(token + shape.columns * lanes, a.num_tokens)) as t:
        whole = f.load(tile + (t - token) * (lanes * 4), vector(lanes, F32))
        _finish(f, e, a, f.shuffle(whole, whole, list(range(shape.rows))), t, row, epilogue)


# prologues


def build_norm_prologue(target: Target, name: str) -> Function:
    """normed = rms_norm(source, norm_weight), row by row."""
    f, e = Function(name, 1), Element(target, name.endswith("bf16"))
    _emit_norm(f, e, Arguments(f, LINEAR_ARGS))
    return f


def build_pack_prologue(target: Target, name: str) -> Function:
    """x = packed source."""
    f, e = Function(name, 1), Element(target, name.endswith("bf16"))
    a = Arguments(f, LINEAR_ARGS)
    _emit_pack(f, e, a, a.source)
    return f


def build_norm_pack_prologue(target: Target, name: str) -> Function:
    """normed = rms_norm(source, norm_weight); x = packed normed."""
    f, e = Function(name, 1), Element(target, name.endswith("bf16"))
    a = Arguments(f, LINEAR_ARGS)
    _emit_norm(f, e, a)
    _emit_pack(f, e, a, a.normed)
    return f


def _emit_norm(f: Function, e: Element, a: Arguments) -> None:
    eps = a.float("eps")
    with f.loop(0, a.num_tokens) as token:
        offset = token * a.k * e.size
        emit_norm_row(f, e, a.source + offset, a.norm_weight, a.normed + offset, a.k, eps)


def _emit_pack(f: Function, e: Element, a: Arguments, source: Value) -> None:
    """[T, K] to [K / pack][padded T][pack], squares of 32-bit words at a time; tokens past the end repeat the last."""
    lanes = e.target.lanes
    padded = (a.num_tokens + (lanes - 1)) // lanes * lanes
    whole = a.k - a.k % e.block
    with f.loop(0, padded, lanes) as token:
        rows = [source + f.minimum(token + i, a.num_tokens - 1) * (a.k * e.size) for i in range(lanes)]
        with f.loop(0, whole, e.block) as k:
            blocks = [f.bitcast(e.load_block(f, row + k * e.size), vector(lanes, I32)) for row in rows]
            for word, column in enumerate(transpose(f, blocks)):
                f.store(column, a.x + ((k // e.pack + word) * padded + token) * 4)
        with f.loop(whole, a.k, e.pack) as k:
            for lane, row in enumerate(rows):
                f.store(_word_at(f, e, row, k, a.k), a.x + (k // e.pack * padded + token + lane) * 4)


def _word_at(f: Function, e: Element, row: Value, k: Value, size: Value) -> Value:
    """The 32-bit word at element k of a row; past the row's end its second half is zero."""
    if e.pack == 1:
        return f.load(row + k * 4, I32)
    low = f.cast("zext", f.load(row + k * 2, "i16"), I32)
    high_at = row + f.minimum(k + 1, size - 1) * 2  # read again rather than past the end
    high = f.cast("zext", f.load(high_at, "i16"), I32)
    return low | f.select(k + 1 < size, high << 16, f.const(0, I32))
