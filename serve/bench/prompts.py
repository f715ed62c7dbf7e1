"""Prompts of a wanted length, repeatable by seed and distinct from each other."""

from pathlib import Path
from typing import Protocol

import numpy as np

from serve.bench.flags import BenchError
from serve.bench.words import WORDS

Prompt = list[int] | str


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

    def make(self, length: int, rng: np.random.Generator) -> Prompt:
        return "".join(" " + WORDS[i] for i in rng.integers(0, len(WORDS), size=length))

    def join(self, parts: list[Prompt]) -> Prompt:
        return "".join(part for part in parts if isinstance(part, str))


class ExactWordPrompts(WordPrompts):
    """Random words counted with the model's own tokenizer, special tokens not included."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing narrower
            raise BenchError(f"--tokenizer {path}: {' '.join(str(error).split())}") from error

    def make(self, length: int, rng: np.random.Generator) -> Prompt:
        words = [" " + WORDS[i] for i in rng.integers(0, len(WORDS), size=length)]
        while (excess := self._count(words) - length) != 0:
            if excess < 0:
                words.append(" " + WORDS[int(rng.integers(0, len(WORDS)))])
            elif len(words) > 1:
                words.pop()
            else:
                raise BenchError(f"no random words of exactly {length} tokens with this tokenizer")
        return "".join(words)

    def _count(self, words: list[str]) -> int:
        return len(self._tokenizer.encode("".join(words), add_special_tokens=False).ids)


def prompt_maker(uses_token_ids: bool, vocab_size: int, tokenizer: Path | None) -> PromptMaker:
    """The maker that the options ask for."""
    if uses_token_ids:
        return TokenIdPrompts(vocab_size)
    return ExactWordPrompts(tokenizer) if tokenizer else WordPrompts()
