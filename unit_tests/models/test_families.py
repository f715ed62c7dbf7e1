"""Every family against transformers in float32: chunked prefill, mixed steps, decoding, tensor parallelism."""

import pytest
import torch

from kernels.dispatch import get_backend
from unit_tests.models.builders import CPU, FAMILIES, PagedRunner, ThreadGroup, hf_logits, hf_model, load, save

TOLERANCE = 1e-4
CASES = {
    **{name: (name, {}) for name in FAMILIES},
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama_biases": ("llama", {"attention_bias": True}),
    "llama_more_kv_heads": ("llama", {"num_key_value_heads": 4}),
    "qwen3_moe_normalised": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3_moe_mixed": ("qwen3_moe", {"mlp_only_layers": [0]}),
    "llama3_rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "qwen3_yarn": (
        "qwen3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            }
        },
    ),
}


def some_tokens(count: int, seed: int) -> list[int]:
    return torch.randint(3, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_close(ours: torch.Tensor, reference: torch.Tensor) -> None:
    assert ours.dtype == torch.float32
    assert (ours - reference).abs().max() <= TOLERANCE * reference.abs().max()


def run_in_pieces(runner: PagedRunner, first: list[int], second: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Two prompts in chunks that end within pages, mixed with decoding; logits of every token of both."""
    seen: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    plan = [[(0, first[:21])], [(0, first[21:40]), (1, second[:7])], [(1, second[7:20]), (0, first[40:41])]]
    for index in range(41, len(first)):
        plan.append([(0, first[index : index + 1]), (1, second[index - 21 : index - 20])])
    for rows in plan:
        parts = runner.step(rows).split([len(tokens) for _, tokens in rows])
        for (sequence, _), logits in zip(rows, parts, strict=True):
            seen[sequence].append(logits)
    return torch.cat(seen[0]), torch.cat(seen[1])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """directory and transformers' model of a case, made once."""
    made = {}

    def get(case: str):
        if case not in made:
            name, changes = CASES[case]
            model = hf_model(name, **changes)
            made[case] = (save(model, tmp_path_factory.mktemp(case)), model)
        return made[case]

    return get


@pytest.mark.parametrize("case", CASES)
def test_chunked_prefill_and_decoding_give_the_logits_of_transformers(case, checkpoint):
    directory, reference = checkpoint(case)
    first, second = some_tokens(60, 1), some_tokens(39, 2)
    ours = run_in_pieces(PagedRunner(load(directory).model), first, second)
    assert_close(ours[0], hf_logits(reference, first))
    assert_close(ours[1], hf_logits(reference, second))


@pytest.mark.parametrize("case", FAMILIES)
def test_the_cpu_kernels_give_the_same(case, checkpoint):
    directory, reference = checkpoint(case)
    first, second = some_tokens(60, 3), some_tokens(39, 4)
    ours = run_in_pieces(PagedRunner(load(directory, backend=get_backend(CPU)).model), first, second)
    assert_close(ours[0], hf_logits(reference, first))
    assert_close(ours[1], hf_logits(reference, second))


@pytest.mark.parametrize("case", FAMILIES)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_logits_of_few_tokens_or_of_none_leave_the_state_as_logits_of_all_do(case, num_ranks, checkpoint):
    directory, reference = checkpoint(case)
    tokens = some_tokens(45, 6)
    expected = hf_logits(reference, tokens)

    def run(tp=None):
        runner = PagedRunner(load(directory, tp=tp, backend=get_backend(CPU)).model)
        assert runner.step([(0, tokens[:20])], wanted=[]).shape[0] == 0
        second = runner.step([(0, tokens[20:44])], wanted=[3, 23])
        return torch.cat([second, runner.step([(0, tokens[44:])])])

    runs = [run()] if num_ranks == 1 else ThreadGroup(num_ranks).run(run)
    for logits in runs:
        assert_close(logits, expected[[23, 43, 44]])


@pytest.mark.parametrize("case", FAMILIES)
def test_greedy_decoding_gives_the_same_tokens(case, checkpoint):
    directory, reference = checkpoint(case)
    prompt = some_tokens(30, 5)
    expected = reference.generate(
        torch.tensor([prompt]), max_new_tokens=16, do_sample=False, eos_token_id=None, use_cache=True
    )[0, 30:].tolist()
    runner = PagedRunner(load(directory).model)
    tokens = [int(runner.step([(0, prompt)])[-1].argmax())]
    while len(tokens) < 16:
        tokens.append(int(runner.step([(0, tokens[-1:])])[-1].argmax()))
    assert tokens == expected


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("case", [*FAMILIES, "llama_tied", "llama_biases"])
def test_ranks_together_give_the_same(case, size, checkpoint):
    directory, reference = checkpoint(case)
    first, second = some_tokens(60, 6), some_tokens(39, 7)

    def work(tp):
        return run_in_pieces(PagedRunner(load(directory, tp=tp).model), first, second)

    for ours in ThreadGroup(size).run(work):
        assert_close(ours[0], hf_logits(reference, first))
        assert_close(ours[1], hf_logits(reference, second))


def test_bfloat16_stays_near_float32(checkpoint):
    directory, _ = checkpoint("llama")
    tokens = some_tokens(40, 8)
    exact = PagedRunner(load(directory).model).step([(0, tokens)])
    rounded = PagedRunner(load(directory, dtype=torch.bfloat16).model, dtype=torch.bfloat16).step([(0, tokens)])
    assert rounded.dtype == torch.float32
    assert (rounded - exact).abs().mean() < 0.05 * exact.abs().max()


def test_a_tied_head_shares_the_embedding(checkpoint):
    model = load(checkpoint("llama_tied")[0]).model
    assert model.head.data_ptr() == model.embedding.data_ptr()


def test_a_new_pool_is_noticed_and_a_forgotten_one_is_released(checkpoint):
    import weakref

    runner = PagedRunner(load(checkpoint("llama")[0]).model)
    tokens = some_tokens(20, 9)
    before = runner.step([(0, tokens)])
    again = PagedRunner(runner.model)
    assert torch.equal(again.step([(0, tokens)]), before)
    storage = weakref.ref(again.states.leaves()["full"]["kv"])
    runner.model.forget_pool()
    again.states = None
    assert storage() is None
