"""What the control plane asks of the manager costs its thread little."""

import pytest

from serve.ipc.messages import PageRange
from serve.multi_level_cache import control
from serve.multi_level_cache.page_directory import PageDirectory
from serve.multi_level_cache.page_state import PageKey
from serve.types import Durability
from unit_tests.serve.multi_level_cache.builders import FULL, STATE, Bench, request


def test_statistics_count_objects_by_state_without_a_pass_over_them(monkeypatch: pytest.MonkeyPatch):
    bench = Bench(64)
    prompt = request("a", *range(5))
    bench.store(prompt, PageRange("full", 0, 4), PageRange("state", 3, 1))
    directory = bench.host.directory
    durable = directory.find_ready(PageKey(prompt.names[0], "full"))
    assert durable is not None
    directory.set_durability(durable, Durability.PERSISTING)
    bench.claim(prompt, PageRange("full", 4, 1))
    with monkeypatch.context() as patch:
        patch.delattr(PageDirectory, "pages")
        patch.delattr(PageDirectory, "nodes")
        assert control.statistics(bench.manager)["objects"] == {
            "content": {"ready": 5, "filling": 1},
            "durability": {"volatile": 4, "persisting": 1},
            "bytes": {"full": 4 * FULL.object_bytes, "state": STATE.object_bytes},
            "tokens": {"full": 4 * 64, "state": 64},
        }
    bench.assert_sound()
    bench.manager.flush()
    assert control.statistics(bench.manager)["objects"]["content"] == {"filling": 1}
    bench.assert_sound()


def test_the_pages_used_last_are_listed():
    bench = Bench(64)
    prompts = [request(index, "a") for index in range(6)]
    for prompt in prompts:
        bench.store(prompt)
    bench.probe(prompts[1])
    wanted = [prompts[1], prompts[5], prompts[4]]
    assert [page["name"] for page in control.list_pages(bench.manager, 3)] == [each.names[0].hex() for each in wanted]
    assert [len(control.list_pages(bench.manager, limit)) for limit in (-1, 0, 100)] == [0, 0, 6]
    (only,) = control.list_pages(bench.manager, 3, prompts[2].root.hex())
    assert only["name"] == prompts[2].names[0].hex()
