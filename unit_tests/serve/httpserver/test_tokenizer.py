import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from serve.httpserver.gguf_metadata import GGUFError, read_gguf_metadata
from serve.httpserver.gguf_tokenizer import build_tokenizer, byte_level_pre_tokenizer
from serve.httpserver.tokenizer import TokenizerError, byte_tokenizer, load_tokenizer

ROOT = Path(__file__).resolve().parents[3]
FRAGMENTS = [
    "12345", "3.14159", "1,000,000", "٣٤٥", "x² + y³", "Ⅷ", "def f(x):\n    return x**2\n", "for(int i=0;i<10;++i){}",
    "\t\tif a:\n\n\n", "  two", "   three spaces   ", "\r\n\r\n", "你好，世界", "日本語のテキスト", "안녕하세요",
    "😀😃👩‍👩‍👧‍👦", "🇩🇪",
    "naïve café", "e\u0301", "Привет", "مرحبا", "don't we'll I'VE",
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "http://a.b/c?d=1",
    "\x00\x07", "\ufeff", "�", "…—“quoted”", "a" * 30, "ABC", "Hello", " world", "\n", " ", "\u3000", "\xa0",
]  # fmt: skip


def texts(count: int) -> list[str]:
    source = random.Random(3)
    made = ["".join(source.choices(FRAGMENTS, k=source.randint(1, 8))) for _ in range(count - len(FRAGMENTS))]
    return [*FRAGMENTS, *made]


@pytest.fixture(scope="module")
def reference(smollm_path: Path) -> Tokenizer:
    """SmolLM2's tokenizer as its authors publish it, from the file's lists as the gguf package reads them."""
    from gguf import GGUFReader

    fields = GGUFReader(str(smollm_path)).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    kinds = fields["tokenizer.ggml.token_type"].contents()
    made = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    made.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([token for token, kind in zip(tokens, kinds, strict=True) if kind == 3])
    return made


def test_ids_equal_the_reference(tokenizer, reference):
    for text in texts(220):
        assert tokenizer.encode(text) == reference.encode(text).ids, text


def test_text_comes_back(tokenizer, reference):
    for text in texts(220):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=False)


def test_each_digit_is_a_token(tokenizer):
    digits = [tokenizer.encode(digit) for digit in "12345"]
    assert [len(ids) for ids in digits] == [1] * 5
    assert tokenizer.encode("12345") == [token for ids in digits for token in ids]
    # The space before a number goes to no digit: it is a token of its own.
    assert len(tokenizer.encode(" 12")) == 3


def test_special_tokens_are_one_token_each(tokenizer):
    assert tokenizer.encode("<|im_start|>a<|im_end|>") == [1, tokenizer.encode("a")[0], 2]
    assert tokenizer.eos_token_ids == {2}
    assert tokenizer.bos_token_id == 1
    assert tokenizer.decode([1, 2], skip_special_tokens=True) == ""


def test_bytes_without_a_token_of_their_own_are_byte_tokens(tokenizer):
    ids = tokenizer.encode("😀")
    assert b"".join(tokenizer.token_text(token) for token in ids) == "😀".encode()


def test_a_kept_tokenizer_is_used_and_a_broken_one_made_again(smollm_path, tmp_path):
    first = load_tokenizer(smollm_path, tmp_path)
    (kept,) = tmp_path.iterdir()
    assert load_tokenizer(smollm_path, tmp_path).encode("12345") == first.encode("12345")
    kept.write_bytes(b"torn")
    assert load_tokenizer(smollm_path, tmp_path).encode("12345") == first.encode("12345")
    assert kept.stat().st_size > 1000


