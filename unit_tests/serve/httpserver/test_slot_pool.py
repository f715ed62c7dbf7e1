from serve.httpserver.slot_pool import SlotPool


class Table:
    """Slots that are all free, whoever asks."""

    def is_free(self, slot: int) -> bool:
        return True

    def generation(self, slot: int) -> int:
        return 1


def test_requests_one_after_another_share_a_slot():
    pool = SlotPool(Table(), range(10, 20))
    used = set()
    for _ in range(30):
        slots = pool.take(2)
        used.update(slots)
        for slot in slots:
            pool.let_go(slot)
        pool.released((slot, 1) for slot in slots)
    assert used == {10, 11}
    assert pool.num_free == 10
