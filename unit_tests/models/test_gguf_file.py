"""Headers of GGUF files, whole and damaged, and the config that is read from them."""

import struct

import gguf
import pytest

from models.config import RopeConfig
from models.config_gguf import read_gguf_config
from models.errors import ModelError
from models.gguf_file import GgufFile
from unit_tests.models.builders import hf_model
from unit_tests.models.gguf_builders import write_gguf


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    found = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write_gguf(hf_model("llama", tie_word_embeddings=True), "llama", found)
    return found


def test_the_header_agrees_with_the_library(path):
    ours, reader = GgufFile(path), gguf.GGUFReader(path)
    assert set(ours.tensors) == {tensor.name for tensor in reader.tensors}
    for tensor in reader.tensors:
        found = ours.tensors[tensor.name]
        assert (found.offset, found.num_bytes) == (tensor.data_offset, tensor.n_bytes)
        assert found.shape == tuple(reversed(tensor.shape.tolist()))
        assert bytes(ours.bytes_of(found)) == tensor.data.tobytes()
    assert ours.fields["general.architecture"] == "llama"


def test_arrays_are_decoded_when_asked_for(path):
    file = GgufFile(path)
    assert file.array("tokenizer.ggml.tokens") == [f"token{index}" for index in range(256)]
    with pytest.raises(KeyError):
        file.array("general.architecture")


def test_arrays_of_numbers(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_array("numbers", [3, -4, 5])
    writer.add_array("scores", [0.5, 0.25])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    file = GgufFile(tmp_path / "a.gguf")
    assert (file.array("numbers"), file.array("scores")) == ([3, -4, 5], [0.5, 0.25])


def test_the_config(path):
    config = read_gguf_config(path)
    assert (config.architecture, config.vocab_size, config.num_layers) == ("LlamaForCausalLM", 256, 2)
    assert (config.num_q_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert (config.tie_word_embeddings, config.dtype, config.rms_norm_eps) == (True, "float32", 1e-6)
    assert config.rope == RopeConfig("default", 10000.0, 16)
    assert (config.eos_token_ids, config.bos_token_id) == ((2, 9), 1)


def header(tmp_path, architecture="llama", **numbers):
    """A file without tensors."""
    path = tmp_path / "h.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    base = {
        "block_count": 2,
        "context_length": 512,
        "embedding_length": 64,
        "feed_forward_length": 128,
        "attention.head_count": 4,
        "vocab_size": 100,
    }
    for key, value in {**base, **numbers}.items():
        if value is not None and not isinstance(value, str):
            add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            add(f"{architecture}.{key}", value)
        elif value is not None:
            writer.add_string(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_defaults_and_scalings(tmp_path):
    config = read_gguf_config(header(tmp_path))
    assert (config.num_kv_heads, config.head_dim, config.vocab_size) == (4, 16, 100)
    linear = read_gguf_config(header(tmp_path, **{"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}))
    assert linear.rope == RopeConfig("linear", 10000.0, 16, factor=4.0)
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128}
    assert read_gguf_config(header(tmp_path, **yarn)).rope == RopeConfig(
        "yarn", 10000.0, 16, factor=4.0, original_context=128
    )


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"block_count": None}, r"'llama\.block_count' is missing"),
        ({"block_count": "two"}, r"'llama\.block_count' is not a number"),
        ({"attention.sliding_window": 64}, "sliding-window attention"),
        ({"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 4}, "experts in architecture"),
        ({"rope.scaling.type": "longrope"}, "'longrope' is not supported"),
        ({"attention.key_length": 16, "attention.value_length": 8}, "key and value heads"),
    ],
)
def test_what_cannot_be_served_is_one_line(tmp_path, numbers, message):
    with pytest.raises(ModelError, match=message):
        read_gguf_config(header(tmp_path, **numbers))


def test_a_part_of_a_split_file_is_refused(tmp_path):
    path = tmp_path / "part.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match="is one of 3 parts"):
        read_gguf_config(path)


def test_an_unknown_architecture_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"'gemma9' is not supported \(known: "):
        read_gguf_config(header(tmp_path, "gemma9"))


def test_a_file_cut_anywhere_is_refused(path, tmp_path):
    content = path.read_bytes()
    for keep in (0, 3, 10, 24, 60, 500, 3000, len(content) // 2, len(content) - 40):
        (tmp_path / "cut.gguf").write_bytes(content[:keep])
        with pytest.raises(ModelError, match=r"cut\.gguf.*(truncated|cannot be read|not a GGUF)"):
            GgufFile(tmp_path / "cut.gguf")


def test_other_files_and_versions_are_refused(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"PK\3\4" + bytes(100))
    with pytest.raises(ModelError, match="not a GGUF file"):
        GgufFile(tmp_path / "x.gguf")
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 9, 0, 0))
    with pytest.raises(ModelError, match="version 9 is not supported"):
        GgufFile(tmp_path / "x.gguf")


def test_random_damage_never_escapes_as_another_error(path, tmp_path):
    import random

    content, rng = path.read_bytes()[:6000], random.Random(0)
    for _ in range(300):
        damaged = bytearray(content)
        for _ in range(4):
            damaged[rng.randrange(4, 1500)] = rng.randrange(256)
        (tmp_path / "d.gguf").write_bytes(damaged)
        with pytest.raises(ModelError):
            read_gguf_config(tmp_path / "d.gguf")
