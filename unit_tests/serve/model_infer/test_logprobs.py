from collections.abc import Callable

import pytest
import torch

from serve.ipc.messages import TokenLogprobs
from serve.model_infer import logprobs


def tensor_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: list[int]) -> list[TokenLogprobs]:
    """As on other devices than the CPU."""
    return logprobs._entries(logits, token_ids, num_top)


@pytest.mark.parametrize("compute", [logprobs.token_logprobs, tensor_logprobs])
def test_entries_are_the_models_distribution(compute: Callable[..., list[TokenLogprobs]]):
    logits = torch.randn(150, 300, generator=torch.Generator().manual_seed(0)) * 4
    token_ids = torch.randint(0, 300, (150,), generator=torch.Generator().manual_seed(1))
    num_top = [row % 6 for row in range(150)]
    entries = compute(logits, token_ids, num_top)
    expected = logits.double().log_softmax(dim=-1)
    for row, entry in enumerate(entries):
        assert entry.token_id == token_ids[row]
        assert entry.logprob == pytest.approx(float(expected[row, entry.token_id]), abs=1e-5)
        assert entry.rank == 1 + int((expected[row] > expected[row, entry.token_id]).sum())
        best = expected[row].sort(descending=True)
        assert entry.top_ids == best.indices[: num_top[row]].tolist()
        assert entry.top_logprobs == pytest.approx(best.values[: num_top[row]].tolist(), abs=1e-5)


def test_more_alternatives_than_tokens_gives_all_tokens():
    (entry,) = logprobs.token_logprobs(torch.zeros(1, 5), torch.tensor([2]), [20])
    assert sorted(entry.top_ids) == [0, 1, 2, 3, 4]
    assert entry.rank == 1
