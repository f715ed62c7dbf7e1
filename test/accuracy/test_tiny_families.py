"""Families other than llama through the whole engine: random weights in float32 give the texts of transformers."""

import concurrent.futures
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from tiny_engine import generate, save_byte_tokenizer

from unit_tests.models.builders import hf_model, save

NUM_TOKENS = 24
PAGE = 16
LENGTHS = [1, 15, 16, 17, 47, 48, 49, 200]


@dataclass
class Family:
    """A running server and transformers' model with the same weights."""

    server: Any
    reference: transformers.PreTrainedModel


@pytest.fixture(scope="module", params=["qwen2", "qwen3", "qwen3_moe"])
def family(
    request: pytest.FixtureRequest, start_server: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Family]:
    reference = hf_model(request.param)
    directory = save(reference, tmp_path_factory.mktemp(request.param))
    save_byte_tokenizer(directory)
    flags = ("--data_type", "float32", "--cpu_cache_token_page_size", str(PAGE))
    with start_server(*flags, model=str(directory)) as server:
        yield Family(server, reference)


def make_prompts() -> list[list[int]]:
    """Random bytes, of lengths around page boundaries."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 256, (length,), generator=generator).tolist() for length in LENGTHS]


def answers(server: Any, prompts: list[list[int]]) -> list[tuple[list[int], int]]:
    """Generated tokens and the count of cached prompt tokens of each, all asked for at once."""

    def one(prompt: list[int]) -> tuple[list[int], int]:
        body = server.complete(prompt, NUM_TOKENS, ignore_eos=True, return_token_ids=True)
        return body["choices"][0]["token_ids"], body["usage"]["prompt_tokens_details"]["cached_tokens"]

    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(one, prompts))


def test_a_miss_and_a_hit_give_the_text_of_transformers(family: Family):
    prompts = make_prompts()
    expected = [generate(family.reference, prompt, NUM_TOKENS) for prompt in prompts]
    assert answers(family.server, prompts) == [(text, 0) for text in expected]
    cached = [(len(prompt) - 1) // PAGE * PAGE for prompt in prompts]
    assert answers(family.server, prompts) == list(zip(expected, cached, strict=True))
