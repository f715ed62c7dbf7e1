"""Causal attention over paged keys and values, for decode rows and prefill chunks alike.

One item of the plan (attention_plan.py) is a block of query rows of one kv head over a range of keys, as in
FlashAttention-2 (Dao 2023): for each block of keys, K is transposed and V interleaved into packed tiles once, and all
rows' scores, running maxima and sums (float32, base 2) and outputs are updated a few rows at a time, keys in the
lanes for Q K^T, dimensions in the lanes for P V. Parts of a split item are merged by whoever finishes last.
"""

from dataclasses import dataclass

from kernels.cpu.arguments import Arguments
from kernels.cpu.attention_plan import ATTENTION_ARGS, ITEM_BYTES, ITEM_WORDS, MAX_ROWS
from kernels.cpu.ir import F32, I32, I64, Function, Value, vector
from kernels.cpu.jit import Target
from kernels.cpu.vectors import Element, exp2, first_lanes, fma, reduce_add, reduce_max, transpose, zeros

LOG2_E = 1.4426950408889634
HIDDEN = -1.0e30  # score of a key that a query must not see; finite, so that no infinities are subtracted
PREFETCH_LEVEL = 2  # into the second-level cache: the first has too few misses in flight


def slot_bytes(head_dim: int) -> int:
    """Bytes of one partial result: outputs [rows, D], maxima [rows], sums [rows], float32."""
    return MAX_ROWS * (head_dim + 2) * 4


@dataclass(frozen=True)
class Tiles:
    """What the emitters share: constants of the kernel and the scratch arrays of one call."""

    f: Function
    e: Element
    a: Arguments
    head_dim: int
    q: Value  # [rows, D] model dtype
    out: Value  # [rows, D] float32, not yet divided by the sums
    maxima: Value  # [rows] float32
    sums: Value  # [rows, lanes] float32, lanes not yet added
    limits: Value  # [rows] int32, first key behind those that the row sees
    floors: Value  # [rows] int32, first key that the row sees
    keys: Value  # [D / pack, key_block] words
    values: Value  # [key_block / pack, D] words
    weights: Value  # [row tile, key_block] model dtype
    zero_row: Value  # [D]

    @property
    def lanes(self) -> int:
        return self.e.target.lanes

    @property
    def row_bytes(self) -> int:
        return self.head_dim * self.e.size

    @property
    def key_block(self) -> int:
        """Keys at a time: four vectors of scores."""
        return 4 * self.lanes

    @property
    def row_tiles(self) -> tuple[int, ...]:
        """Rows at a time, largest first: accumulators are 4 vectors a row."""
        return (6, 4, 3, 2, 1) if self.e.target.num_registers >= 32 else (2, 1)


def row_tile(target: Target) -> int:
    return 6 if target.num_registers >= 32 else 2


