"""The estimate of a step's memory: it covers what is known to be allocated, and grows with what drives it."""

from models.config import load_model_config
from models.sharding import shard_model
from models.source import resolve_model
from serve.model_infer.step_memory import step_bytes
from unit_tests.serve.model_infer.tiny_llama import model_dir


def of_tiny(tokens: int = 512, rows: int = 8, context: int = 512, tp: int = 1) -> int:
    config = load_model_config(resolve_model(str(model_dir()), "auto", offline=True))
    return step_bytes(config, shard_model(config, tp, 0), "float32", tokens, rows, context)


def test_it_covers_the_fused_feed_forward_and_the_logits():
    tokens, rows = 100_000, 500
    fused_gate_up, stream, logits = tokens * 2 * 128 * 4, tokens * 96 * 4, rows * 320 * 4
    assert of_tiny(tokens, rows) > fused_gate_up + 3 * stream + 2 * logits


def test_it_grows_with_tokens_rows_and_context_and_shrinks_with_ranks():
    base = of_tiny()
    assert of_tiny(tokens=1024) > base
    assert of_tiny(rows=16) > base
    assert of_tiny(context=1024) > base
    assert of_tiny(tp=2) < base
    assert of_tiny(rows=512) == of_tiny(rows=4096)  # larger batches have no graph
