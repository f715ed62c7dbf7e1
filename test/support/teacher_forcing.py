"""Greedy texts against a reference that runs once over prompt and answer.

When the reference's best token at every position is the engine's token, its own greedy `generate` gives the same text,
by induction. A difference is allowed only where the reference's two best logits lie within 1e-4.
"""

import torch
import transformers

TIE = 1e-4


class TeacherForced:
    """A model of transformers; what it says about an answer is kept, as many servers give the same."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        self._model = model
        self._found: dict[tuple[tuple[int, ...], tuple[int, ...]], str | None] = {}

    def check(self, prompt: list[int], answer: list[int]) -> None:
        """Each token of the answer is the best at its position, or ties with it; after a tie nothing is compared."""
        key = (tuple(prompt), tuple(answer))
        if key not in self._found:
            self._found[key] = self._first_mistake(prompt, answer)
        assert self._found[key] is None

    def _first_mistake(self, prompt: list[int], answer: list[int]) -> str | None:
        with torch.inference_mode():
            logits = self._model(torch.tensor([prompt + answer[:-1]]), logits_to_keep=len(answer)).logits[0]
        for position, token in enumerate(answer):
            if token != int(logits[position].argmax()):
                gap = float(logits[position].max() - logits[position, token])
                mistake = f"token {position} of a {len(prompt)}-token prompt: {token} is {gap} below the best"
                return None if gap < TIE else mistake
        return None
