import numpy as np
import pytest
import torch

from serve.model_infer.errors import PlanError
from serve.model_infer.page_table import PageTable, WorkingPages


def test_pages_stay_in_order_when_the_table_grows():
    table = PageTable("full", 4, 100, max_rows=3, max_pages=1)
    table.append(1, [7])
    table.append(1, [3, 9, 4])
    table.append(2, [50])
    assert table.pages(1) == [7, 3, 9, 4]
    assert table.pages(2) == [50]
    assert table.pages(0) == []
    assert table.max_pages >= 4


@pytest.mark.parametrize("pages", [[-1], [100], [3, 100]])
def test_ids_outside_of_the_pool_are_refused(pages: list[int]):
    with pytest.raises(PlanError, match="not in"):
        PageTable("full", 4, 100, 3, 4).append(0, pages)


def test_too_few_pages_are_refused():
    table = PageTable("full", 4, 100, 3, 4)
    table.append(0, [1, 2])
    table.require(np.array([0]), np.array([8]))
    with pytest.raises(PlanError, match="cannot hold 9 tokens"):
        table.require(np.array([0]), np.array([9]))


def test_gather_takes_the_columns_that_the_longest_context_needs():
    table = PageTable("full", 4, 100, 3, 8)
    table.append(0, [1, 2, 3])
    table.append(2, [4])
    rows = torch.tensor([2, 0])
    gathered = table.gather(rows, 9)
    assert gathered.shape == (2, 3)
    assert gathered.dtype == torch.int32
    assert gathered[0, 0] == 4
    assert gathered[1].tolist() == [1, 2, 3]


def test_gather_sees_every_change():
    table = PageTable("full", 4, 100, 3, 8)
    table.append(0, [1, 2])
    rows = torch.tensor([0])
    first = table.gather(rows, 5)
    assert table.gather(rows, 5) is first
    table.append(0, [9])
    assert table.gather(rows, 9).tolist() == [[1, 2, 9]]
    table.clear(0)
    table.append(0, [8])
    assert table.gather(rows, 3).tolist() == [[8]]


def test_a_row_may_begin_behind_its_first_places():
    table = PageTable("window", 4, 100, 3, 2)
    table.append(0, [5, 6])
    table.clear(0)
    table.begin(0, 3)
    table.append(0, [8, 9])
    assert table.pages(0) == [0, 0, 0, 8, 9]
    table.require(np.array([0]), np.array([20]))
    table.begin(0, 0)
    table.append(0, [7])
    assert table.pages(0) == [7]


def test_each_row_has_one_working_page():
    working = WorkingPages("recurrent", 4, 10, 3)
    working.assign(0, [7])
    working.assign(2, [3])
    rows = torch.tensor([2, 0])
    gathered = working.gather(rows)
    assert gathered.tolist() == [3, 7]
    assert working.gather(rows) is gathered
    working.clear(2)
    working.assign(2, [4])
    assert working.gather(rows).tolist() == [4, 7]
    assert working.page(2) == 4
    assert working.is_held.tolist() == [True, False, True]


def test_working_pages_that_cannot_be_right_are_refused():
    working = WorkingPages("recurrent", 4, 10, 3)
    working.assign(0, [7])
    for pages in ([], [1, 2], [10], [-1]):
        with pytest.raises(PlanError, match="not one working page"):
            working.assign(1, pages)
    with pytest.raises(PlanError, match="is row 0's working page"):
        working.assign(1, [7])
    with pytest.raises(PlanError, match="row 1 has no working page"):
        working.page(1)
    with pytest.raises(PlanError, match="row 1 has no working page"):
        working.gather(torch.tensor([0, 1]))
