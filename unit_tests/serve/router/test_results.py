"""What a result does to its requests."""

import numpy as np

from serve.ipc.messages import StepResult, TokenLogprobs
from serve.router.results import _not_told, name_pages
from unit_tests.serve.router.router_fakes import HASHER, PAGE, Harness, prompt_of
from unit_tests.serve.router.test_request import make_request


def score(number: int) -> TokenLogprobs:
    return TokenLogprobs(number, -1.0, 1, [], [])


def test_prompt_logprobs_are_told_once_although_a_preempted_request_computes_them_again():
    request = make_request()
    entries = [TokenLogprobs(number, -1.0, 1, [], []) for number in range(6)]
    told = _not_told(request, entries[:2]) + _not_told(request, entries[2:4])
    request.num_scored_here = 0  # it joined again
    told += _not_told(request, entries[:3]) + _not_told(request, entries[3:])
    assert told == entries


def test_pages_are_named_as_they_fill_and_as_a_prompt_of_the_same_tokens_would_be():
    tokens = np.array(prompt_of(5 * PAGE), np.uint32)
    request = make_request(num_prompt=2 * PAGE)
    request.tokens, request.root = tokens, HASHER.root(None, None)
    for num_tokens in range(2 * PAGE, 5 * PAGE):
        request.num_tokens = num_tokens
        name_pages(request, HASHER)
        assert request.names == HASHER.chain(request.root, tokens[:num_tokens])


def test_log_probabilities_go_with_their_tokens():
    harness = Harness()
    client = harness.submit(prompt_of(50), max_tokens=5, logprobs=0, prompt_logprobs=0)
    first = harness.workers[0].run_next()
    first.prompt_logprobs = {0: [score(1), score(2)]}
    harness.router.turn([first])
    assert (client.last.token_ids, client.last.prompt_logprobs) == ([], [score(1), score(2)])
    second = harness.workers[0].run_next()
    second.prompt_logprobs, second.logprobs = {0: [score(3)]}, {0: score(9)}
    harness.router.turn([second])
    assert len(client.last.token_ids) == 1
    assert (client.last.prompt_logprobs, client.last.logprobs) == ([score(3)], [score(9)])


def test_what_comes_for_a_request_that_has_ended_is_dropped():
    harness = Harness()
    client = harness.submit(prompt_of(10), max_tokens=50)
    harness.step_all()
    harness.abort(client)
    count = len(client.tokens)
    result = harness.workers[0].run_next()
    assert result.token_ids
    result.failed_rows = {0: "late"}
    harness.router.turn([result, StepResult(99, 0, 0, 0.0)])
    harness.run()
    assert len(client.tokens) == count
    harness.check_idle()
