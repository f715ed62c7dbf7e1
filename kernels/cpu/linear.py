"""Linear layers: two kernels over the same plain row-major weights [N, K], chosen by the number of tokens.

`dot` (a few tokens): a block of weight rows times all tokens, both read along K, lanes summed at the end.
`lanes` (more, whole prompts included): tokens lie in the lanes; activations are packed once, in tiles of
[K / pack][tokens][pack], and weights are broadcast pair by pair, so that nothing is summed across lanes.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace

from kernels.cpu.arguments import Arguments
from kernels.cpu.ir import F32, I32, Function, Value, lanes_of, vector
from kernels.cpu.jit import Target
from kernels.cpu.norm import emit_norm_row
from kernels.cpu.vectors import Element, first_lanes, reduce_many, silu, transpose, zeros

LINEAR_ARGS = (
    "x",  # what the body reads: rows [T, K], or packed
    "weight",
    "out",
    "bias",  # 0: none
    "num_tokens",
    "n",  # rows of weight; of one half in gate-up mode
    "k",
    "rows_per_chunk",
    "source",  # what the prologue reads: rows [T, K]
    "normed",  # where the prologue puts normalised rows [T, K]
    "norm_weight",
    "eps",
)
MAX_DOT_TOKENS = 8
# Ahead of the row being read, into the second-level cache: the hardware stops at each 4 KiB, and misses that the first
# level waits for stall it (a step of batch 8: 21 to 16 ms).
PREFETCH_BYTES, PREFETCH_LEVEL = 4096, 2


class Epilogue(enum.Enum):
    """What becomes of the products."""

    STORE = "store"
    RESIDUAL = "residual"  # added to what `out` holds, in float32 whatever the model dtype
    LOGITS = "logits"  # stored in float32
    GATE_UP = "gate_up"  # rows n of weight are gates, rows N + n are ups: silu(gate) * up


@dataclass(frozen=True)
class Shape:
    """A register block: `rows` weight rows (of each half, in gate-up mode) times `columns` tokens or lane groups."""

    rows: int
    columns: int


def lanes_shape(target: Target, epilogue: Epilogue, groups: int) -> Shape:
    """`groups` vectors of tokens at a time."""
    room = (24 if target.num_registers >= 32 else 8) // groups
    rows = min(room, target.lanes)
    return Shape(max(1, rows // 2) if epilogue is Epilogue.GATE_UP else rows, groups)


def parse_name(name: str) -> tuple[Epilogue, int, int, bool]:
    """(epilogue, tokens or groups, K, is bf16) of a kernel name such as dot-store-4-576-bf16."""
    _, kind, columns, k, code = name.split("-")
    return Epilogue(kind), int(columns), int(k), code == "bf16"


@dataclass(frozen=True)
class Block:
    """What the emitters of one register block share. K is a constant: rows are then at constant offsets."""

    f: Function
    e: Element
    a: Arguments
    shape: Shape
    k: int
    epilogue: Epilogue

    @property
    def out(self) -> Element:
        """Elements of `out`: the residual stream and logits are not rounded to the model dtype."""
        is_wide = self.epilogue in (Epilogue.RESIDUAL, Epilogue.LOGITS)
        return Element(self.e.target, False) if is_wide else self.e

    @property
    def row_bytes(self) -> int:
        return self.k * self.e.size

    def with_rows(self, rows: int) -> "Block":
        return replace(self, shape=Shape(rows, self.shape.columns))

    def row_addresses(self, row: Value) -> list[Value]:
        """Addresses of the block's weight rows: gates, then ups, in gate-up mode."""
        base = self.a.weight + row * self.row_bytes
        addresses = [base + self.row_bytes * i for i in range(self.shape.rows)]
        if self.epilogue is Epilogue.GATE_UP:
            second = base + self.a.n * self.row_bytes
            addresses += [second + self.row_bytes * i for i in range(self.shape.rows)]
        return addresses

    def prefetch_next(self, addresses: list[Value], offset: Value) -> None:
        """Ask for the same place of the next block: the hardware sees many short rows, not one stream."""
        for address in addresses:
            self.f.prefetch(address + offset + self.shape.rows * self.row_bytes, PREFETCH_LEVEL)

    def finish(self, y: Value, token: Value, row: Value, mask: Value | None = None) -> None:
        """Lanes of y are rows row, row + 1, ... of one token: add what is to be added, round and store (by mask)."""
        f, e, a, wide = self.f, self.e, self.a, self.out

        def load(element: Element, address: Value) -> Value:
            if mask is None:
                return element.load_vector_f32(f, address, lanes_of(y.type))
            return element.load_f32_masked(f, address, mask)

        out = a.out + (token * a.n + row) * wide.size
        total = f.var(y)
        with f.if_(a.bias > 0):
            total.set(total.get() + load(e, a.bias + row * e.size))
        if self.epilogue is Epilogue.RESIDUAL:
            total.set(total.get() + load(wide, out))
        if mask is None:
            wide.store_f32(f, total.get(), out)
        else:
            wide.store_f32_masked(f, total.get(), out, mask)