def test_a_cache_directory_that_cannot_be_written_is_no_error(smollm_path, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert load_tokenizer(smollm_path, blocked).vocab_size == 49152


def test_a_directory_in_huggingface_form(tokenizer, smollm_path, tmp_path):
    (tmp_path / "tokenizer.json").write_text(build_tokenizer(read_gguf_metadata(smollm_path)).to_str())
    config = {
        "eos_token": {"content": "<|im_end|>"},
        "bos_token": "<|im_start|>",
        "chat_template": "{{ bos_token }}config",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    loaded = load_tokenizer(tmp_path)
    assert loaded.encode("12345 é") == tokenizer.encode("12345 é")
    assert loaded.eos_token_ids == {0, 2}
    assert loaded.chat_template.render([]) == "<|im_start|>config"
    (tmp_path / "chat_template.jinja").write_text("own file")
    assert load_tokenizer(tmp_path).chat_template.render([]) == "own file"


def test_unusable_files_are_one_line(tmp_path):
    with pytest.raises(TokenizerError, match="neither"):
        load_tokenizer(tmp_path)
    (tmp_path / "m.gguf").write_bytes(b"GGUF\3\0\0\0" + b"\xff" * 40)
    with pytest.raises(TokenizerError):
        load_tokenizer(tmp_path / "m.gguf", tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError):
        load_tokenizer(tmp_path)


def test_dummy_models_have_a_token_a_byte(tmp_path):
    made = load_tokenizer(tmp_path, dummy=True)
    assert made.encode("aé") == list("aé".encode())
    assert byte_tokenizer().decode(list("中".encode())) == "中"


@pytest.mark.parametrize(
    ("kind", "text", "pieces"),
    [
        ("llama-bpe", "I'VE 12345\n\nab", ["I", "'VE", "Ġ", "123", "45", "ĊĊ", "ab"]),
        ("qwen2", "a 123\n x", ["a", "Ġ", "1", "2", "3", "Ċ", "Ġx"]),
        ("gpt-2", "it's 123  b", ["it", "'s", "Ġ123", "Ġ", "Ġb"]),
        ("smollm", "it's 12", ["it", "'s", "Ġ", "1", "2"]),
        ("gpt-4o", "HelloWorld's 1234", ["Hello", "World's", "Ġ", "123", "4"]),
        ("tekken", "HelloWorld 12", ["Hello", "World", "Ġ", "1", "2"]),
    ],
)
def test_pre_tokenizers_cut_as_their_models_do(kind, text, pieces):
    assert [piece for piece, _ in byte_level_pre_tokenizer(kind).pre_tokenize_str(text)] == pieces


def test_an_unknown_pre_tokenizer_is_refused():
    with pytest.raises(GGUFError, match="'new'"):
        byte_level_pre_tokenizer("new")


def sentencepiece_metadata(**changes) -> dict:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "ab", "▁ab", "▁▁"]
    kinds = [2, 3, 3, *[6] * 256, 1, 1, 1, 1, 1, 4]
    scores = [0.0] * 259 + [-5.0, -3.0, -4.0, -1.0, -2.0, 0.0]
    found = {
        "model": "llama", "tokens": pieces, "token_type": kinds, "scores": scores,
        "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, **changes,
    }  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in found.items()}


def names(made: Tokenizer, text: str) -> list[str]:
    return made.encode(text).tokens


def test_sentencepiece_with_prefix_space_begin_token_and_byte_fallback():
    made = build_tokenizer(sentencepiece_metadata())
    assert names(made, "ab") == ["<s>", "▁ab"]
    assert names(made, "ab é") == ["<s>", "▁ab", "▁", "<0xC3>", "<0xA9>"]
    assert made.decode(made.encode("ab é").ids) == "ab é"


def test_sentencepiece_as_gemma_has_it():
    made = build_tokenizer(sentencepiece_metadata(add_space_prefix=False, add_bos_token=False))
    assert names(made, "ab") == ["ab"]
    assert names(made, "a  b") == ["a", "▁▁", "b"]


def test_sentencepiece_streams_keep_spaces_and_bytes(tmp_path):
    (tmp_path / "tokenizer.json").write_text(build_tokenizer(sentencepiece_metadata()).to_str())
    loaded = load_tokenizer(tmp_path)
    ids = loaded.encode("ab 😀", add_special_tokens=False)
    detokenizer = loaded.detokenizer()
    assert [detokenizer.feed([token]) for token in ids] == [" ab", " ", "", "", "", "😀"]


def test_unigram():
    metadata = sentencepiece_metadata(model="t5", add_eos_token=True)
    assert names(build_tokenizer(metadata), "ab") == ["▁ab", "</s>"]


def test_the_http_process_imports_neither_torch_nor_transformers(smollm_path, tmp_path):
    code = (
        "import sys; from pathlib import Path; import serve.httpserver.process as p;"
        f"p.load_tokenizer(Path({str(smollm_path)!r}), Path({str(tmp_path)!r}));"
        "sys.exit(' '.join(n for n in ('torch', 'transformers', 'numba') if n in sys.modules) or 0)"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=dict(os.environ))
    assert found.returncode == 0, found.stderr
