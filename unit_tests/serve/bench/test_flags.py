import argparse

import pytest
from pydantic import BaseModel, ConfigDict, Field

from serve.bench.flags import BenchError, add_option_flags, given_values, resolve_options


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid")

    num_things: int = Field(3, ge=1, description="how many; 100% of them")
    loud: bool = Field(False, description="noise")
    file: str | None = Field(None, alias="json", description="where to")


def parse(*words: str) -> dict[str, object]:
    parser = argparse.ArgumentParser()
    add_option_flags(parser, Options)
    parser.format_help()
    return given_values(parser.parse_args(list(words)), Options)


def test_only_given_flags_are_reported_under_the_names_that_the_user_sees() -> None:
    assert parse() == {}
    assert parse("--num_things", "7", "--json", "x") == {"num_things": "7", "json": "x"}


def test_a_boolean_flag_alone_means_true_and_takes_a_value() -> None:
    assert resolve_options(Options, parse("--loud")).loud
    assert not resolve_options(Options, parse("--loud", "false")).loud


def test_stronger_layers_win() -> None:
    options = resolve_options(Options, {"num_things": "9"}, {"num_things": 1, "loud": True})
    assert (options.num_things, options.loud) == (9, True)


@pytest.mark.parametrize(
    ("layer", "line"),
    [
        ({"num_things": "0"}, "--num_things 0: input should be greater than or equal to 1"),
        ({"num_things": "x"}, "--num_things x: input should be a valid integer, unable to parse string as an integer"),
        ({"colour": "red"}, "unknown option 'colour'"),
    ],
)
def test_a_bad_value_is_one_line_that_names_the_flag(layer: dict[str, object], line: str) -> None:
    with pytest.raises(BenchError) as caught:
        resolve_options(Options, layer)
    assert str(caught.value) == line
