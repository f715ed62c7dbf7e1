"""What config.json of families with states of several kinds says, and which tensors of theirs are not served."""

import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from models.config import ExpertScore, ModelConfig, load_model_config
from models.errors import ModelError
from models.layer_types import LayerType
from models.source import resolve_model
from models.state_layout import page_multiple
from unit_tests.models.builders import PagedRunner, ThreadGroup, load
from unit_tests.models.state_families import CASES, build, logits_of, save, some_tokens

LINEAR, FULL, WINDOW = LayerType.LINEAR, LayerType.FULL, LayerType.SHARED_WINDOW
LIGHT, HEAVY = LayerType.COMPRESSED, LayerType.HEAVILY_COMPRESSED


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


def test_deepseek_v4_by_the_names_of_transformers(written):
    config = config_of(written("deepseek_v4_published"))
    compression = config.compression
    assert (compression.ratio, compression.heavy_ratio, compression.output_groups) == (4, 128, 2)
    assert (config.rope.rope_type, config.rope.theta, config.rope.rotary_dim) == ("default", 10000.0, 8)
    assert (compression.rope.rope_type, compression.rope.theta, compression.rope.attention_factor) == ("yarn", 16e4, 1)
    assert config.layer_types == (HEAVY, LIGHT, HEAVY, LIGHT)
    assert (config.moe.hash_layers, config.moe.score) == ((0,), ExpertScore.SQRT_SOFTPLUS)
    assert page_multiple(config) == 128
    assert ModelConfig.from_dict(config.to_dict()) == config


def test_deepseek_v4_by_the_names_of_published_files(written):
    yarn = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}
    changes = {
        "layer_types": None,
        "compress_ratios": [0, 0, 4, 128, 0],
        "compress_rates": None,
        "mlp_layer_types": None,
        "num_hash_layers": 2,
        "partial_rotary_factor": None,
        "qk_rope_head_dim": 8,
        "rope_parameters": None,
        "rope_scaling": yarn,
        "compress_rope_theta": 5000,
    }
    config = config_of(written("deepseek_v4", **changes))
    assert config.layer_types == (WINDOW, WINDOW, LIGHT, HEAVY)
    assert config.moe.hash_layers == (0, 1)
    assert (config.rope.rope_type, config.rope.rotary_dim) == ("default", 8)
    assert (config.compression.rope.theta, config.compression.rope.factor) == (5000, 16)


def test_deepseek_v4_without_a_list_of_layers_begins_heavily_compressed(written):
    config = config_of(written("deepseek_v4", layer_types=None))
    assert config.layer_types == (HEAVY, HEAVY, HEAVY, LIGHT)


def test_tensors_of_deepseek_v4_by_their_published_names(written):
    directory = written("deepseek_v4")

    def published(tensors):
        renamed = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        renamed["embed.weight"] = renamed.pop("embed_tokens.weight")
        for part in ("fn", "base", "scale"):
            renamed[f"hc_head_{part}"] = renamed.pop(f"hc_head.hc_{part}")
        for old in [name for name in renamed if name.endswith(".attn.norm.weight")]:
            renamed[old.replace("attn.norm", "attn.kv_norm")] = renamed.pop(old)
        return {**renamed, "mtp.0.norm.weight": renamed["norm.weight"].clone()}

    tokens = some_tokens(40, 1)
    expected = PagedRunner(load(directory).model).step([(0, tokens)])
    assert PagedRunner(load(rewrite(directory, published)).model).step([(0, tokens)]).equal(expected)


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("deepseek_v3", {"topk_method": "best"}, "topk_method"),
        ("deepseek_v3", {"attention_bias": True}, "attention_bias"),
        ("deepseek_v3", {"kv_lora_rank": None}, "kv_lora_rank"),
        ("deepseek_v3", {"n_group": 3}, "8 experts make no 3 equal groups"),
        ("deepseek_v3", {"topk_group": 9}, "9 of 4 groups"),
        ("deepseek_v4", {"layer_types": ["full_attention"] * 4}, "layer_types"),
        ("deepseek_v4", {"layer_types": None, "compress_ratios": [4, 4]}, "compress_ratios"),
        ("deepseek_v4", {"scoring_func": "relu"}, "scoring_func"),
        ("deepseek_v4", {"mlp_layer_types": ["dense"] * 4}, "mlp_layer_types"),
        ("deepseek_v4", {"o_groups": 3}, "4 heads make no 3 equal groups"),
        ("deepseek_v4", {"index_topk": 0}, "must be positive"),
        ("deepseek_v4", {"index_head_dim": 4}, "index_head_dim"),
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


