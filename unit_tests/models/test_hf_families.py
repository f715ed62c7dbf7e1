"""What config.json of families with states of several kinds says, and which tensors of theirs are not served."""

import json
from dataclasses import replace

import pytest
from safetensors.torch import load_file, save_file

from models.config import ExpertScore, ModelConfig, load_model_config
from models.errors import ModelError
from models.layer_types import LayerType
from models.source import resolve_model
from unit_tests.models.builders import PagedRunner, ThreadGroup, load
from unit_tests.models.state_families import build, logits_of, save, some_tokens

LINEAR, FULL = LayerType.LINEAR, LayerType.FULL


@pytest.fixture
def written(tmp_path):
    """A function: save a case with changes of config.json, and give its directory."""

    def write(case, **changes):
        directory = save(build(case), tmp_path / case)
        path = directory / "config.json"
        data = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({key: value for key, value in data.items() if value is not None}))
        return directory

    return write


def config_of(directory):
    return load_model_config(resolve_model(str(directory)))


def test_deepseek_v3(written):
    config = config_of(written("deepseek_v3"))
    assert (config.family, config.head_dim, config.num_kv_heads) == ("deepseek", 24, 4)
    assert (config.mla.kv_lora_rank, config.mla.q_lora_rank, config.rope.rotary_dim) == (32, 48, 8)
    assert config.layer_types == (LayerType.LATENT,) * 3
    moe = config.moe
    assert (moe.score, moe.has_correction, moe.norm_topk_prob) == (ExpertScore.SIGMOID, True, True)
    assert (moe.num_groups, moe.top_groups, moe.shared_intermediate_size, moe.dense_layers) == (4, 2, 64, (0,))
    assert ModelConfig.from_dict(config.to_dict()) == config


def test_deepseek_v2_takes_groups_only_where_they_limit(written):
    assert config_of(written("deepseek_v2")).moe.num_groups == 4
    lite = config_of(written("deepseek_v2_lite"))
    assert (lite.moe.num_groups, lite.moe.score, lite.moe.has_correction) == (1, ExpertScore.SOFTMAX, False)
    assert lite.mla.q_lora_rank is None


def test_qwen3_next_without_layer_types_has_an_interval(written):
    config = config_of(written("qwen3_next", layer_types=None, full_attention_interval=2))
    assert config.layer_types == (LINEAR, FULL, LINEAR, FULL)
    assert config.rope.rotary_dim == 4
    assert config.linear_attention.is_by_head
    assert ModelConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("deepseek_v3", {"topk_method": "best"}, "topk_method"),
        ("deepseek_v3", {"attention_bias": True}, "attention_bias"),
        ("deepseek_v3", {"kv_lora_rank": None}, "kv_lora_rank"),
        ("deepseek_v3", {"n_group": 3}, "8 experts make no 3 equal groups"),
        ("deepseek_v3", {"topk_group": 9}, "9 of 4 groups"),
        ("qwen3_next", {"layer_types": ["linear_attention"]}, "layer_types"),
        ("qwen3_next", {"linear_num_value_heads": 3}, "value heads"),
        ("qwen3_next", {"linear_conv_kernel_dim": 1}, "must be positive"),
        ("qwen3_next", {"mlp_only_layers": "all"}, "mlp_only_layers"),
    ],
)
def test_what_cannot_be_is_one_line(written, case, changes, message):
    with pytest.raises(ModelError, match=message) as raised:
        config_of(written(case, **changes))
    assert "\n" not in str(raised.value)


def rewrite(directory, edit):
    """model.safetensors with `edit` applied to its tensors."""
    path = directory / "model.safetensors"
    save_file(edit(load_file(path)), path, metadata={"format": "pt"})
    return directory


def test_draft_layers_are_left_out(written):
    directory = written("deepseek_v3")

    def with_drafts(tensors):
        drafts = {name.replace(".2.", ".3."): tensor for name, tensor in tensors.items() if ".layers.2." in name}
        return {**tensors, **{name: tensor.clone() for name, tensor in drafts.items()}}

    tokens = some_tokens(20, 1)
    expected = PagedRunner(load(directory).model).step([(0, tokens)])
    assert PagedRunner(load(rewrite(directory, with_drafts)).model).step([(0, tokens)]).equal(expected)


def test_the_language_model_of_one_that_sees_images(written):
    directory, reference = written("qwen3_5"), build("qwen3_5")
    path = directory / "config.json"
    data = json.loads(path.read_text())
    outer = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": data, "vision_config": {"depth": 2}}
    path.write_text(json.dumps(outer))

    def as_part(tensors):
        named = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
        extra = ("mtp.norm.weight", "model.visual.blocks.0.norm1.weight")
        return {**named, **{name: tensors["model.norm.weight"].clone() for name in extra}}

    tokens = some_tokens(20, 1)
    ours = PagedRunner(load(rewrite(directory, as_part)).model).step([(0, tokens)])
    theirs = logits_of(reference, tokens)
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


def test_more_ranks_than_key_heads_are_refused(written):
    directory = written("qwen3_next")
    with pytest.raises(ModelError, match=r"--tp 3 is too large.*2 key heads"):
        ThreadGroup(3).run(lambda tp: load(directory, tp=tp))


def test_a_config_without_experts_is_dense(written):
    config = config_of(written("qwen3_5"))
    assert config.moe is None
    assert config.tie_word_embeddings
    assert replace(config, dtype="bfloat16") != config
