"""The request table: bodies of requests in shared memory, one slot a request.

Writers: the HTTP process that owns the slot until it submits it, then the router (generated tokens, `released`).
Workers and the cache manager only read. There is no lock; see docs/architecture.md for the two counters.

Payload, in order: the shape, columns of counters [num_slots], bodies [num_slots, body_bytes]. A body starts on a memory
page of its own, so that slots never used cost no memory: sampling parameters, root, tokens, names.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from serve.hashing import DIGEST_BYTES
from serve.ipc.shm_segment import Segment, SegmentError, SegmentKind
from serve.types import SamplingParams

SAMPLING_BYTES = 16 * 1024
TABLE_KIND = SegmentKind(magic=b"vrvtable", version=1)

_SHAPE_BYTES = 64
_ALIGNMENT = 4096

_sampling_encoder = msgspec.msgpack.Encoder()
_sampling_decoder = msgspec.msgpack.Decoder(SamplingParams)


@dataclass(frozen=True)
class TableShape:
    """Sizes that all processes agree on."""

    num_slots: int
    max_tokens: int
    page_size: int

    @property
    def max_names(self) -> int:
        """Full pages of the longest prompt."""
        return self.max_tokens // self.page_size


def slots_of_server(num_slots: int, server: int, num_servers: int) -> range:
    """The slots that HTTP process `server` of `num_servers` owns."""
    share = num_slots // num_servers
    return range(server * share, (server + 1) * share)


def _align(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class _Offsets:
    """Where things lie: columns and bodies in payload bytes, the rest in bytes of a body."""

    generation: int
    released: int
    num_prompt: int
    num_names: int
    sampling_bytes: int
    bodies: int
    root: int
    tokens: int
    names: int
    body_bytes: int

    @classmethod
    def of(cls, shape: TableShape) -> "_Offsets":
        wide, narrow = shape.num_slots * 8, shape.num_slots * 4
        # Generation and released have different writers: they start on different memory pages.
        generation = _ALIGNMENT
        released = _align(generation + wide)
        num_prompt = _align(released + wide)
        num_names = num_prompt + narrow
        sampling_bytes = num_names + narrow
        root = SAMPLING_BYTES
        tokens = root + DIGEST_BYTES
        names = tokens + 4 * shape.max_tokens
        return cls(
            generation=generation,
            released=released,
            num_prompt=num_prompt,
            num_names=num_names,
            sampling_bytes=sampling_bytes,
            bodies=_align(sampling_bytes + narrow),
            root=root,
            tokens=tokens,
            names=names,
            body_bytes=_align(names + DIGEST_BYTES * shape.max_names),
        )


class RequestTable:
    """All slots of one server. Create in the launcher, attach everywhere else."""

    def __init__(self, segment: Segment, shape: TableShape) -> None:
        self.shape = shape
        self.fd = segment.fd
        self._segment = segment
        self._offsets = _Offsets.of(shape)
        self._map_columns()

    def _map_columns(self) -> None:
        slots, offsets = (self.shape.num_slots,), self._offsets
        self._generation = self._segment.array(offsets.generation, slots, "<u8")
        self._released = self._segment.array(offsets.released, slots, "<u8")
        self._num_prompt = self._segment.array(offsets.num_prompt, slots, "<u4")
        self._num_names = self._segment.array(offsets.num_names, slots, "<u4")
        self._sampling_bytes = self._segment.array(offsets.sampling_bytes, slots, "<u4")

    @classmethod
    def create(cls, shape: TableShape) -> "RequestTable":
        """Make the memfd segment and stamp its header. `fd` is then inherited by children."""
        offsets = _Offsets.of(shape)
        segment = Segment.create(TABLE_KIND, offsets.bodies + shape.num_slots * offsets.body_bytes)
        segment.array(0, (3,), "<u8")[:] = (shape.num_slots, shape.max_tokens, shape.page_size)
        return cls(segment, shape)

    @classmethod
    def attach(cls, fd: int, read_only: bool = False) -> "RequestTable":
        """Map a segment that exists; raises SegmentError unless magic, version and size are right. Never writes.

        read_only: views cannot be written (workers, cache manager).
        """
        segment = Segment.attach(fd, TABLE_KIND, read_only)
        shape = TableShape(*(int(value) for value in segment.array(0, (3,), "<u8")))
        if not (shape.num_slots and shape.max_tokens and shape.page_size):
            raise SegmentError(f"request table has the impossible shape {shape}")
        return cls(segment, shape)

    @property
    def num_slots(self) -> int:
        """Slots of all HTTP processes."""
        return self.shape.num_slots

    def generation(self, slot: int) -> int:
        """Generation of the request that fills, or last filled, the slot."""
        return int(self._generation[slot])

    def is_free(self, slot: int) -> bool:
        """True when nothing names the slot's last request any more."""
        return bool(self._generation[slot] == self._released[slot])

    def fill(self, slot: int, prompt: np.ndarray, sampling: SamplingParams, root: bytes, names: Sequence[bytes]) -> int:
        """HTTP: write a request, bump the slot's generation and return it.

        prompt: uint32 [num_prompt]; root: parent name of its first page; names: of its full pages. Raises
        ValueError when prompt or sampling parameters do not fit, or the slot is still in use.
        """
        blob = _sampling_encoder.encode(sampling)
        self._check_fit(slot, prompt, blob, root, names)
        self._num_prompt[slot] = len(prompt)
        self._num_names[slot] = len(names)
        self._sampling_bytes[slot] = len(blob)
        self._body(slot, 0, len(blob))[:] = np.frombuffer(blob, np.uint8)
        self._body(slot, self._offsets.root, DIGEST_BYTES)[:] = np.frombuffer(root, np.uint8)
        self.tokens(slot)[: len(prompt)] = prompt
        if names:
            packed = np.frombuffer(b"".join(names), np.uint8)
            self._body(slot, self._offsets.names, len(packed))[:] = packed
        # Last: until here the slot counts as free, so a writer that dies half way leaves nothing behind.
        self._generation[slot] += 1
        return self.generation(slot)

    def _check_fit(self, slot: int, prompt: np.ndarray, blob: bytes, root: bytes, names: Sequence[bytes]) -> None:
        if not self.is_free(slot):
            raise ValueError(f"slot {slot} is in use")
        if not 0 < len(prompt) <= self.shape.max_tokens:
            raise ValueError(f"a prompt of {len(prompt)} tokens does not fit, the limit is {self.shape.max_tokens}")
        if len(blob) > SAMPLING_BYTES:
            raise ValueError(f"sampling parameters take {len(blob)} bytes, the limit is {SAMPLING_BYTES}")
        if len(names) > len(prompt) // self.shape.page_size:
            raise ValueError(f"{len(names)} page names for a prompt of {len(prompt)} tokens")
        if any(len(name) != DIGEST_BYTES for name in (root, *names)):
            raise ValueError(f"page names have {DIGEST_BYTES} bytes")

    def mark_released(self, slot: int, generation: int) -> None:
        """Router: nothing names this request any more."""
        self._released[slot] = generation

    def release_all(self) -> None:
        """Router, at its start: no request of an earlier epoch lives."""
        self._released[:] = self._generation

    def num_prompt(self, slot: int) -> int:
        """Tokens of the prompt."""
        return int(self._num_prompt[slot])

    def tokens(self, slot: int) -> np.ndarray:
        """uint32 [max_tokens] view: the prompt, then generated tokens as the router appends them."""
        offset = self._body_offset(slot) + self._offsets.tokens
        return self._segment.array(offset, (self.shape.max_tokens,), "<u4")

    def sampling(self, slot: int) -> SamplingParams:
        """Sampling parameters of the request in the slot."""
        return _sampling_decoder.decode(self._body(slot, 0, int(self._sampling_bytes[slot])).tobytes())

    def root(self, slot: int) -> bytes:
        """Parent name of the first page."""
        return self._body(slot, self._offsets.root, DIGEST_BYTES).tobytes()

    def names(self, slot: int) -> list[bytes]:
        """Names of the prompt's full pages."""
        num_bytes = int(self._num_names[slot]) * DIGEST_BYTES
        packed = self._body(slot, self._offsets.names, num_bytes).tobytes()
        return [packed[start : start + DIGEST_BYTES] for start in range(0, num_bytes, DIGEST_BYTES)]

    def close(self) -> None:
        """Close the descriptor. The memory goes when the last view of it goes."""
        self._segment.close()
        self.fd = -1

    def _body_offset(self, slot: int) -> int:
        if not 0 <= slot < self.shape.num_slots:
            raise IndexError(f"slot {slot} of {self.shape.num_slots}")
        return self._offsets.bodies + slot * self._offsets.body_bytes

    def _body(self, slot: int, offset: int, length: int) -> np.ndarray:
        return self._segment.array(self._body_offset(slot) + offset, (length,), np.uint8)
