from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from serve.bench.flags import BenchError
from serve.bench.prompts import TokenIdPrompts, WordPrompts, prompt_maker
from serve.bench.words import WORDS


def rng(seed: int = 1) -> np.random.Generator:
    return np.random.default_rng(seed)


def save_tokenizer(path: Path, num_words: int) -> Tokenizer:
    """A tokenizer to which the first words of the list are one token each and all others letters."""
    whole = ["\u0120" + word for word in WORDS[:num_words]]
    pieces = ["[UNK]", "\u0120", *(chr(c) for c in range(97, 123)), *whole]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]", continuing_subword_prefix=""))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(path))
    return tokenizer


def test_token_ids_have_the_length_and_stay_in_the_vocabulary() -> None:
    ids = TokenIdPrompts(1000).make(5000, rng())
    assert len(ids) == 5000
    assert all(isinstance(i, int) and 256 <= i < 1000 for i in ids)
    assert set(TokenIdPrompts(16).make(1000, rng())) == set(range(1, 16))


def test_token_ids_join() -> None:
    assert TokenIdPrompts(1000).join([[1, 2], [3]]) == [1, 2, 3]


def test_words_have_the_length_and_join() -> None:
    maker = WordPrompts()
    text = maker.make(100, rng())
    assert isinstance(text, str)
    assert len(text.split()) == 100
    assert set(text.split()) <= set(WORDS)
    assert maker.join([" a b", " c"]) == " a b c"


def test_words_are_distinct_lower_case_letters() -> None:
    assert len(set(WORDS)) == len(WORDS) > 300
    assert all(word.isascii() and word.isalpha() and word.islower() for word in WORDS)


def test_a_tokenizer_makes_the_length_exact(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path / "tokenizer.json", 100)
    maker = prompt_maker(False, 1000, tmp_path)
    for length in (1, 7, 333):
        text = maker.make(length, rng(length))
        assert isinstance(text, str)
        assert len(tokenizer.encode(text).ids) == length


def test_a_tokenizer_of_too_few_whole_words_is_refused(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "tokenizer.json", 20)
    with pytest.raises(BenchError, match="too few common words"):
        prompt_maker(False, 1000, tmp_path)


def test_a_missing_tokenizer_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="--tokenizer"):
        prompt_maker(False, 1000, tmp_path)
