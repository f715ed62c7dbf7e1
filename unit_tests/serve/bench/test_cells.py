import pytest

from models.config import ModelConfig, MoeConfig, RopeConfig
from serve.bench.cells import Cell, HardwareLimits, Phase, cached_tokens, operations

# The shape of Qwen3-8B.
QWEN3_8B = ModelConfig(
    architecture="Qwen3ForCausalLM",
    family="qwen3",
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_layers=36,
    num_q_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-6,
    rope=RopeConfig("default", 1e6, 128),
    max_position_embeddings=40960,
    tie_word_embeddings=False,
    qk_norm=True,
)
H200 = HardwareLimits(4.21e12, 779e12)


def seconds(cell: Cell) -> float:
    return H200.seconds(operations(QWEN3_8B, cell, "bfloat16"))


def test_weights_and_states_are_those_of_the_model() -> None:
    counted = {o.name: o for o in operations(QWEN3_8B, Cell(Phase.DECODE, 1, 1000, 999), "bfloat16")}
    layers = sum(counted[name].num_bytes for name in ("qkv", "output", "gate_up", "down")) / 2
    assert layers == pytest.approx(6.946e9, rel=1e-4)
    assert counted["head"].num_bytes / 2 == pytest.approx(0.622e9, rel=1e-3)
    assert counted["attention"].num_bytes == 1000 * 147_456


@pytest.mark.parametrize(("batch", "context", "tokens_per_s"), [(1, 1024, 275), (64, 1141, 10_400)])
def test_decode_limits_are_the_published_ones(batch: int, context: int, tokens_per_s: float) -> None:
    assert batch / seconds(Cell(Phase.DECODE, batch, context, context - 1)) == pytest.approx(tokens_per_s, rel=0.005)


@pytest.mark.parametrize(("context", "expected"), [(8192, 0.172), (32768, 0.991)])
def test_prefill_limits_are_the_published_ones(context: int, expected: float) -> None:
    assert seconds(Cell(Phase.PREFILL, 1, context, 0)) == pytest.approx(expected, rel=0.005)


def test_attention_of_a_prefill_counts_the_keys_that_each_token_sees() -> None:
    cell = Cell(Phase.PREFILL, 2, 5, 2)
    (attention,) = (o for o in operations(QWEN3_8B, cell, "float32") if o.name == "attention")
    assert attention.flops == 36 * 4 * 32 * 128 * 2 * (3 + 4 + 5)
    assert attention.num_bytes == 2 * 5 * 147_456 * 2


def test_parts_of_a_prefill_add_up_to_the_whole() -> None:
    def flops(cell: Cell) -> float:
        return sum(o.flops for o in operations(QWEN3_8B, cell, "bfloat16") if o.name != "head")

    parts = flops(Cell(Phase.PREFILL, 3, 64, 0)) + flops(Cell(Phase.PREFILL, 3, 100, 64))
    assert parts == flops(Cell(Phase.PREFILL, 3, 100, 0))


def test_experts_are_read_as_far_as_they_are_touched() -> None:
    moe = MoeConfig(num_experts=8, top_k=2, intermediate_size=64, norm_topk_prob=True, sparse_step=2)
    config = ModelConfig(**{**vars(QWEN3_8B), "moe": moe, "num_layers": 4})

    def experts(batch: int) -> tuple[float, float]:
        (found,) = (o for o in operations(config, Cell(Phase.DECODE, batch, 9, 8), "bfloat16") if o.name == "experts")
        return found.num_bytes, found.flops

    one = 3 * 4096 * 64
    assert experts(1) == pytest.approx((2 * 2 * 2 * one, 2 * 2 * 2 * one))
    assert experts(1000)[0] == pytest.approx(2 * 8 * 2 * one)
    names = {o.name: o.num_bytes for o in operations(config, Cell(Phase.DECODE, 1, 9, 8), "bfloat16")}
    assert names["down"] == 2 * 12288 * 4096 * 2


def test_each_operation_is_bound_by_what_is_slower() -> None:
    few = seconds(Cell(Phase.DECODE, 1, 100, 99))
    assert seconds(Cell(Phase.DECODE, 4, 100, 99)) == pytest.approx(few, rel=0.01)
    assert seconds(Cell(Phase.PREFILL, 1, 4096, 0)) > 20 * few


@pytest.mark.parametrize(
    ("context", "rate", "expected"), [(512, 0.0, 0), (512, 0.5, 256), (512, 1.0, 448), (500, 0.5, 192), (1, 1.0, 0)]
)
def test_hit_rates_become_whole_pages_and_leave_the_last_token(context: int, rate: float, expected: int) -> None:
    assert cached_tokens(context, rate, 64) == expected
