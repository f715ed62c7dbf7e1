"""In bfloat16 a prompt whose pages are cached gets the log-probabilities of one that is computed, within rounding.

After a hit sums are rounded in another order than without one. How much rounding costs is measured: it is what
separates the miss from the same prompt in float32. A hit may differ from the miss by that, and be as far from float32.
"""

import concurrent.futures
from statistics import fmean
from typing import Any

import pytest

NUM_TOKENS = 8
NUM_PROMPT = 140  # two full pages of 64, all cached
NUM_CACHED = 128
NUM_TOP = 5
NUM_ALONE = 8
LARGEST = 1.0  # of a single log-probability; a wrong page gives several

Logprobs = dict[str, Any]


@pytest.fixture(scope="module")
def served(shared_server: Any) -> Any:
    return shared_server()


@pytest.fixture(scope="module")
def prompts(served: Any) -> list[list[int]]:
    """32 prompts that have nothing in common."""
    with served.client() as client:

        def tokens(number: int) -> list[int]:
            items = "".join(f"Item {number + i} costs {i * number} crowns. " for i in range(40))
            body = {"model": served.model, "prompt": f"Report {number}. {items}"}
            return list(client.post("/tokenize", json=body).raise_for_status().json()["tokens"][:NUM_PROMPT])

        return [tokens(number) for number in range(32)]


@pytest.fixture(scope="module")
def exact(shared_server: Any, prompts: list[list[int]]) -> list[Logprobs]:
    return ask(shared_server("--data_type", "float32"), prompts, 0, "together")


def ask(server: Any, prompts: list[list[int]], num_cached: int, salt: str) -> list[Logprobs]:
    """`logprobs` of each prompt's answer; all are asked for at once."""

    def one(prompt: list[int]) -> Logprobs:
        options = {"ignore_eos": True, "logprobs": NUM_TOP, "cache_salt": f"bfloat16 {salt}"}
        body = server.complete(prompt, NUM_TOKENS, **options)
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == num_cached
        return dict(body["choices"][0]["logprobs"])

    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(one, prompts))


def differences(first: list[Logprobs], second: list[Logprobs]) -> list[float]:
    """Of tokens that are among the best of both, for as long as both have said the same before."""
    found = []
    for ours, others in zip(first, second, strict=True):
        for position in range(NUM_TOKENS):
            mine, yours = ours["top_logprobs"][position], others["top_logprobs"][position]
            found += [abs(mine[token] - yours[token]) for token in mine.keys() & yours.keys()]
            if ours["tokens"][position] != others["tokens"][position]:
                break
    return found


def check_rounding_only(misses: list[Logprobs], hits: list[Logprobs], exact: list[Logprobs]) -> None:
    rounding = fmean(differences(misses, exact))
    assert 0.001 < rounding < 0.1  # else one of the servers does not have the type that it should
    apart = differences(misses, hits)
    assert max(apart) < LARGEST
    assert fmean(apart) < 1.5 * rounding
    assert fmean(differences(hits, exact)) < 1.5 * rounding


def test_hits_in_a_batch_of_32(served: Any, prompts: list[list[int]], exact: list[Logprobs]):
    misses, hits = (ask(served, prompts, num_cached, "together") for num_cached in (0, NUM_CACHED))
    check_rounding_only(misses, hits, exact)


def test_hits_alone(served: Any, prompts: list[list[int]], exact: list[Logprobs]):
    misses, hits = (
        [ask(served, [prompt], num_cached, "alone")[0] for prompt in prompts[:NUM_ALONE]]
        for num_cached in (0, NUM_CACHED)
    )
    check_rounding_only(misses, hits, exact[:NUM_ALONE])
