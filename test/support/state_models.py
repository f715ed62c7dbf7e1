"""Tiny models with states of several kinds, and what transformers generates with their own caches."""

import threading
from pathlib import Path

import torch
from tiny_engine import NUM_TOKENS, Tokens, save_byte_tokenizer

from unit_tests.models.state_families import build, greedy, save


class StateModel:
    """A checkpoint of one case of `unit_tests.models.state_families` on disk. Thread-safe."""

    def __init__(self, directory: Path, case: str) -> None:
        self.path = directory
        self._model = build(case, max_position_embeddings=1024)
        save(self._model, directory)
        save_byte_tokenizer(directory)
        self._known: dict[tuple[int, ...], Tokens] = {}
        self._lock = threading.Lock()

    def text(self, prompt: Tokens, num_tokens: int = NUM_TOKENS) -> Tokens:
        """The generated tokens, the end token not heeded."""
        key = (num_tokens, *prompt)
        with self._lock:
            if key not in self._known:
                with torch.inference_mode():
                    self._known[key] = greedy(self._model, prompt, num_tokens)
            return self._known[key]