def _emit_rows(block: Block, chunk: Value, emit: Callable[[Block, Value], None]) -> None:
    """The chunk's rows, a block at a time and what is left one by one."""
    f, a, rows = block.f, block.a, block.shape.rows
    first = chunk * a.rows_per_chunk
    last = f.minimum(first + a.rows_per_chunk, a.n)
    whole = last - (last - first) % rows
    with f.loop(first, whole, rows) as row:
        emit(block, row)
    if rows > 1:
        with f.loop(whole, last) as row:
            emit(block.with_rows(1), row)


# dot


def build_dot(target: Target, name: str) -> Function:
    """Chunk: some rows of weight times all tokens. Name: dot-<epilogue>-<tokens>-<K>-<dtype>.

    Rows are read one after another, a vector of lanes' sums kept for each token, because several rows at a time are
    several streams to the prefetcher and reach half of the memory's bandwidth. The lanes of as many rows as a vector
    has lanes are then summed together.
    """
    epilogue, tokens, k, is_bf16 = parse_name(name)
    f, e = Function(name.replace("-", "_"), 2), Element(target, is_bf16)
    a = Arguments(f, LINEAR_ARGS)
    block = Block(f, e, a, Shape(target.lanes, tokens), k, epilogue)
    halves = 2 if epilogue is Epilogue.GATE_UP else 1
    tile_bytes = tokens * target.lanes * target.lanes * 4
    tiles = [f.stack(tile_bytes) for _ in range(halves)]
    first = f.args[1] * a.rows_per_chunk
    last = f.minimum(first + a.rows_per_chunk, a.n)
    with f.loop(first, last, target.lanes) as row:
        count = f.minimum(last - row, target.lanes)
        for half, tile in enumerate(tiles):
            with f.loop(0, count) as i:
                _dot_row(block, row + i + a.n * half, tile + i * (target.lanes * 4))
        with f.if_(count.equals(target.lanes)):
            _dot_finish(block, tiles, row, None)
        with f.if_(count < target.lanes):
            _dot_finish(block, tiles, row, first_lanes(f, target.lanes, count))
    return f


def _dot_row(block: Block, row: Value, tile: Value) -> None:
    """Products of one weight row and each token, not yet summed over lanes, to tile[token][row]."""
    f, e, k = block.f, block.e, block.k
    weights = block.a.weight + row * block.row_bytes
    inputs = [block.a.x + token * block.row_bytes for token in range(block.shape.columns)]
    sums = [f.var(zeros(f, e.target.lanes)) for _ in inputs]

    def accumulate(load: Callable[[Value], Value], offset: Value) -> None:
        factors = e.operands(f, load(weights + offset))
        for address, total in zip(inputs, sums, strict=True):
            total.set(e.multiply_add(f, total.get(), factors, e.operands(f, load(address + offset))))

    whole = k - k % e.block
    with f.loop(0, whole * e.size, e.block * e.size) as offset:
        f.prefetch(weights + offset + PREFETCH_BYTES, PREFETCH_LEVEL)
        accumulate(lambda address: e.load_block(f, address), offset)
    if whole < k:
        accumulate(lambda address: e.load_block_tail(f, address, f.const(k - whole)), f.const(whole * e.size))
    for token, total in enumerate(sums):
        f.store(total.get(), tile + token * e.target.lanes * e.target.lanes * 4)


