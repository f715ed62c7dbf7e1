"""Faults come where, when and how the string says."""

import errno
import threading

import numpy as np
import pytest

from serve.multi_level_cache.fault_injector import (
    SITES,
    FaultAction,
    FaultInjector,
    FaultRule,
    FaultSpecError,
    InjectedFaultError,
    actions_at,
    parse_faults,
)


def test_a_string_becomes_rules():
    assert parse_faults("host.copy_in:bitflip:n=3, disk.read:delay=0.2:p=0.1,disk.write:fail") == [
        FaultRule("host.copy_in", FaultAction.BITFLIP, on_call=3),
        FaultRule("disk.read", FaultAction.DELAY, seconds=0.2, rate=0.1),
        FaultRule("disk.write", FaultAction.FAIL),
    ]
    assert parse_faults("") == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("disk.reed:fail", "'disk.reed' is not one of"),
        ("disk.read:explode", "'explode' is not one of delay, fail"),
        ("disk.read:kill", "'kill' is not one of delay, fail"),
        ("disk.before_commit:fail", "'fail' is not one of kill"),
        ("disk.fdatasync:bitflip", "'bitflip' is not one of delay, fail, full, hang"),
        ("disk.read", "'' is not one of"),
        ("disk.read:delay", "delay takes seconds"),
        ("disk.read:fail=3", "the other faults take no value"),
        ("disk.read:delay=soon", "'soon' is not a number"),
        ("disk.read:delay=nan", "not between"),
        ("disk.read:fail:p=1.5", "1.5 is not between 0 and 1"),
        ("disk.read:fail:n=0", "0 is not between 1"),
        ("disk.read:fail:n=1.5", "whole number"),
        ("disk.read:fail:q=1", "neither n=CALL nor p=RATE"),
        ("disk.read:fail:n=1:p=1", "one of n= and p="),
    ],
)
def test_impossible_strings_are_told_in_one_line(text: str, message: str):
    with pytest.raises(FaultSpecError, match=message) as caught:
        parse_faults(text)
    assert "\n" not in str(caught.value)


def test_a_fault_on_the_third_call_comes_once():
    injector = FaultInjector(parse_faults("disk.read:fail:n=3"))
    fired = [injector.decide("disk.read") is not None for _ in range(6)]
    assert fired == [False, False, True, False, False, False]
    assert injector.decide("disk.write") is None
    assert injector.counts == {"disk.read:fail": 1}


def test_a_rate_is_kept():
    injector = FaultInjector(parse_faults("disk.read:drop:p=0.1"))
    assert 50 < sum(not injector.apply("disk.read") for _ in range(1000)) < 200


def test_a_bitflip_changes_one_bit_and_a_failure_raises():
    data = np.zeros((4, 8), dtype=np.uint8)
    assert FaultInjector(parse_faults("host.copy_in:bitflip")).apply("host.copy_in", data)
    assert np.unpackbits(data).sum() == 1
    with pytest.raises(InjectedFaultError, match=r"host\.copy_in"):
        FaultInjector(parse_faults("host.copy_in:fail")).apply("host.copy_in", data)


def test_a_full_disk_has_its_own_errno():
    for action, number in (("fail", errno.EIO), ("full", errno.ENOSPC)):
        with pytest.raises(InjectedFaultError) as caught:
            FaultInjector(parse_faults(f"disk.pwrite:{action}")).apply("disk.pwrite")
        assert caught.value.errno == number


def test_every_site_is_counted_and_takes_an_action():
    injector = FaultInjector([])
    for site in SITES:
        assert parse_faults(f"{site}:{actions_at(site)[-1].value}")
        injector.reach(site)
    assert injector.passed() == dict.fromkeys(SITES, 1)


def test_released_hangs_end():
    injector = FaultInjector(parse_faults("disk.read:hang,disk.write:delay=3600"))
    injector.release()
    assert injector.apply("disk.read")
    assert injector.apply("disk.write")


def test_other_rules_count_anew_and_end_what_hangs():
    injector = FaultInjector(parse_faults("disk.read:hang:n=1"))
    thread = threading.Thread(target=injector.apply, args=("disk.read",))
    thread.start()
    injector.arm("disk.read:fail:n=1")
    thread.join(10)
    assert not thread.is_alive()
    with pytest.raises(InjectedFaultError):
        injector.apply("disk.read")
    with pytest.raises(FaultSpecError):
        injector.arm("disk.read:explode")
    injector.arm("")
    assert injector.apply("disk.read")
