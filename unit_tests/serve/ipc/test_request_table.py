import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.ipc.request_table import SAMPLING_BYTES, RequestTable, TableShape, slots_of_server
from serve.ipc.shm_segment import Segment, SegmentError, SegmentKind
from serve.types import SamplingParams

SHAPE = TableShape(num_slots=4, max_tokens=200, page_size=16)
SAMPLING = SamplingParams(max_tokens=7, temperature=0.5, stop_token_ids=[1, 2], logit_bias={5: -1.0}, logprobs=0)
ROOT = b"r" * 32


def prompt(num_tokens: int) -> np.ndarray:
    return np.arange(num_tokens, dtype=np.uint32)


def names_of(num_tokens: int) -> list[bytes]:
    return [bytes([page]) * 32 for page in range(num_tokens // SHAPE.page_size)]


def test_attach_reads_what_was_filled() -> None:
    table = RequestTable.create(SHAPE)
    generation = table.fill(2, prompt(50), SAMPLING, ROOT, names_of(50))
    other = RequestTable.attach(os.dup(table.fd))
    assert other.shape == SHAPE
    assert generation == other.generation(2) == 1
    assert other.num_prompt(2) == 50
    assert other.tokens(2)[:50].tolist() == list(range(50))
    assert other.tokens(2).shape == (200,)
    assert other.sampling(2) == SAMPLING
    assert other.root(2) == ROOT
    assert other.names(2) == names_of(50)


def test_a_slot_is_free_again_once_its_generation_is_released() -> None:
    table = RequestTable.create(SHAPE)
    assert table.is_free(0)
    first = table.fill(0, prompt(1), SAMPLING, ROOT, [])
    assert not table.is_free(0)
    with pytest.raises(ValueError, match="in use"):
        table.fill(0, prompt(1), SAMPLING, ROOT, [])
    table.mark_released(0, first)
    assert table.is_free(0)
    assert table.fill(0, prompt(1), SAMPLING, ROOT, []) == first + 1


def test_release_all_frees_every_slot() -> None:
    table = RequestTable.create(SHAPE)
    for slot in (0, 3):
        table.fill(slot, prompt(5), SAMPLING, ROOT, [])
    table.release_all()
    assert all(table.is_free(slot) for slot in range(4))


def test_router_appends_behind_the_prompt() -> None:
    table = RequestTable.create(SHAPE)
    table.fill(1, prompt(10), SAMPLING, ROOT, [])
    table.tokens(1)[10:12] = [900, 901]
    assert RequestTable.attach(os.dup(table.fd)).tokens(1)[8:12].tolist() == [8, 9, 900, 901]


@pytest.mark.parametrize(
    ("num_tokens", "sampling", "root", "names", "message"),
    [
        (0, SAMPLING, ROOT, [], "0 tokens"),
        (201, SAMPLING, ROOT, [], "201 tokens does not fit, the limit is 200"),
        (16, SamplingParams(max_tokens=1, stop_token_ids=[1 << 30] * 5000), ROOT, [], f"limit is {SAMPLING_BYTES}"),
        (31, SAMPLING, ROOT, [b"a" * 32] * 2, "2 page names for a prompt of 31"),
        (16, SAMPLING, b"short", [], "32 bytes"),
        (16, SAMPLING, ROOT, [b"short"], "32 bytes"),
    ],
)
def test_what_does_not_fit_changes_nothing(
    num_tokens: int, sampling: SamplingParams, root: bytes, names: list[bytes], message: str
) -> None:
    table = RequestTable.create(SHAPE)
    with pytest.raises(ValueError, match=message):
        table.fill(0, prompt(num_tokens), sampling, root, names)
    assert table.is_free(0)
    assert table.generation(0) == 0


def test_the_longest_prompt_fits_and_touches_no_neighbour() -> None:
    table = RequestTable.create(SHAPE)
    table.fill(0, prompt(3), SAMPLING, ROOT, [])
    table.fill(2, prompt(3), SAMPLING, ROOT, [])
    table.fill(1, prompt(200) + 7, SAMPLING, b"z" * 32, names_of(200))
    assert table.names(1) == names_of(200)
    for slot in (0, 2):
        assert table.tokens(slot)[:3].tolist() == [0, 1, 2]
        assert table.root(slot) == ROOT
        assert table.sampling(slot) == SAMPLING


@pytest.mark.parametrize("slot", [-1, 4])
def test_a_slot_outside_the_table_raises(slot: int) -> None:
    with pytest.raises(IndexError):
        RequestTable.create(SHAPE).tokens(slot)


def test_attach_rejects_another_segment() -> None:
    with pytest.raises(SegmentError):
        RequestTable.attach(Segment.create(SegmentKind(b"other", 1), 4096).fd)


def test_read_only_attach_cannot_write() -> None:
    table = RequestTable.create(SHAPE)
    table.fill(0, prompt(3), SAMPLING, ROOT, [])
    with pytest.raises(ValueError, match="read-only"):
        RequestTable.attach(os.dup(table.fd), read_only=True).mark_released(0, 1)


def test_unused_slots_cost_no_memory() -> None:
    table = RequestTable.create(TableShape(num_slots=2000, max_tokens=131072, page_size=64))
    table.fill(1500, prompt(100), SAMPLING, ROOT, [])
    assert os.fstat(table.fd).st_blocks * 512 < 1 << 20


def test_two_processes_share_slots() -> None:
    table = RequestTable.create(SHAPE)
    table.fill(0, prompt(20), SAMPLING, ROOT, [b"n" * 32])
    program = (
        "import sys; from serve.ipc.request_table import RequestTable;"
        "t = RequestTable.attach(int(sys.argv[1]));"
        "assert t.names(0) == [b'n' * 32] and t.sampling(0).max_tokens == 7;"
        "t.tokens(0)[20] = 4242; t.mark_released(0, t.generation(0))"
    )
    subprocess.run([sys.executable, "-c", program, str(table.fd)], pass_fds=[table.fd], check=True)
    assert table.is_free(0)
    assert table.tokens(0)[20] == 4242


def test_servers_own_ranges_that_do_not_meet() -> None:
    assert [slots_of_server(12, server, 3) for server in range(3)] == [range(4), range(4, 8), range(8, 12)]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 200), st.integers(0, 2**32 - 1)), max_size=12))
def test_slots_keep_their_own_requests(fills: list[tuple[int, int, int]]) -> None:
    table = RequestTable.create(SHAPE)
    expected: dict[int, tuple[int, int]] = {}
    for slot, num_tokens, token in fills:
        table.mark_released(slot, table.generation(slot))
        table.fill(slot, np.full(num_tokens, token, np.uint32), SAMPLING, ROOT, names_of(num_tokens))
        expected[slot] = (num_tokens, token)
    for slot, (num_tokens, token) in expected.items():
        assert table.tokens(slot)[:num_tokens].tolist() == [token] * num_tokens
        assert table.names(slot) == names_of(num_tokens)
    table.close()