def _dot_finish(block: Block, tiles: list[Value], row: Value, mask: Value | None) -> None:
    f, lanes = block.f, block.e.target.lanes
    with f.loop(0, block.shape.columns) as token:

        def total(tile: Value) -> Value:
            base = tile + token * (lanes * lanes * 4)
            return reduce_many(f, [f.load(base + i * lanes * 4, vector(lanes, F32)) for i in range(lanes)])

        y = total(tiles[0])
        if block.epilogue is Epilogue.GATE_UP:
            y = silu(f, y) * total(tiles[1])
        block.finish(y, token, row, mask)


# lanes


def lanes_groups(target: Target, num_tokens: int) -> int:
    """Vectors of tokens in a tile, which is what one register block takes: the choice that pads least."""
    choices = (3, 2, 1) if target.lanes == 16 else (2, 1)
    vectors = -(-num_tokens // target.lanes)
    if vectors <= choices[0]:
        return vectors
    return min(choices[:2], key=lambda groups: (-(-vectors // groups) * groups, -groups))


def num_tiles(target: Target, num_tokens: int) -> int:
    """Tiles of the packed activations."""
    return -(-num_tokens // (lanes_groups(target, num_tokens) * target.lanes))


def packed_bytes(target: Target, num_tokens: int, k: int) -> int:
    """Bytes of the packed activations: whole tiles of 32-bit words, K rounded up to pairs."""
    return num_tiles(target, num_tokens) * lanes_groups(target, num_tokens) * target.lanes * (k + 1) * 4


def build_lanes(target: Target, name: str) -> Function:
    """Chunk: some rows of weight times all tokens. Name: lanes-<epilogue>-<groups>-<K>-<dtype>."""
    epilogue, groups, k, is_bf16 = parse_name(name)
    f, e, lanes = Function(name.replace("-", "_"), 2), Element(target, is_bf16), target.lanes
    a = Arguments(f, LINEAR_ARGS)
    tile = f.stack(groups * lanes * lanes * 4)
    block = Block(f, e, a, lanes_shape(target, epilogue, groups), k, epilogue)
    # Tiles outside: the chunk's weights stay in the second-level cache, and results go to few pages at a time.
    with f.loop(0, a.num_tokens, lanes * groups) as token:
        _emit_rows(
            block, f.args[1], lambda part, row: _lanes_finish(part, _lanes_block(part, row, token), tile, token, row)
        )
    return f


def _lanes_block(block: Block, row: Value, token: Value) -> list[list[Value]]:
    """Sums [weight row][group of tokens] of the tile that begins at a token."""
    f, e = block.f, block.e
    lanes, columns, weights = e.target.lanes, block.shape.columns, block.row_addresses(row)
    base = block.a.x + token * (-(-block.k // e.pack) * 4)
    inputs = [base + i * lanes * 4 for i in range(columns)]
    sums = [[f.var(zeros(f, lanes)) for _ in inputs] for _ in weights]

    def accumulate(word: Value, factors_at: Callable[[Value], tuple[Value, ...]]) -> None:
        blocks = [e.operands(f, e.load_block(f, address + word * (columns * lanes * 4))) for address in inputs]
        for address, row_sums in zip(weights, sums, strict=True):
            factors = factors_at(address + word * 4)
            for column, total in zip(blocks, row_sums, strict=True):
                total.set(e.multiply_add(f, total.get(), column, factors))

    def accumulate_words(first: Value | int, last: Value | int) -> None:
        with f.loop(first, last) as word:
            accumulate(word, lambda address: e.broadcast_operands(f, address))

    words, line = block.k // e.pack, 16  # 32-bit words; words of a cache line
    whole = words - words % line
    with f.loop(0, whole, line) as first:
        block.prefetch_next(weights, first * 4)
        accumulate_words(first, first + line)
    if whole < words:
        accumulate_words(whole, words)
    if words * e.pack < block.k:
        accumulate(f.const(words), lambda address: _broadcast_half(f, e, address))
    return [[total.get() for total in row_sums] for row_sums in sums]


def _broadcast_half(f: Function, e: Element, address: Value) -> tuple[Value, ...]:
    """The last element of an odd K, beside a zero; reads two bytes only."""
    word = f.splat(f.cast("zext", f.load(address, "i16"), I32), e.target.lanes)
    return e.operands(f, f.bitcast(word, e.block_type))


def _lanes_finish(block: Block, sums: list[list[Value]], tile: Value, token: Value, row: Value) -> None:
    """Turn [row][token lanes] into [token][row lanes] through a scratch tile, then finish token by token."""
    f, shape, lanes = block.f, block.shape, block.e.target.lanes
    for group in range(shape.columns):
        rows = [sums[r][group] for r in range(shape.rows)]
        if block.epilogue is Epilogue.GATE_UP:
            rows = [silu(f, gate) * sums[shape.rows + r][group] for r, gate in enumerate(rows)]
        rows += [rows[-1]] * (lanes - shape.rows)
        for lane, out in enumerate(transpose(f, rows)):
            f.store(out, tile + (group * lanes + lane) * lanes * 4)
    with f.loop(token, f.minimum(token + shape.columns * lanes, block.a.num_tokens)) as t:
        y = f.load(tile + (t - token) * (lanes * 4), vector(shape.rows, F32))
        block.finish(y, t, row)


# prologues


def build_norm_prologue(target: Target, name: str) -> Function:
    """normed = rms_norm(source, norm_weight), row by row, for the dot kernel. Name: norm_rows-<of source>-<dtype>."""
    _, source_code, code = name.split("-")
    f = Function(name.replace("-", "_"), 1)
    a = Arguments(f, LINEAR_ARGS)
    elements = Element(target, source_code == "bf16"), Element(target, code == "bf16")
    _emit_norm(f, *elements, a, f.const(0), a.num_tokens)
    return f


def build_pack(target: Target, name: str) -> Function:
    """Chunk: one tile of x = packed source, normalised first in its place in `normed` if there is a norm.

    Name: pack-<groups>-<dtype of a source that has a norm>-<dtype>.
    """
    _, groups, source_code, code = name.split("-")
    f, e = Function(name.replace("-", "_"), 2), Element(target, code == "bf16")
    a = Arguments(f, LINEAR_ARGS)
    size = int(groups) * target.lanes
    first = f.args[1] * size
    source = f.var(a.source)
    with f.if_(a.norm_weight > 0):
        _emit_norm(f, Element(target, source_code == "bf16"), e, a, first, f.minimum(first + size, a.num_tokens))
        source.set(a.normed)
    _emit_pack_tile(f, e, a, source.get(), first, size)
    return f


def _emit_norm(f: Function, source: Element, e: Element, a: Arguments, first: Value, last: Value) -> None:
    eps = a.float("eps")
    with f.loop(first, last) as token:
        offset = token * a.k
        row, out = a.source + offset * source.size, a.normed + offset * e.size
        emit_norm_row(f, source, e, row, a.norm_weight, out, a.k, eps)


def _emit_pack_tile(f: Function, e: Element, a: Arguments, source: Value, first: Value, size: int) -> None:
    """Rows [first, first + size) to [K / pack][size][pack], squares of words at a time; the last row pads the tile."""
    lanes = e.target.lanes
    whole = a.k - a.k % e.block
    tile = a.x + first * ((a.k + (e.pack - 1)) // e.pack * 4)
    with f.loop(0, size, lanes) as place:
        rows = [source + f.minimum(first + place + i, a.num_tokens - 1) * (a.k * e.size) for i in range(lanes)]
        with f.loop(0, whole, e.block) as k:
            blocks = [f.bitcast(e.load_block(f, row + k * e.size), vector(lanes, I32)) for row in rows]
            for word, column in enumerate(transpose(f, blocks)):
                f.store(column, tile + ((k // e.pack + word) * size + place) * 4)
        with f.loop(whole, a.k, e.pack) as k:
            for lane, row in enumerate(rows):
                f.store(_word_at(f, e, row, k, a.k), tile + (k // e.pack * size + place + lane) * 4)


def _word_at(f: Function, e: Element, row: Value, k: Value, size: Value) -> Value:
    """The 32-bit word at element k of a row; past the row's end its second half is zero."""
    if e.pack == 1:
        return f.load(row + k * 4, I32)
    low = f.cast("zext", f.load(row + k * 2, "i16"), I32)
    high_at = row + f.minimum(k + 1, size - 1) * 2  # read again rather than past the end
    high = f.cast("zext", f.load(high_at, "i16"), I32)
    return low | f.select(k + 1 < size, high << 16, f.const(0, I32))
