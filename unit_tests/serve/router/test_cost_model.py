"""Predictions follow what is measured, and go back to the prior in silence."""

import pytest

from serve.router.cost_model import CostModel, CostPrior


def test_nothing_measured_gives_the_prior():
    model = CostModel(CostPrior(1000.0, 0.02))
    assert model.prefill_tokens_per_s(5.0) == pytest.approx(1000.0)
    assert model.decode_step_s(5.0) == pytest.approx(0.02)
    assert model.recompute_s(500, 5.0) == pytest.approx(0.54)


def test_measured_steps_outweigh_the_prior():
    model = CostModel(CostPrior(1000.0, 0.02))
    for step in range(10):
        model.observe(0, 8, 0.1, step * 0.1)
        model.observe(512, 0, 512 / 200, step * 0.1)
    assert model.decode_step_s(1.0) == pytest.approx(0.1, rel=0.15)
    assert model.prefill_tokens_per_s(1.0) == pytest.approx(200, rel=0.05)


def test_a_mixed_step_charges_prefill_only_for_what_decode_does_not_take():
    model = CostModel(CostPrior(1000.0, 0.1))
    for step in range(20):
        model.observe(100, 8, 0.2, step * 0.1)
    assert model.prefill_tokens_per_s(2.0) == pytest.approx(1000, rel=0.05)


def test_silence_decays_to_the_prior():
    model = CostModel(CostPrior(1000.0, 0.02))
    model.observe(10_000, 0, 100.0, 0.0)
    assert model.prefill_tokens_per_s(0.0) < 110
    assert model.prefill_tokens_per_s(1000.0) == pytest.approx(1000.0, rel=0.01)


def test_impossible_samples_are_ignored():
    model = CostModel(CostPrior(1000.0, 0.02))
    model.observe(100, 0, 0.0, 0.0)
    model.observe(0, 0, 1.0, 0.0)
    assert model.prefill_tokens_per_s(0.0) == pytest.approx(1000.0)
    assert model.decode_step_s(0.0) == pytest.approx(0.02)


def test_loads_are_measured_and_fade_to_the_prior():
    costs = CostModel(CostPrior(load_bytes_per_s=1e9, promotion_bytes_per_s=1e8))
    assert costs.load_bytes_per_s(0.0) == 1e9
    costs.observe_load(1_000_000_000, 10.0, 0.0)
    assert 1e8 <= costs.load_bytes_per_s(0.0) < 1.1e8
    assert costs.load_bytes_per_s(3000.0) > 0.99e9
    assert costs.promotion_bytes_per_s(0.0) == 1e8
    costs.observe_promotion(1_000_000_000, 1.0, 0.0)
    assert costs.promotion_bytes_per_s(0.0) > 9e8


def test_what_the_manager_tells_of_the_disk_goes_before_what_grants_have_shown():
    costs = CostModel(CostPrior(promotion_bytes_per_s=1e8))
    costs.observe_promotion(1_000_000_000, 1.0, 0.0)
    costs.tell_promotion(5e6)
    assert costs.promotion_bytes_per_s(0.0) == costs.promotion_bytes_per_s(3000.0) == 5e6
    costs.tell_promotion(0.0)
    assert costs.promotion_bytes_per_s(0.0) > 9e8


def test_a_load_waits_for_its_promotions():
    costs = CostModel(CostPrior(load_bytes_per_s=1e9, promotion_bytes_per_s=1e8))
    from_host, from_disk = costs.load_s(10**8, 0, 0.0), costs.load_s(10**8, 10**8, 0.0)
    assert 0.1 < from_host < 0.11
    assert 1.1 < from_disk < 1.11