@pytest.mark.parametrize("size", [1, 2])
def test_experts_may_be_stacked_in_one_tensor(written, size):
    directory = written("qwen3_5_moe")

    def stacked(tensors):
        kept = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
        for layer in range(4):
            prefix = f"model.layers.{layer}.mlp.experts"
            experts = [
                [tensors[f"{prefix}.{e}.{kind}_proj.weight"] for kind in ("gate", "up", "down")] for e in range(8)
            ]
            kept[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat(expert[:2]) for expert in experts])
            kept[f"{prefix}.down_proj"] = torch.stack([expert[2] for expert in experts])
        return kept

    def logits(tp):
        return PagedRunner(load(directory, tp=tp).model).step([(0, tokens)])

    tokens = some_tokens(20, 1)
    expected = ThreadGroup(size).run(logits)
    rewrite(directory, stacked)
    for ours, theirs in zip(ThreadGroup(size).run(logits), expected, strict=True):
        assert ours.equal(theirs)


def test_more_ranks_than_key_heads_are_refused(written):
    directory = written("qwen3_next")
    with pytest.raises(ModelError, match=r"--tp 3 is too large.*2 key heads"):
        ThreadGroup(3).run(lambda tp: load(directory, tp=tp))


def test_more_ranks_than_output_groups_are_refused(written):
    directory = written("deepseek_v4")
    with pytest.raises(ModelError, match=r"--tp 3 is too large.*2 groups"):
        ThreadGroup(3).run(lambda tp: load(directory, tp=tp))


def test_a_config_without_experts_is_dense(written):
    config = config_of(written("qwen3_5"))
    assert config.moe is None
    assert config.tie_word_embeddings
    assert replace(config, dtype="bfloat16") != config


def test_lfm2_cuts_its_feed_forward_as_config_json_says(written):
    config = config_of(written("lfm2", layer_types=None, full_attn_idxs=[1], block_ff_dim=12288, block_multiple_of=256))
    assert config.intermediate_size == 8192
    assert config.layer_types == (LayerType.SHORT_CONV, FULL, LayerType.SHORT_CONV, LayerType.SHORT_CONV)
    assert (config.conv_kernel, config.qk_norm, config.tie_word_embeddings) == (3, True, True)
    assert config_of(written("lfm2", block_auto_adjust_ff_dim=False)).intermediate_size == 192


def test_gpt_oss(written):
    config = config_of(written("gpt_oss_yarn", layer_types=None))
    assert config.layer_types == (LayerType.WINDOW, FULL, LayerType.WINDOW)
    assert (config.window, config.moe.limit, config.moe.gate_slope) == (128, 7.0, 1.702)
    assert (config.attention_bias, config.attention_out_bias, config.rope.truncate) == (True, True, False)
    with pytest.raises(ModelError, match="quantized by 'gptq'"):
        config_of(written("gpt_oss", quantization_config={"quant_method": "gptq"}))


@pytest.fixture(scope="module")
def gemma_with_images(tmp_path_factory):
    """A checkpoint that sees images, and its model."""
    text = {key: value for key, value in CASES["gemma3"][2].items() if key != "pad_token_id"}
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
    }
    config = transformers.Gemma3Config(
        text_config=text, vision_config={**vision, "patch_size": 14}, mm_tokens_per_image=4
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    directory = tmp_path_factory.mktemp("images")
    model.save_pretrained(directory)
    return directory, model


@pytest.mark.parametrize("is_old", [False, True])
def test_of_a_gemma3_that_sees_images_the_language_model_is_served(gemma_with_images, is_old, tmp_path):
    directory, model = gemma_with_images
    shutil.copytree(directory, tmp_path / "copy")
    if is_old:  # as the hub has it
        tensors = load_file(directory / "model.safetensors")
        names = {name: re.sub(r"^model\.language_model\.", "language_model.model.", name) for name in tensors}
        renamed = {re.sub(r"^model\.(vision|multi)", r"\1", new): tensors[old] for old, new in names.items()}
        save_file(renamed, tmp_path / "copy" / "model.safetensors", metadata={"format": "pt"})
    tokens = some_tokens(70, 1)
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]
    ours = PagedRunner(load(tmp_path / "copy").model).step([(0, tokens)])
    assert (ours - expected).abs().max() <= 1e-4 * expected.abs().max()
