import numpy as np
import pytest
import torch

from serve.model_infer.sampler import Sampler
from serve.types import SamplingParams
from unit_tests.serve.model_infer.builders import CPU, greedy

VOCAB = 2000
END = 7


def make_sampler(rows: dict[int, SamplingParams], prompt: tuple[int, ...] = (1, 2, 3)) -> Sampler:
    sampler = Sampler(64, VOCAB, [END], CPU)
    for row, params in rows.items():
        sampler.add(row, params, np.array(prompt, dtype=np.uint32), np.array([], dtype=np.uint32))
    return sampler


def make_logits(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def drawing(**changes: object) -> SamplingParams:
    return greedy(**{"temperature": 1.0, **changes})


MIXED = [
    greedy(),
    greedy(repetition_penalty=1.5, logprobs=3),
    drawing(seed=1),
    drawing(seed=1, temperature=0.3),
    drawing(seed=2, top_k=20, logprobs=0),
    drawing(seed=3, top_p=0.7, temperature=2.0),
    drawing(seed=4, top_p=0.999, temperature=3.0),
    drawing(seed=5, min_p=0.05, presence_penalty=2.0, frequency_penalty=0.1),
    drawing(seed=6, top_k=700, top_p=0.9, logit_bias={5: 4.0, 8: -100.0}),
    drawing(seed=-7, min_tokens=10, stop_token_ids=[3]),
]


def batched(sampler: Sampler) -> Sampler:
    """Draws as it does on other devices."""
    sampler._draw = sampler._draw_batched
    return sampler


@pytest.mark.parametrize("draws_batched", [False, True])
def test_a_token_does_not_depend_on_the_batch(draws_batched: bool):
    everything = make_sampler(dict(enumerate(MIXED)))
    alone = [make_sampler({row: params}) for row, params in enumerate(MIXED)]
    if draws_batched:
        for sampler in (everything, *alone):
            batched(sampler)
    rng = np.random.default_rng(0)
    for position in range(3, 40):
        logits = make_logits(len(MIXED), position)
        order = rng.permutation(len(MIXED))
        positions = np.full(len(MIXED), position)
        together = everything.sample(logits[torch.from_numpy(order)], order, positions)
        for place, row in enumerate(order.tolist()):
            single = alone[row].sample(logits[row : row + 1].clone(), np.array([row]), positions[:1])
            assert single.id_list[0] == together.id_list[place]
            assert single.logprobs.get(row) == together.logprobs.get(row)


def test_both_ways_to_draw_choose_the_same_tokens():
    """But for a nucleus so wide that one sorts it and the other does not; both are exact."""
    rows = dict(enumerate(MIXED[:6]))
    by_row, in_batch = make_sampler(rows), batched(make_sampler(rows))
    for position in range(3, 60):
        logits = make_logits(len(rows), position)
        arguments = np.arange(len(rows)), np.full(len(rows), position)
        assert by_row.sample(logits.clone(), *arguments).id_list == in_batch.sample(logits, *arguments).id_list


@pytest.mark.parametrize("draws_batched", [False, True])
def test_a_seed_gives_the_same_tokens_although_other_batches_round_logits_differently(draws_batched: bool):
    rows = {0: drawing(seed=1, temperature=0.9), 1: drawing(seed=2, top_p=0.9), 2: drawing(seed=3, top_k=40)}
    sampler = batched(make_sampler(rows)) if draws_batched else make_sampler(rows)
    generator = torch.Generator().manual_seed(5)
    num_equal = 0
    for position in range(3, 303):
        logits = make_logits(3, position % 20)
        other = logits + (torch.rand(logits.shape, generator=generator) - 0.5) * 2e-3
        positions = np.full(3, position)
        first = sampler.sample(logits, np.arange(3), positions).id_list
        second = [sampler.sample(other[i : i + 1], np.array([i]), positions[:1]).id_list[0] for i in range(3)]
        num_equal += sum(a == b for a, b in zip(first, second, strict=True))
    assert num_equal >= 890  # of 900


def test_greedy_rows_take_the_first_maximum_and_leave_the_logits():
    sampler = make_sampler({0: greedy(), 5: greedy(temperature=1e-6)})
    logits = make_logits(2)
    logits[0, [400, 90]] = 50.0
    before = logits.clone()
    sampled = sampler.sample(logits, np.array([0, 5]), np.array([3, 3]))
    assert sampled.id_list == [90, int(before[1].argmax())]
    assert sampled.token_ids.tolist() == sampled.id_list
    assert torch.equal(logits, before)
    assert sampled.logprobs == {}
    assert sampled.failed == {}


def test_the_same_seed_and_position_draw_the_same_token():
    first = make_sampler({0: drawing(seed=11), 1: drawing(seed=11), 2: drawing(seed=12)})
    logits = make_logits(1).expand(3, -1)
    draws = [first.sample(logits.clone(), np.array([0, 1, 2]), np.full(3, position)).id_list for position in range(50)]
    assert all(a == b for a, b, _ in draws)
    assert len({a for a, _, _ in draws}) > 10
    assert sum(a == c for a, _, c in draws) < 25


def test_temperature_is_applied():
    logits = torch.full((1, VOCAB), -50.0)
    logits[0, :2] = torch.tensor([1.0, 0.0])
    sampler = make_sampler({0: drawing(temperature=0.5)})
    count = 4000
    ones = sum(sampler.sample(logits.clone(), np.array([0]), np.array([p])).id_list[0] for p in range(count))
    probability = 1 / (1 + np.exp(2.0))
    assert abs(ones / count - probability) < 4 * np.sqrt(probability / count)


@pytest.mark.parametrize("params", [greedy(), drawing(), drawing(top_p=0.5)])
def test_one_row_that_is_not_finite_fails_alone(params: SamplingParams):
    sampler = make_sampler(dict.fromkeys(range(3), params))
    logits = make_logits(3)
    expected = sampler.sample(logits.clone(), np.arange(3), np.full(3, 3)).id_list
    logits[1, 77] = torch.nan
    sampled = sampler.sample(logits, np.arange(3), np.full(3, 3))
    assert set(sampled.failed) == {1}
    assert "not finite" in sampled.failed[1]
    assert [sampled.id_list[0], sampled.id_list[2]] == [expected[0], expected[2]]
    assert 0 <= sampled.id_list[1] < VOCAB


def test_parameters_that_do_not_fit_fail_their_row_until_it_leaves():
    sampler = make_sampler({0: greedy(logit_bias={VOCAB: 1.0}), 1: greedy()})
    sampled = sampler.sample(make_logits(2), np.array([0, 1]), np.array([3, 3]))
    assert list(sampled.failed) == [0]
    assert "logit_bias" in sampled.failed[0]
    sampler.remove(0)
    sampler.add(0, greedy(), np.array([1]), np.array([], dtype=np.int64))
    assert sampler.sample(make_logits(2), np.array([0, 1]), np.array([3, 3])).failed == {}


def test_no_end_before_min_tokens():
    sampler = make_sampler({0: greedy(min_tokens=3, stop_token_ids=[9])})
    logits = make_logits(1)
    logits[0, [END, 9, 20]] = torch.tensor([90.0, 80.0, 70.0])
    ids = [sampler.sample(logits.clone(), np.array([0]), np.array([position])).id_list[0] for position in range(3, 8)]
    assert ids == [20, 20, 20, END, END]


def test_logprobs_are_of_the_distribution_before_any_change():
    params = drawing(temperature=0.1, logit_bias={4: 100.0}, logprobs=2, presence_penalty=1.0)
    sampler = make_sampler({3: params})
    logits = make_logits(1)
    expected = logits[0].double().log_softmax(dim=-1)
    sampled = sampler.sample(logits, np.array([3]), np.array([3]))
    assert sampled.id_list == [4]
    entry = sampled.logprobs[3]
    assert entry.token_id == 4
    assert entry.logprob == pytest.approx(float(expected[4]), abs=1e-5)
    assert entry.top_ids == expected.topk(2).indices.tolist()


def test_penalties_follow_the_tokens_as_they_are_sampled():
    sampler = make_sampler({0: greedy(frequency_penalty=1.0)})
    logits = torch.zeros(1, VOCAB)
    logits[0, :3] = torch.tensor([2.5, 2.0, 1.25])
    ids = [sampler.sample(logits.clone(), np.array([0]), np.array([position])).id_list[0] for position in range(3, 8)]
    assert ids == [0, 1, 0, 2, 1]


def test_a_row_that_left_leaves_nothing_behind():
    sampler = make_sampler({0: drawing(top_k=2, logprobs=1, repetition_penalty=2.0, logit_bias={1: 50.0})})
    sampler.remove(0)
    sampler.add(0, greedy(), np.array([1]), np.array([], dtype=np.int64))
    logits = make_logits(1)
    sampled = sampler.sample(logits.clone(), np.array([0]), np.array([3]))
    assert sampled.id_list == [int(logits.argmax())]
    assert sampled.logprobs == {}
