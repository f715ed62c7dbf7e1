"""Edits of logits against a naive loop over tokens."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.model_infer.penalties import LogitEdits, ParameterError, TokenCounts, apply_edits
from serve.types import SamplingParams
from unit_tests.serve.model_infer.builders import greedy

VOCAB = 40
tokens = st.lists(st.integers(0, VOCAB - 1), max_size=60)
parameters = st.builds(
    greedy,
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.5, -1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.7, -0.2]),
    min_tokens=st.integers(0, 5),
    stop_token_ids=st.lists(st.integers(0, VOCAB + 5), max_size=3),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100, width=32), max_size=4),
)


def naive(
    logits: list[float], params: SamplingParams, prompt: list[int], output: list[int], end_ids: list[int]
) -> list[float]:
    result = []
    for token, logit in enumerate(logits):
        value = np.float32(logit) + np.float32(params.logit_bias.get(token, 0.0))
        if len(output) < params.min_tokens and (token in end_ids or token in params.stop_token_ids):
            value = np.float32(-np.inf)
        if token in prompt or token in output:
            penalty = np.float32(params.repetition_penalty)
            value = value / penalty if value > 0 else value * penalty
        value -= np.float32(params.frequency_penalty) * np.float32(output.count(token))
        value -= np.float32(params.presence_penalty) * np.float32(token in output)
        result.append(float(value))
    return result


def as_ids(ids: list[int]) -> np.ndarray:
    return np.array(ids, dtype=np.uint32)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(parameters, tokens, tokens, tokens), min_size=1, max_size=4), st.integers(0, 99))
def test_edits_are_those_of_the_definition(rows: list[tuple[SamplingParams, list, list, list]], seed: int):
    logits = torch.randn(2 * len(rows), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    before = logits.tolist()
    edits = []
    for number, (params, prompt, old, new) in enumerate(rows):
        edit = LogitEdits(params, as_ids(prompt), as_ids(old), [3, 4], VOCAB)
        for token in new:
            if edit.counts is not None:
                edit.counts.add(token)
        edits.append((2 * number + 1, len(prompt) + len(old) + len(new), edit))
    apply_edits(logits, edits)
    for number, (params, prompt, old, new) in enumerate(rows):
        assert logits[2 * number].tolist() == before[2 * number]
        expected = naive(before[2 * number + 1], params, prompt, old + new, [3, 4])
        np.testing.assert_allclose(logits[2 * number + 1].numpy(), expected, rtol=1e-6, atol=1e-6)


def test_counts_grow_beyond_their_first_size():
    counts = TokenCounts(np.arange(10), np.array([3, 3, 500]))
    for token in range(1000):
        counts.add(token)
    found = dict(zip(counts.ids.tolist(), counts.output_counts.tolist(), strict=True))
    assert found == {token: 1.0 + {3: 2, 500: 1}.get(token, 0) for token in range(1000)}


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_a_bias_outside_of_the_vocabulary_is_refused(token: int):
    with pytest.raises(ParameterError, match=f"token id {token}"):
        LogitEdits(greedy(logit_bias={token: 1.0}), as_ids([1]), as_ids([]), [], VOCAB)


def test_a_prompt_is_not_recorded_where_only_the_output_counts():
    edit = LogitEdits(greedy(presence_penalty=1.0), as_ids([1, 2, 3]), as_ids([9]), [], VOCAB)
    assert edit.counts is not None
    assert edit.counts.ids.tolist() == [9]
