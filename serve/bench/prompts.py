"""Prompts of a wanted length, repeatable by seed and distinct from each other."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from serve.bench.flags import BenchError
from serve.bench.words import WORDS

Prompt = list[int] | str

MIN_WORDS = 64


class PromptMaker(Protocol):
    """Makes prompts in one format."""

    def make(self, length: int, rng: np.random.Generator) -> Prompt:
        """A prompt of `length` tokens; what follows another text starts at a token boundary."""

    def join(self, parts: list[Prompt]) -> Prompt:
        """Prompts one after another; their lengths add up."""


class TokenIdPrompts:
    """Random token ids; ids below 256 are left out where there are others, for special tokens live there."""

    def __init__(self, vocab_size: int) -> None:
        self._low = 256 if vocab_size > 512 else 1
        self._high = vocab_size

    def make(self, length: int, rng: np.random.Generator) -> Prompt:
        ids: list[int] = rng.integers(self._low, self._high, size=length).tolist()
        return ids

    def join(self, parts: list[Prompt]) -> Prompt:
        return [token_id for part in parts for token_id in part if isinstance(token_id, int)]


class WordPrompts:
    """Random common English words, each with a space before it: one token a word in nearly every tokenizer."""

    def __init__(self, words: Sequence[str] = WORDS) -> None:
        self._words = [" " + word for word in words]

    def make(self, length: int, rng: np.random.Generator) -> Prompt:
        return "".join(self._words[i] for i in rng.integers(0, len(self._words), size=length))

    def join(self, parts: list[Prompt]) -> Prompt:
        return "".join(part for part in parts if isinstance(part, str))


def single_token_words(path: Path) -> list[str]:
    """The words that are one token each, also beside others, for the tokenizer at `path` (a file or its directory)."""
    from tokenizers import Tokenizer

    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise BenchError(f"--tokenizer {path}: {' '.join(str(error).split())}") from error

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    words = [word for word in WORDS if count(f" {word}") == 1]
    if len(words) < MIN_WORDS or count("".join(f" {word}" for word in words)) != len(words):
        raise BenchError(f"--tokenizer {path}: too few common words are one token each; use --prompt_format token_ids")
    return words


def prompt_maker(uses_token_ids: bool, vocab_size: int, tokenizer: Path | None) -> PromptMaker:
    """The maker that the options ask for."""
    if uses_token_ids:
        return TokenIdPrompts(vocab_size)
    return WordPrompts(single_token_words(tokenizer) if tokenizer else WORDS)
