import torch

from models.forward import ForwardBatch
from serve.model_infer.attention_state.coordinator import StateCoordinator
from serve.model_infer.warmup import warm_up
from unit_tests.serve.model_infer.builders import CPU, make_layout


class RecordingModel:
    """Notes the batches that it is given."""

    def __init__(self) -> None:
        self.batches: list[ForwardBatch] = []

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        self.batches.append(batch)
        return torch.zeros(len(batch.logits_rows), 5)


def record(batch_max_tokens: int) -> list[ForwardBatch]:
    states = StateCoordinator(make_layout(page_size=16), 1, 0, CPU)
    states.allocate({"full": 1})
    model = RecordingModel()
    warm_up(model, states, batch_max_tokens, CPU)
    return model.batches


def test_a_prompt_and_decode_batches_of_one_page():
    for batch in record(2048):
        attention = batch.attention["full"]
        num_rows = len(attention.context_lens)
        assert len(batch.token_ids) == int(attention.query_starts[-1]) == len(attention.positions)
        assert attention.context_lens.max() <= 16
        assert attention.page_table.shape == (num_rows, 1)
        assert not attention.page_table.any()
        assert batch.logits_rows.tolist() == (attention.query_starts[1:] - 1).tolist()
        assert attention.sequence_ids.tolist() == sorted(attention.sequence_ids.tolist())


def test_no_batch_is_larger_than_a_step_may_be():
    assert max(len(batch.token_ids) for batch in record(3)) == 3
