from serve.model_infer.page_runs import PageObject, PageRun, page_runs


def objects(*pages: tuple[int, tuple[int, ...]]) -> list[PageObject]:
    return [PageObject(page, slots, (0,) * len(slots)) for page, slots in pages]


def test_pages_that_follow_each_other_on_both_sides_move_together():
    found = list(page_runs(objects((4, (8,)), (5, (9,)), (6, (10,)))))
    assert found == [(0, PageRun(4, (8,), 3))]


def test_a_gap_on_either_side_begins_a_run():
    found = list(page_runs(objects((4, (8,)), (5, (10,)), (7, (11,)), (8, (12,)))))
    assert found == [(0, PageRun(4, (8,), 1)), (1, PageRun(5, (10,), 1)), (2, PageRun(7, (11,), 2))]


def test_objects_of_several_slots_follow_by_that_many():
    found = list(page_runs(objects((0, (0, 1)), (1, (2, 3)), (2, (3, 4)), (3, (6, 5)))))
    assert found == [(0, PageRun(0, (0, 1), 2)), (2, PageRun(2, (3, 4), 1)), (3, PageRun(3, (6, 5), 1))]


def test_runs_cover_all_objects_in_order():
    items = objects(*((page * 3 % 7, (page,)) for page in range(20)))
    covered = [first + index for first, run in page_runs(items) for index in range(run.count)]
    assert covered == list(range(20))
    assert list(page_runs([])) == []
