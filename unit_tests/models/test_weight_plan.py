"""Plans of tensors, and the comparison of names before anything is read."""

import pytest
import torch

from models.errors import ModelError
from models.weight_plan import Piece, WeightPlan, check_names


def make_plan() -> WeightPlan:
    plan = WeightPlan()
    plan.add_whole("norm", "norm.weight", (4,))
    plan.add_rows("qk", [("q", 8, 2, 6), ("k", 4, 1, 3)], (5,))
    plan.add_columns("o", "o", (3, 8), 4, 8)
    return plan


def test_shapes_are_those_of_the_rank():
    assert make_plan().shapes == {"norm": (4,), "qk": (6, 5), "o": (3, 4)}


def test_pieces_fill_their_target_without_overlap():
    target = torch.zeros(6, 5)
    for piece in make_plan().pieces["qk"]:
        view = piece.view_of(target)
        assert tuple(view.shape) == piece.local_shape
        view += 1
    assert torch.equal(target, torch.ones(6, 5))


def test_a_piece_of_an_expert_fills_that_expert_only():
    target = torch.zeros(2, 4, 3)
    Piece("w", (8, 3), 0, 4, 6, row=1, expert=1).view_of(target).fill_(1)
    assert target.sum() == 6
    assert torch.equal(target[1, 1:3], torch.ones(2, 3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": None}, "1 tensors are missing: q"),
        ({"q": (8, 4)}, r"q is \[8, 4\], not \[8, 5\]"),
        ({"extra": (1,)}, "1 tensors are not part of this architecture: extra"),
    ],
)
def test_names_that_do_not_agree_are_told(change: dict[str, tuple[int, ...] | None], message: str):
    shapes = {"norm.weight": (4,), "q": (8, 5), "k": (4, 5), "o": (3, 8)} | change
    with pytest.raises(ModelError, match=f"file: .*{message}"):
        check_names(make_plan(), {name: shape for name, shape in shapes.items() if shape is not None}, "file")


def test_names_that_agree_pass():
    check_names(make_plan(), {"norm.weight": (4,), "q": (8, 5), "k": (4, 5), "o": (3, 8)}, "file")
