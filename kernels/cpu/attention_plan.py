"""Cuts a batch's attention into items of work: (sequence, kv head, block of queries, range of keys).

Runs as the prologue of the attention job, on the caller's thread, so that no Python loops over sequences.
"""

from dataclasses import dataclass

from kernels.cpu.arguments import Arguments
from kernels.cpu.ir import I32, I64, Function, Value
from kernels.cpu.jit import Target

MAX_ROWS = 96  # query rows (tokens times query heads of one kv head) of an item
PARTS_PER_THREAD = 4  # keys are split until there are about this many items a thread
MIN_PART_KEYS = 128

ATTENTION_ARGS = (
    "q",
    "kv",
    "page_stride",  # strides in bytes
    "head_stride",
    "value_stride",
    "token_stride",
    "page_table",
    "page_table_stride",
    "query_starts",
    "context_lens",
    "out",
    "num_sequences",
    "num_kv_heads",
    "group",  # query heads of a kv head
    "page_size",
    "scale",  # times log2(e)
    "window",  # keys that a query sees; more than any context without one
    "sinks",  # float32 by query head; 0: none
    "items",
    "counters",  # finished parts of each split block of queries
    "workspace",
    "tokens_per_item",
    "num_threads",
    "items_per_chunk",
    "num_items",  # written by the plan
)

ITEM_WORDS = (
    "sequence",
    "head",
    "first_query",  # packed token
    "num_queries",
    "first_position",
    "first_key",
    "end_key",
    "num_parts",
    "first_slot",  # of the parts' partial results in the workspace
    "slot",
    "counter",
    "unused",
)
ITEM_BYTES = 8 * len(ITEM_WORDS)


def max_slots(num_threads: int) -> int:
    """Partial results that one plan can make: see `_part_keys`."""
    return 2 * PARTS_PER_THREAD * num_threads + 1


@dataclass(frozen=True)
class Queries:
    """A block of one sequence's queries."""

    first: Value  # packed token
    count: Value
    position: Value  # of the first
    first_key: Value  # that any of them sees, at a multiple of the lanes
    end_key: Value

    @property
    def num_keys(self) -> Value:
        return self.end_key - self.first_key


def build_plan(target: Target, name: str) -> Function:
    """Writes the items and the job's number of chunks: prefill before decode, the longest of a sequence first."""
    f = Function(name, 1)
    a = Arguments(f, ATTENTION_ARGS)
    part_keys = _part_keys(f, target, a)
    num_items, num_slots, num_counters = f.var(0), f.var(0), f.var(0)
    for decode in (False, True):
        with f.loop(0, a.num_sequences) as sequence:
            _start, length, _context = _sequence(f, a, sequence)
            with f.if_((length.equals(1)) if decode else (length > 1)):
                for_each_block = _query_blocks(f, target, a, sequence)
                with for_each_block as block:
                    _emit_items(f, target, a, sequence, block, part_keys, num_items, num_slots, num_counters)
    f.store(num_items.get(), f.args[0] + 8 * ATTENTION_ARGS.index("num_items"))
    f.store((num_items.get() + a.items_per_chunk - 1) // a.items_per_chunk, f.args[0] - 8)
    return f


def _sequence(f: Function, a: Arguments, sequence: Value) -> tuple[Value, Value, Value]:
    """(first packed token, new tokens, context) of a sequence."""
    start, end = (f.cast("sext", f.load(a.query_starts + (sequence + i) * 4, I32), I64) for i in (0, 1))
    return start, end - start, f.cast("sext", f.load(a.context_lens + sequence * 4, I32), I64)


class _query_blocks:
    """Loop over a sequence's blocks of queries, last block first."""

    def __init__(self, f: Function, target: Target, a: Arguments, sequence: Value) -> None:
        self._f, self._a, self._lanes = f, a, target.lanes
        self._start, self._length, self._context = _sequence(f, a, sequence)
        count = (self._length + a.tokens_per_item - 1) // a.tokens_per_item
        self._count, self._loop = count, f.loop(0, count)

    def __enter__(self) -> Queries:
        index = self._count - 1 - self._loop.__enter__()
        offset = index * self._a.tokens_per_item
        count = self._f.minimum(self._length - offset, self._a.tokens_per_item)
        position = self._context - self._length + offset
        first_key = self._f.maximum(position + 1 - self._a.window, 0)
        first_key = first_key - first_key % self._lanes
        return Queries(self._start + offset, count, position, first_key, position + count)

    def __exit__(self, *_: object) -> None:
        self._loop.__exit__(None, None, None)


def _part_keys(f: Function, target: Target, a: Arguments) -> Value:
    """Keys of an item: all of them, unless there are too few blocks of queries to keep all threads busy."""
    blocks, keys = f.var(0), f.var(0)
    with f.loop(0, a.num_sequences) as sequence, _query_blocks(f, target, a, sequence) as block:
        blocks.set(blocks.get() + a.num_kv_heads)
        keys.set(keys.get() + block.num_keys * a.num_kv_heads)
    wanted = a.num_threads * PARTS_PER_THREAD
    share = f.maximum(keys.get() // wanted + 1, MIN_PART_KEYS)
    is_enough = f.cast("zext", blocks.get() >= wanted, I64) | f.cast("zext", a.num_threads < 2, I64)
    return f.select(is_enough > 0, f.const(1 << 40), share)


def _emit_items(
    f: Function,
    target: Target,
    a: Arguments,
    sequence: Value,
    block: Queries,
    part_keys: Value,
    num_items: object,
    num_slots: object,
    num_counters: object,
) -> None:
    """The parts of one block of queries for every kv head; parts begin at multiples of the lanes."""
    lanes = target.lanes
    wanted = (block.num_keys + part_keys - 1) // part_keys
    keys = ((block.num_keys + wanted - 1) // wanted + (lanes - 1)) // lanes * lanes
    parts = (block.num_keys + keys - 1) // keys
    with f.loop(0, a.num_kv_heads) as head:
        first_slot, counter = num_slots.get(), num_counters.get()  # type: ignore[attr-defined]
        with f.loop(0, parts) as part:
            first_key = block.first_key + part * keys
            words = (
                sequence,
                head,
                block.first,
                block.count,
                block.position,
                first_key,
                f.minimum(first_key + keys, block.end_key),
                parts,
                first_slot,
                first_slot + part,
                counter,
            )
            item = a.items + num_items.get() * ITEM_BYTES  # type: ignore[attr-defined]
            for index, word in enumerate(words):
                f.store(word, item + 8 * index)
            num_items.set(num_items.get() + 1)  # type: ignore[attr-defined]
        with f.if_(parts > 1):
            f.store(f.const(0), a.counters + counter * 8)
            num_counters.set(counter + 1)  # type: ignore[attr-defined]
            num_slots.set(first_slot + parts)  # type: ignore[attr-defined]
