"""Families with states of other kinds against transformers in float32: prompts in odd chunks, mixed steps, decoding,
tensor parallelism, states restored at page boundaries, and every leaf missing in turn."""

import math

import pytest
import torch

from kernels.dispatch import get_backend
from models.state_layout import page_multiple
from unit_tests.models.builders import CPU, PagedRunner, ThreadGroup, load
from unit_tests.models.state_families import CASES, FAMILIES, build, greedy, logits_of, save, some_tokens

TOLERANCE = 1e-4
LENGTH, SECOND = 320, 77
PAGE = 16


def runner_of(model, **settings):
    page = math.lcm(PAGE, page_multiple(model.config))
    return PagedRunner(model, page_size=page, num_pages=96, **settings)


def assert_close(ours, reference, tolerance=TOLERANCE):
    assert ours.dtype == torch.float32
    assert (ours - reference).abs().max() <= tolerance * reference.abs().max()


def run_in_pieces(runner, first, second):
    """Two prompts in odd chunks, mixed with decoding; logits of every token of both."""
    chunks = [(0, 37), (0, 1), (0, 91), (1, 5), (0, 64), (1, 29), (0, 70)]
    seen, done = {0: [], 1: []}, {0: 0, 1: 0}
    texts = {0: first, 1: second}
    plan = [[chunks[0]], [chunks[1]], [chunks[2], chunks[3]], [chunks[5], chunks[4]], [(1, 1), chunks[6]]]
    plan += [[(0, 1), (1, 1)]] * (len(second) - 35) + [[(0, 1)]] * (len(first) - 263 - len(second) + 35)
    for step in plan:
        rows = [(sequence, texts[sequence][done[sequence] : done[sequence] + count]) for sequence, count in step]
        parts = runner.step(rows).split([len(tokens) for _, tokens in rows])
        for (sequence, tokens), logits in zip(rows, parts, strict=True):
            seen[sequence].append(logits)
            done[sequence] += len(tokens)
    assert done == {0: len(first), 1: len(second)}
    return torch.cat(seen[0]), torch.cat(seen[1])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """directory and transformers' model of a case, made once."""
    made = {}

    def get(case):
        if case not in made:
            model = build(case)
            made[case] = (save(model, tmp_path_factory.mktemp(case)), model)
        return made[case]

    return get


def assert_pieces_are_close(runner, reference, seed):
    first, second = some_tokens(LENGTH, seed), some_tokens(SECOND, seed + 1)
    ours = run_in_pieces(runner, first, second)
    assert_close(ours[0], logits_of(reference, first))
    assert_close(ours[1], logits_of(reference, second))


@pytest.mark.parametrize("case", CASES)
def test_odd_chunks_and_decoding_give_the_logits_of_transformers(case, checkpoint):
    directory, reference = checkpoint(case)
    assert_pieces_are_close(runner_of(load(directory).model), reference, 1)


@pytest.mark.parametrize("case", FAMILIES)
def test_the_cpu_kernels_give_the_same(case, checkpoint):
    directory, reference = checkpoint(case)
    assert_pieces_are_close(runner_of(load(directory, backend=get_backend(CPU)).model), reference, 3)


@pytest.mark.parametrize("case", FAMILIES)
def test_greedy_decoding_gives_the_same_tokens(case, checkpoint):
    directory, reference = checkpoint(case)
    prompt, runner = some_tokens(130, 5), runner_of(load(directory).model)
    tokens = [int(runner.step([(0, prompt)], wanted=[129])[-1].argmax())]
    while len(tokens) < 24:
        tokens.append(int(runner.step([(0, tokens[-1:])])[-1].argmax()))
    assert tokens == greedy(reference, prompt, 24)


@pytest.mark.parametrize("size", [2])
@pytest.mark.parametrize("case", FAMILIES)
def test_ranks_together_give_the_same(case, size, checkpoint):
    directory, reference = checkpoint(case)
    first, second = some_tokens(LENGTH, 6), some_tokens(SECOND, 7)

    def work(tp):
        return run_in_pieces(runner_of(load(directory, tp=tp).model), first, second)

    for ours in ThreadGroup(size).run(work):
        assert_close(ours[0], logits_of(reference, first))
        assert_close(ours[1], logits_of(reference, second))


def continued(runner, sequence, tokens):
    """Logits of further tokens: a chunk, then one by one."""
    return torch.cat(
        [runner.step([(sequence, tokens[:21])]), *(runner.step([(sequence, [token])]) for token in tokens[21:])]
    )


@pytest.mark.parametrize("boundary", [PAGE, 4 * PAGE, 11 * PAGE])
@pytest.mark.parametrize("case", FAMILIES)
def test_a_state_restored_at_a_page_boundary_goes_on_as_if_nothing_had_happened(case, boundary, checkpoint):
    directory, reference = checkpoint(case)
    tokens, runner = some_tokens(boundary + 60, 8), runner_of(load(directory).model)
    runner.step([(0, tokens[: boundary - 7])])
    runner.step([(0, tokens[boundary - 7 : boundary])])
    runner.resume(1, 0, runner.snapshot(0))
    live, restored = continued(runner, 0, tokens[boundary:]), continued(runner, 1, tokens[boundary:])
    assert torch.equal(live, restored)
    assert_close(restored, logits_of(reference, tokens)[boundary:])


@pytest.mark.parametrize("case", FAMILIES)
def test_without_any_one_leaf_a_restored_state_gives_other_logits(case, checkpoint):
    boundary = 8 * PAGE
    directory, reference = checkpoint(case)
    model, tokens = load(directory).model, some_tokens(boundary + 60, 9)
    expected = logits_of(reference, tokens)[boundary:]
    for group in runner_of(model).layout.groups:
        for leaf in group.leaves:
            runner = runner_of(model)
            runner.step([(0, tokens[:boundary])])
            runner.resume(1, 0, runner.snapshot(0))
            pages = runner.pages[group.name][1]
            runner.states.leaves()[group.name][leaf.name][pages] = 0
            error = (continued(runner, 1, tokens[boundary:]) - expected).abs().max() / expected.abs().max()
            if leaf.is_scratch:
                assert error <= TOLERANCE, f"{leaf.name} is empty at a boundary"
            else:
                assert error > 100 * TOLERANCE, f"{leaf.name} makes no difference"


@pytest.mark.parametrize("case", FAMILIES)
def test_bfloat16_stays_near_float32(case, checkpoint):
    directory, _ = checkpoint(case)
    tokens = some_tokens(150, 10)
    exact = runner_of(load(directory).model).step([(0, tokens)])
    rounded = runner_of(load(directory, dtype=torch.bfloat16).model, dtype=torch.bfloat16)
    parts = [rounded.step([(0, tokens[:130])]), *(rounded.step([(0, [token])]) for token in tokens[130:])]
    assert torch.cat(parts).dtype == torch.float32
    assert (torch.cat(parts) - exact).abs().mean() < 0.1 * exact.abs().max()