def _make_tiles(f: Function, e: Element, a: Arguments, head_dim: int) -> Tiles:
    lanes, size = e.target.lanes, e.size
    block = 4 * lanes
    return Tiles(
        f,
        e,
        a,
        head_dim,
        q=f.stack(MAX_ROWS * head_dim * size),
        out=f.stack(MAX_ROWS * head_dim * 4),
        maxima=f.stack(MAX_ROWS * 4),
        sums=f.stack(MAX_ROWS * lanes * 4),
        limits=f.stack(MAX_ROWS * 4),
        floors=f.stack(MAX_ROWS * 4),
        keys=f.stack(-(-head_dim // e.block) * lanes * block * 4),
        values=f.stack(block // e.pack * head_dim * 4),
        weights=f.stack(row_tile(e.target) * block * size),
        zero_row=f.stack(head_dim * size),
    )


def build_attention(target: Target, name: str) -> Function:
    """Chunk: some items of the plan. Name: attention-<D>-<dtype>."""
    _, head_dim, code = name.split("-")
    f, e = Function(name.replace("-", "_"), 2), Element(target, code == "bf16")
    a = Arguments(f, ATTENTION_ARGS)
    t = _make_tiles(f, e, a, int(head_dim))
    for d in range(0, t.row_bytes, 16):
        f.store(f.as_value(0, vector(4, I32)), t.zero_row + d)
    first = f.args[1] * a.items_per_chunk
    with f.loop(first, f.minimum(first + a.items_per_chunk, a.num_items)) as index:
        address = a.items + index * ITEM_BYTES
        item = {word: f.load(address + 8 * i, I64) for i, word in enumerate(ITEM_WORDS)}
        _emit_item(t, item)
    return f


def _emit_item(t: Tiles, item: dict[str, Value]) -> None:
    f, a = t.f, t.a
    rows = item["num_queries"] * a.group
    _load_queries(t, item)
    first_limit = f.minimum(item["first_position"] + 1, item["end_key"])
    last_floor = item["first_position"] + item["num_queries"] - a.window
    with f.loop(item["first_key"], item["end_key"], t.key_block) as key:
        groups = (f.minimum(item["end_key"] - key, t.key_block) + (t.lanes - 1)) // t.lanes
        with f.loop(0, groups) as group:
            _pack_group(t, item, key, group)
        needs_mask = (key + t.key_block > first_limit) | (key < last_floor)
        later = _later_block(t, item, key)
        _for_row_tiles(t, rows, lambda row, count: _update_rows(t, row, count, key, groups, needs_mask, later))
    with f.if_(item["num_parts"] < 2):
        _store_rows(t, item, t.out, lambda row: _row_sum(t, row))
    with f.if_(item["num_parts"] > 1):
        _store_part(t, item, rows)


def _for_row_tiles(t: Tiles, rows: Value, emit: object) -> None:
    """Call the emitter for tiles of the largest size while there are, then for what is left."""
    f, sizes = t.f, t.row_tiles
    whole = rows - rows % sizes[0]
    with f.loop(0, whole, sizes[0]) as row:
        emit(row, sizes[0])  # type: ignore[operator]
    row_var = f.var(whole)
    for size in sizes[1:]:
        with f.if_(rows - row_var.get() >= size):
            emit(row_var.get(), size)  # type: ignore[operator]
            row_var.set(row_var.get() + size)


def _load_queries(t: Tiles, item: dict[str, Value]) -> None:
    """Gather the item's query rows and reset its running state."""
    f, a = t.f, t.a
    with f.loop(0, item["num_queries"]) as token:
        source = a.q + (((item["first_query"] + token) * a.num_kv_heads + item["head"]) * a.group) * t.row_bytes
        end = item["first_position"] + token + 1
        limit = f.cast("trunc", f.minimum(end, item["end_key"]), I32)
        floor = f.cast("trunc", end - a.window, I32)
        with f.loop(0, a.group) as member:
            row = token * a.group + member
            f.store(limit, t.limits + row * 4)
            f.store(floor, t.floors + row * 4)
            f.store(f.const(HIDDEN, F32), t.maxima + row * 4)
            f.store(zeros(f, t.lanes), t.sums + row * (t.lanes * 4))
            _begin_with_sink(t, item, member, row)
            for d in range(0, t.head_dim, 8):
                block = f.load(source + member * t.row_bytes + d * t.e.size, vector(8, "i16" if t.e.is_bf16 else F32))
                f.store(block, t.q + row * t.row_bytes + d * t.e.size)
                f.store(zeros(f, 8), t.out + (row * t.head_dim + d) * 4)


def _begin_with_sink(t: Tiles, item: dict[str, Value], member: Value, row: Value) -> None:
    """The first part of a row's keys begins with the sink, as a key of weight 1 without a value."""
    f, a = t.f, t.a
    with f.if_((a.sinks > 0) & item["slot"].equals(item["first_slot"])):
        sink = f.load(a.sinks + (item["head"] * a.group + member) * 4, F32)
        f.store(sink * LOG2_E, t.maxima + row * 4)
        f.store(f.const(1.0, F32), t.sums + row * (t.lanes * 4))


# Packing


def _pack_group(t: Tiles, item: dict[str, Value], key: Value, group: Value) -> None:
    """As many keys as there are lanes: transposed K to `keys`, interleaved V to `values`. They lie in one page."""
    f, a, lanes = t.f, t.a, t.lanes
    first = key + group * lanes
    base = _key_address(t, item, first)
    rows = [base + a.token_stride * i for i in range(lanes)]
    _pack_keys(t, rows, group)
    # Rows past the context may hold anything: as keys they are masked, as values they must be zero.
    end = item["end_key"]
    values = [f.select(first + i < end, row + a.value_stride, t.zero_row) for i, row in enumerate(rows)]
    _pack_values(t, values, group)


def _key_address(t: Tiles, item: dict[str, Value], key: Value) -> Value:
    f, a = t.f, t.a
    entry = a.page_table + (item["sequence"] * a.page_table_stride + key // a.page_size) * 4
    page = f.cast("sext", f.load(entry, I32), I64)
    return a.kv + page * a.page_stride + item["head"] * a.head_stride + key % a.page_size * a.token_stride


def _later_block(t: Tiles, item: dict[str, Value], key: Value) -> Value:
    """Address of the key block after this one, to be prefetched; of this one where there is none."""
    f = t.f
    later = f.var(key)
    with f.if_(key + t.key_block < item["end_key"]):
        later.set(key + t.key_block)
    return _key_address(t, item, later.get())


def _prefetch_part(t: Tiles, block: Value, part: Value, parts: int) -> None:
    """One of `parts` pieces of a later block's rows: spread over the work, since a burst of misses stalls it. Rows of
    a block are taken to be adjacent, as they are in a page at least as long; else a few wrong lines are asked for."""
    piece = t.key_block * t.row_bytes // parts
    for line in range(0, max(piece, 64), 64):
        t.f.prefetch(block + part * piece + line, PREFETCH_LEVEL)


def _pack_keys(t: Tiles, rows: list[Value], group: Value) -> None:
    f, e, lanes = t.f, t.e, t.lanes
    words = t.head_dim // e.pack
    for word in range(0, words, lanes):
        count = min(lanes, words - word)
        if count == lanes:
            blocks = [f.load(row + word * 4, vector(lanes, I32)) for row in rows]
        else:
            mask = first_lanes(f, lanes, f.const(count))
            blocks = [f.masked_load(row + word * 4, vector(lanes, I32), mask) for row in rows]
        for i, column in enumerate(transpose(f, blocks)[:count]):
            f.store(column, t.keys + group * (lanes * 4) + (word + i) * t.key_block * 4)


def _pack_values(t: Tiles, rows: list[Value], group: Value) -> None:
    f, e, lanes = t.f, t.e, t.lanes
    base = t.values + group * (lanes // e.pack * t.head_dim * 4)
    for i in range(0, lanes, e.pack):
        for d in range(0, t.head_dim, lanes):
            out = base + (i // e.pack * t.head_dim + d) * 4
            if e.pack == 1:
                f.store(f.load(rows[i] + d * 4, vector(lanes, F32)), out)
                continue
            even, odd = (f.load(row + d * 2, vector(lanes, "i16")) for row in rows[i : i + 2])
            order = [lane + lanes * which for lane in range(lanes) for which in (0, 1)]
            f.store(f.shuffle(even, odd, order), out)


# One tile of rows over one block of keys


def _update_rows(t: Tiles, row: Value, count: int, key: Value, groups: Value, needs_mask: Value, later: Value) -> None:
    # The largest tile is prefill's, which is bound by arithmetic; small ones are decode's, bound by memory.
    prefetched = later if count < t.row_tiles[0] else None
    scores = _scores(t, row, count, prefetched)
    scale = t.f.splat(t.a.float("scale"), t.lanes)
    shrink = []
    for i in range(count):
        shrink.append(_softmax_row(t, row + i, i, [s * scale for s in scores[i]], key, needs_mask))
    pairs = groups * (t.lanes // t.e.pack)
    vectors = t.head_dim // t.lanes
    for first in range(0, vectors, 4):
        _add_values(t, row, range(first, min(first + 4, vectors)), shrink, pairs, prefetched if first == 0 else None)


def _scores(t: Tiles, row: Value, count: int, later: Value | None) -> list[list[Value]]:
    """Q K^T of `count` rows: [row][4 vectors of keys]."""
    f, e = t.f, t.e
    sums = [[f.var(zeros(f, t.lanes)) for _ in range(4)] for _ in range(count)]
    queries = t.q + row * t.row_bytes
    with f.loop(0, t.head_dim // e.pack) as word:
        if later is not None:
            _prefetch_part(t, later, word, t.head_dim // e.pack)
        line = t.keys + word * (t.key_block * 4)
        blocks = [e.operands(f, e.load_block(f, line + v * t.lanes * 4)) for v in range(4)]
        for i, row_sums in enumerate(sums):
            factor = e.broadcast_operands(f, queries + i * t.row_bytes + word * 4)
            for block, total in zip(blocks, row_sums, strict=True):
                total.set(e.multiply_add(f, total.get(), block, factor))
    return [[total.get() for total in row_sums] for row_sums in sums]


def _softmax_row(t: Tiles, row: Value, index: int, scores: list[Value], key: Value, needs_mask: Value) -> Value:
    """Turn one row's scores into weights (stored for P V), update its maximum and sum; return the old part's factor."""
    f, e, lanes = t.f, t.e, t.lanes
    masked = [f.var(score) for score in scores]
    with f.if_(needs_mask):
        first = f.cast("trunc", key, I32)
        limit = f.splat(f.load(t.limits + row * 4, I32) - first, lanes)
        floor = f.splat(f.load(t.floors + row * 4, I32) - first, lanes)
        for v, score in enumerate(masked):
            place = f.iota(lanes) + v * lanes
            score.set(f.select((place < limit) & (place >= floor), score.get(), HIDDEN))
    scores = [score.get() for score in masked]
    highest = reduce_max(f, f.maximum(f.maximum(scores[0], scores[1]), f.maximum(scores[2], scores[3])))
    old = f.load(t.maxima + row * 4, F32)
    new = f.maximum(old, highest)
    f.store(new, t.maxima + row * 4)
    shrink = exp2(f, e.target, f.splat(old - new, lanes), is_rough=False)
    offset = f.splat(new, lanes)
    weights = [exp2(f, e.target, score - offset, is_rough=e.is_bf16) for score in scores]
    for v, weight in enumerate(weights):
        e.store_f32(f, weight, t.weights + (index * t.key_block + v * lanes) * e.size)
    sums = t.sums + row * (lanes * 4)
    total = (weights[0] + weights[1]) + (weights[2] + weights[3])
    f.store(fma(f, f.load(sums, vector(lanes, F32)), shrink, total), sums)
    return shrink


def _add_values(t: Tiles, row: Value, dims: range, shrink: list[Value], pairs: Value, later: Value | None) -> None:
    """out = out * shrink + P V for some vectors of dimensions."""
    f, e, lanes = t.f, t.e, t.lanes
    out = t.out + row * (t.head_dim * 4) + dims.start * lanes * 4

    def place(i: int, v: int) -> Value:
        return out + (i * t.head_dim + v * lanes) * 4

    sums = [
        [f.var(f.load(place(i, v), vector(lanes, F32)) * factor) for v in range(len(dims))]
        for i, factor in enumerate(shrink)
    ]
    with f.loop(0, pairs) as pair:
        if later is not None:
            _prefetch_part(t, later + t.a.value_stride, pair, t.key_block // e.pack)
        line = t.values + pair * (t.head_dim * 4) + dims.start * lanes * 4
        blocks = [e.operands(f, e.load_block(f, line + v * lanes * 4)) for v in range(len(dims))]
        for i, row_sums in enumerate(sums):
            factor = e.broadcast_operands(f, t.weights + i * t.key_block * e.size + pair * 4)
            for block, total in zip(blocks, row_sums, strict=True):
                total.set(e.multiply_add(f, total.get(), block, factor))
    for i, row_sums in enumerate(sums):
        for v, total in enumerate(row_sums):
            f.store(total.get(), place(i, v))


# Results


def _row_sum(t: Tiles, row: Value) -> Value:
    return reduce_add(t.f, t.f.load(t.sums + row * (t.lanes * 4), vector(t.lanes, F32)))


def _store_rows(t: Tiles, item: dict[str, Value], source: Value, row_sum: object) -> None:
    """Divide the rows of `source` [rows, D] float32 by their sums and write them where they belong."""
    f, e, a = t.f, t.e, t.a
    with f.loop(0, item["num_queries"]) as token:
        base = a.out + (((item["first_query"] + token) * a.num_kv_heads + item["head"]) * a.group) * t.row_bytes
        with f.loop(0, a.group) as member:
            row = token * a.group + member
            inverse = f.splat(1.0 / row_sum(row), t.lanes)  # type: ignore[operator]
            for d in range(0, t.head_dim, t.lanes):
                y = f.load(source + (row * t.head_dim + d) * 4, vector(t.lanes, F32)) * inverse
                e.store_f32(f, y, base + member * t.row_bytes + d * e.size)


def _slot(t: Tiles, index: Value) -> tuple[Value, Value, Value]:
    """Addresses of a partial result's outputs, maxima and sums."""
    base = t.a.workspace + index * slot_bytes(t.head_dim)
    return base, base + MAX_ROWS * t.head_dim * 4, base + MAX_ROWS * (t.head_dim + 1) * 4


def _store_part(t: Tiles, item: dict[str, Value], rows: Value) -> None:
    """Put this part into its slot; the last of the parts to arrive merges all of them."""
    f = t.f
    out, maxima, sums = _slot(t, item["slot"])
    with f.loop(0, rows) as row:
        f.store(f.load(t.maxima + row * 4, F32), maxima + row * 4)
        f.store(_row_sum(t, row), sums + row * 4)
        for d in range(0, t.head_dim, t.lanes):
            offset = (row * t.head_dim + d) * 4
            f.store(f.load(t.out + offset, vector(t.lanes, F32)), out + offset)
    counter = f.pointer(t.a.counters + item["counter"] * 8)
    before = f.emit(I64, f"atomicrmw add ptr {counter}, i64 1 seq_cst")
    with f.if_(before.equals(item["num_parts"] - 1)):
        _merge_parts(t, item, rows)


def _merge_parts(t: Tiles, item: dict[str, Value], rows: Value) -> None:
    """Rescale the parts to their common maximum and add them, in the order of their keys."""
    f, lanes = t.f, t.lanes
    end = item["first_slot"] + item["num_parts"]
    with f.loop(0, rows) as row:
        highest = f.var(f.const(HIDDEN, F32))
        with f.loop(item["first_slot"], end) as slot:
            highest.set(f.maximum(highest.get(), f.load(_slot(t, slot)[1] + row * 4, F32)))
        total = f.var(zeros(f, lanes))
        sums = [f.var(zeros(f, lanes)) for _ in range(0, t.head_dim, lanes)]
        with f.loop(item["first_slot"], end) as slot:
            out, maxima, part_sums = _slot(t, slot)
            distance = f.load(maxima + row * 4, F32) - highest.get()
            factor = exp2(f, t.e.target, f.splat(distance, lanes), is_rough=False)
            total.set(total.get() + factor * f.splat(f.load(part_sums + row * 4, F32), lanes))
            for v, part in enumerate(sums):
                offset = (row * t.head_dim + v * lanes) * 4
                part.set(fma(f, f.load(out + offset, vector(lanes, F32)), factor, part.get()))
        for v, part in enumerate(sums):
            f.store(part.get(), t.out + (row * t.head_dim + v * lanes) * 4)
        f.store(f.extract(total.get(), 0), t.maxima + row * 4)  # the maxima are no longer needed
    _store_rows(t, item, t.out, lambda row: f.load(t.maxima + row * 4, F32))
