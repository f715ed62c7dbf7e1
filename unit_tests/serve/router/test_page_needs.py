"""How many pages of each kind of group a request takes, and may still want."""

import pytest

from models.state_layout import HitPolicy
from serve.router.admission import Admission, AdmissionLimits
from serve.router.page_needs import ExpectedGrowth, PageNeeds, fewest_pages
from serve.router.prefix_index import GroupSpec
from serve.router.request import Request
from unit_tests.serve.router.test_request import make_request

PAGE = 16
FULL = GroupSpec("full")
WINDOW = GroupSpec("window", HitPolicy.TRAILING_PAGES, 2)
STATE = GroupSpec("state", HitPolicy.EXACT_CHECKPOINT)
SPECS = (FULL, WINDOW, STATE)


def make_needs(num_pages: int = 100, chunk_tokens: int = 32) -> PageNeeds:
    admission = Admission(AdmissionLimits(10_000, 10), PAGE)
    admission.estimate.fraction = 1.0
    return PageNeeds(SPECS, {spec.name: num_pages for spec in SPECS}, PAGE, chunk_tokens, admission)


def request_of(num_prompt: int, max_tokens: int = 1) -> Request:
    request = make_request(num_prompt=num_prompt)
    request.limit = num_prompt + max_tokens
    return request


def test_a_short_prompt_takes_its_pages_and_those_of_a_state():
    needs, request = make_needs(), request_of(20)
    assert needs.joining(request, 0) == {"full": 2, "window": 2, "state": 3}
    assert needs.growth(request, 0) == {"full": 0, "window": 0, "state": 0}


def test_a_long_prompt_takes_window_pages_for_one_chunk_and_may_want_those_of_two():
    needs, request = make_needs(), request_of(1600)
    assert needs.joining(request, 0) == {"full": 100, "window": 3, "state": 3}
    assert needs.window_peak(WINDOW) == 2 + 2 * 3 + 1
    assert needs.growth(request, 0)["window"] == 6
    assert needs.first_stop(request, 0) == 48


def test_behind_a_prefix_only_the_rest_is_taken():
    needs, request = make_needs(), request_of(100)
    assert needs.joining(request, 4) == {"full": 3, "window": 3, "state": 3}
    assert needs.joining(request, 6) == {"full": 1, "window": 1, "state": 2}  # nothing to keep before its end
    assert needs.in_all(request, 6) == {"full": 7, "window": 3, "state": 3}


def test_output_grows_what_grows():
    needs, request = make_needs(), request_of(16, max_tokens=161)
    assert needs.growth(request, 0) == {"full": 10, "window": 8, "state": 0}


@pytest.mark.parametrize("num_tokens", [1, 16, 17, 500, 1600])
@pytest.mark.parametrize("length", [0, 1, 2, 30])
def test_no_request_is_promised_more_of_a_window_than_the_smallest_pool(num_tokens: int, length: int):
    if length * PAGE >= num_tokens:
        return
    needs, request = make_needs(num_pages=fewest_pages(WINDOW)), request_of(num_tokens, 300)
    assert needs.in_all(request, length)["window"] <= fewest_pages(WINDOW)
    assert needs.joining(request, length)["window"] >= 1
    assert needs.first_stop(request, length) > length * PAGE


def test_the_sum_of_growth_is_that_of_the_requests():
    growth, first, second = ExpectedGrowth(["full", "window"]), request_of(1), request_of(1)
    growth.begin(first, {"full": 3, "window": 2})
    growth.begin(second, {"full": 1, "window": 0})
    growth.spend(first, "full", 5)
    growth.change(second, "window", 4)
    assert (first.growth, second.growth) == ({"full": 0, "window": 2}, {"full": 1, "window": 4})
    assert growth.total == {"full": 1, "window": 6}
    growth.end(first)
    growth.end(second)
    assert growth.total == {"full": 0, "window": 0}
