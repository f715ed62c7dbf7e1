"""The threads that move bytes."""

import queue

from serve.multi_level_cache.disk_io import IoPool
from serve.multi_level_cache.secondary_tier import Bytes


def test_a_task_that_raises_is_refused_and_its_thread_goes_on():
    told: queue.SimpleQueue[str] = queue.SimpleQueue()

    def raises(buffer: Bytes) -> None:
        raise ValueError("a bug")

    pool = IoPool(1, 4096)
    pool.submit(0, raises, lambda: told.put("refused"))
    pool.submit(0, lambda buffer: told.put(f"{len(buffer)} bytes"), lambda: told.put("refused"))
    assert [told.get(timeout=30), told.get(timeout=30)] == ["refused", "4096 bytes"]
    assert pool.close(30)
    assert told.empty()
    assert pool.num_hung(-1.0) == 0
