import torch

from models.forward import ForwardBatch
from serve.model_infer.attention_state.coordinator import StateCoordinator
from serve.model_infer.warmup import warm_up, warm_up_variants
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


def test_variants_are_sound_batches_within_the_limits_and_all_are_told():
    states = StateCoordinator(make_layout(page_size=16), 1, 0, CPU)
    states.allocate({"full": 1})
    model, told = RecordingModel(), []
    warm_up_variants(model, states, 200, 500, CPU, 3, lambda *each: told.append(each))
    assert told == [("kernels", done, len(model.batches)) for done in range(1, len(model.batches) + 1)]
    contexts = set()
    for batch in model.batches:
        attention = batch.attention["full"]
        lengths = (attention.query_starts[1:] - attention.query_starts[:-1]).tolist()
        assert len(batch.token_ids) == sum(lengths) <= 200
        assert attention.max_query_len == max(lengths)
        assert int(attention.positions.max()) == attention.max_context_len - 1 == int(attention.context_lens.max()) - 1
        assert attention.page_table.shape == (len(lengths), -(-attention.max_context_len // 16))
        assert [run.length for run in attention.runs] == [length for length in lengths if length > 1]
        contexts.add(attention.max_context_len)
    assert {1, 500} & contexts == {500}
    assert {32, 64, 100, 200} <= contexts
