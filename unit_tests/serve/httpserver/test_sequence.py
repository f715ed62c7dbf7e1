"""Outputs of the router become text, counts and an ending."""

from collections.abc import Sequence as Items

import pytest

from serve.httpserver.detokenizer import Detokenizer
from serve.httpserver.sequence import Delta, Ending, Sequence, TextRules
from serve.httpserver.stop_strings import compile_stops
from serve.ipc.messages import RequestOutput, TokenLogprobs
from serve.types import FinishReason

END = 256  # ids below are bytes
TABLE = [bytes([byte]) for byte in range(256)] + [b"<end>"]


def make(**rules: object) -> Sequence:
    options = {"end_ids": frozenset({END}), **rules}
    return Sequence(3, TextRules(**options), Detokenizer(TABLE, frozenset()))  # type: ignore[arg-type]


def output(token_ids: Items[int] | str, **fields: object) -> RequestOutput:
    ids = list(token_ids.encode()) if isinstance(token_ids, str) else list(token_ids)
    return RequestOutput(0, 1, ids, **fields)  # type: ignore[arg-type]


def scores(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -0.5, 1, [token_id], [-0.5])


def text_of(deltas: Items[Delta | None]) -> str:
    return "".join(delta.text for delta in deltas if delta is not None)


def test_text_counts_and_the_length_ending():
    sequence = make(wants_token_ids=True)
    first = sequence.advance(output("He", cached_tokens=[16, 0, 0]))
    last = sequence.advance(output("y", finish_reason=FinishReason.LENGTH))
    assert first is not None
    assert last is not None
    assert (first.index, first.text, first.token_ids, first.ending) == (3, "He", [72, 101], None)
    assert (last.text, last.ending) == ("y", Ending.LENGTH)
    assert (sequence.num_tokens, sequence.cached_tokens, sequence.ending) == (3, [16, 0, 0], Ending.LENGTH)


@pytest.mark.parametrize(("include", "text"), [(False, "Hi"), (True, "Hi<end>")])
def test_the_token_that_ends_a_sequence_counts_but_is_not_shown_unless_asked_for(include: bool, text: str):
    sequence = make(include_stop=include)
    delta = sequence.advance(output([72, 105, END], finish_reason=FinishReason.STOP))
    assert delta is not None
    assert (delta.text, delta.ending, sequence.num_tokens) == (text, Ending.STOP, 3)


def test_an_end_token_within_a_text_that_goes_on_is_text():
    assert text_of([make().advance(output([72, END, 105]))]) == "H<end>i"


def test_a_character_in_two_outputs_comes_out_whole_and_an_incomplete_one_not_at_all():
    sequence = make()
    word = "aé".encode()
    assert text_of([sequence.advance(output(word[:2])), sequence.advance(output(word[2:]))]) == "aé"
    last = sequence.advance(output("é".encode()[:1], finish_reason=FinishReason.LENGTH))
    assert last is not None
    assert (last.text, sequence.num_tokens) == ("", 4)


def test_nothing_to_see_gives_no_delta():
    sequence = make()
    assert sequence.advance(output([], cached_tokens=[0, 0, 0])) is None
    assert sequence.advance(output("é".encode()[:1])) is None


def test_a_stop_string_over_two_outputs_ends_the_sequence_here():
    sequence = make(stops=compile_stops(["END"]))
    first = sequence.advance(output("one E"))
    assert first is not None
    assert first.text == "one "
    assert not sequence.ended_here
    last = sequence.advance(output("ND and more"))
    assert last is not None
    assert (last.text, last.ending, sequence.ended_here) == ("", Ending.STOP, True)
    assert sequence.num_tokens == len("one END")  # not those behind the stop string


def test_a_stop_string_with_the_router_s_own_end_is_not_told_to_it():
    sequence = make(stops=compile_stops(["x"]))
    sequence.advance(output("ax", finish_reason=FinishReason.LENGTH))
    assert (sequence.ending, sequence.ended_here) == (Ending.STOP, False)


def test_what_was_held_back_comes_with_the_end():
    sequence = make(stops=compile_stops(["END"]))
    deltas = [sequence.advance(output("so E")), sequence.advance(output("N", finish_reason=FinishReason.LENGTH))]
    assert text_of(deltas) == "so EN"


def test_no_stop_string_counts_within_min_tokens():
    sequence = make(stops=compile_stops(["a"]), min_tokens=3)
    assert text_of([sequence.advance(output("aaaXa"))]) == "aaaX"
    assert sequence.num_tokens == 5


def test_scores_wait_for_the_text_of_their_tokens():
    sequence = make(stops=compile_stops(["END"]), wants_logprobs=True)
    first = sequence.advance(output("aE", logprobs=[scores(97), scores(69)]))
    assert first is not None
    assert [(token.scores.token_id, token.start, token.end) for token in first.tokens] == [(97, 0, 1)]
    second = sequence.advance(output("x", logprobs=[scores(120)]))
    assert second is not None
    assert (second.text, [token.start for token in second.tokens]) == ("Ex", [1, 2])


def test_scores_of_a_cut_off_stop_string_are_dropped():
    sequence = make(stops=compile_stops(["END"]), wants_logprobs=True)
    delta = sequence.advance(output("aEND", logprobs=[scores(id) for id in b"aEND"]))
    assert delta is not None
    assert [token.scores.token_id for token in delta.tokens] == [97]


def test_the_prompt_s_scores_come_once_with_the_first_tokens():
    sequence = make(wants_prompt_logprobs=True)
    assert sequence.advance(output([], prompt_logprobs=[scores(1)])) is None
    first = sequence.advance(output("a", prompt_logprobs=[scores(2)]))
    second = sequence.advance(output("b"))
    assert first is not None
    assert second is not None
    assert [score.token_id for score in first.prompt_logprobs or []] == [1, 2]
    assert second.prompt_logprobs is None


def test_a_sequence_that_only_scores_its_prompt_has_no_text():
    sequence = make(keep_tokens=False, wants_prompt_logprobs=True)
    delta = sequence.advance(output("a", prompt_logprobs=[scores(1)], finish_reason=FinishReason.LENGTH))
    assert delta is not None
    assert (delta.text, delta.ending, sequence.num_tokens) == ("", Ending.LENGTH, 0)
