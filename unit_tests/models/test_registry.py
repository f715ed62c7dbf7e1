import pytest

from models.errors import ModelError, name_first
from models.registry import family_of, known_architectures, load_family


@pytest.mark.parametrize("architecture", known_architectures())
def test_every_known_architecture_has_a_module(architecture):
    module = load_family(family_of(architecture))
    assert callable(module.plan_weights)
    assert callable(module.build_model)


def test_an_unknown_architecture_lists_the_known_ones():
    with pytest.raises(ModelError, match=r"'GPT2LMHeadModel' is not supported \(known: .*Llama.*Qwen3Moe"):
        family_of("GPT2LMHeadModel")


def test_messages_are_one_line_and_long_lists_are_cut():
    assert str(ModelError("a\n  b")) == "a b"
    assert name_first(["a", "b"]) == "a, b"
    assert name_first(list("abcde")) == "a, b, c and 2 more"
