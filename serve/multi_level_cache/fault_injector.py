"""Faults on purpose: delays, failures, losses, flipped bits, hangs and deaths at named sites, from one string.

`--fault_inject host.copy_in:bitflip:n=3,disk.read:delay=0.2:p=0.1` flips one bit in what the third copy in brings, and
makes one read in ten take 0.2 s longer; `disk.before_commit:kill:n=7` ends the process before the seventh commit. Pure
Python: workers use it in their staging, tiers by `FaultyTier`, the disk tier also by `faulty_disk`.
"""

import errno
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

# Whole transfers, around everything that a tier does for them.
TRANSFER_SITES = ("host.copy_in", "host.copy_out", "disk.read", "disk.write", "remote.read", "remote.write")
# System calls of the disk tier, behind its queues and in front of its checks.
SYSCALL_SITES = ("disk.pread", "disk.pwrite", "disk.fdatasync")
# Moments that are passed in order; a rule can only end the process there.
KILL_POINTS = (
    *("disk.before_segment_file", "disk.after_segment_file", "disk.before_segment_row", "disk.after_segment_row"),
    *("disk.before_pwrite", "disk.after_pwrite", "disk.before_fdatasync", "disk.after_fdatasync"),
    *("disk.before_commit", "disk.after_commit", "disk.before_durable", "disk.after_durable"),
    *("disk.before_removal", "disk.after_removal", "disk.before_last_use", "disk.after_last_use"),
    *("disk.before_segment_removal", "disk.after_segment_removal", "disk.after_segment_delete"),
    *("disk.before_pread", "disk.after_pread", "disk.before_promotion", "disk.after_promotion"),
    *("disk.before_adoption", "disk.after_adoption"),
    *("manager.before_claim", "manager.after_claim", "manager.before_acquire", "manager.after_acquire"),
    *("manager.before_begin", "manager.after_begin", "manager.before_answer", "manager.after_answer"),
    *("manager.before_publish", "manager.after_publish"),
    *("worker.before_copy_out", "worker.after_copy_out", "worker.before_copy_in", "worker.after_copy_in"),
    *("worker.before_answer", "worker.after_answer"),
)
SITES = (*TRANSFER_SITES, *SYSCALL_SITES, *KILL_POINTS)


class FaultAction(Enum):
    """DELAY takes its seconds as a value; DROP is a loss that nobody is told of; HANG lasts until `release`.

    FAIL is an I/O error, FULL a full disk, SHORT half of what was asked for; KILL is SIGKILL to the own process.
    """

    DELAY = "delay"
    FAIL = "fail"
    DROP = "drop"
    BITFLIP = "bitflip"
    HANG = "hang"
    FULL = "full"
    SHORT = "short"
    KILL = "kill"


_OF_TRANSFERS = (FaultAction.DELAY, FaultAction.FAIL, FaultAction.DROP, FaultAction.BITFLIP, FaultAction.HANG)
_OF_SYSCALLS = {
    "disk.pread": (FaultAction.DELAY, FaultAction.FAIL, FaultAction.SHORT, FaultAction.BITFLIP, FaultAction.HANG),
    "disk.pwrite": (*_OF_TRANSFERS[:2], FaultAction.FULL, FaultAction.SHORT, FaultAction.BITFLIP, FaultAction.HANG),
    "disk.fdatasync": (FaultAction.DELAY, FaultAction.FAIL, FaultAction.FULL, FaultAction.HANG),
}


def actions_at(site: str) -> tuple[FaultAction, ...]:
    """What can be made to happen at a site."""
    if site in KILL_POINTS:
        return (FaultAction.KILL,)
    return _OF_SYSCALLS.get(site, _OF_TRANSFERS)


class FaultSpecError(ValueError):
    """The string of `--fault_inject` says something impossible; one line."""


class InjectedFaultError(OSError):
    """What `FAIL` and `FULL` raise, with the errno of the real thing."""


@dataclass(frozen=True)
class FaultRule:
    """One fault at one site. on_call: that call only, from 1; otherwise each call with `rate`."""

    site: str
    action: FaultAction
    seconds: float = 0.0
    rate: float = 1.0
    on_call: int | None = None


def parse_faults(text: str) -> list[FaultRule]:
    """Rules of `SITE:ACTION[=SECONDS][:n=CALL|:p=RATE]`, separated by commas. Raises FaultSpecError."""
    return [_parse_rule(part.strip()) for part in text.split(",") if part.strip()]


def _parse_rule(text: str) -> FaultRule:
    site, _, rest = text.partition(":")
    if site not in SITES:
        raise FaultSpecError(f"fault {text!r}: {site!r} is not one of {', '.join(SITES)}")
    action_text, *options = rest.split(":")
    name, _, value = action_text.partition("=")
    possible = [action.value for action in actions_at(site)]
    if name not in possible:
        raise FaultSpecError(f"fault {text!r}: {name!r} is not one of {', '.join(possible)}")
    action = FaultAction(name)
    if (action is FaultAction.DELAY) != bool(value):
        raise FaultSpecError(f"fault {text!r}: delay takes seconds (delay=0.2), the other faults take no value")
    seconds = _number(text, value, 0.0, 86400.0) if value else 0.0
    if len(options) > 1:
        raise FaultSpecError(f"fault {text!r}: one of n= and p= at most")
    rule = FaultRule(site, action, seconds)
    return _with_option(text, rule, options[0]) if options else rule


def _with_option(text: str, rule: FaultRule, option: str) -> FaultRule:
    name, _, value = option.partition("=")
    if name == "p":
        return replace(rule, rate=_number(text, value, 0.0, 1.0))
    if name != "n":
        raise FaultSpecError(f"fault {text!r}: {option!r} is neither n=CALL nor p=RATE")
    call = _number(text, value, 1, 1e12)
    if call != int(call):
        raise FaultSpecError(f"fault {text!r}: n= takes a whole number, not {value}")
    return replace(rule, on_call=int(call))


def _number(text: str, value: str, least: float, most: float) -> float:
    try:
        number = float(value)
    except ValueError as error:
        raise FaultSpecError(f"fault {text!r}: {value!r} is not a number") from error
    if not least <= number <= most:
        raise FaultSpecError(f"fault {text!r}: {value} is not between {least:g} and {most:g}")
    return number


class FaultInjector:
    """Decides at each call of a site. Any thread may call; `counts` says how often each rule has fired."""

    def __init__(self, rules: Sequence[FaultRule], seed: int = 0) -> None:
        self._rules = list(rules)
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._calls: Counter[str] = Counter()
        self._released = threading.Event()
        self.counts: Counter[str] = Counter()

    def arm(self, faults: str) -> None:
        """Other rules from now on, whose calls are counted anew; ends what hangs. Raises FaultSpecError."""
        rules = parse_faults(faults)
        with self._lock:
            self._rules = rules
            self._calls.clear()
            self._released.set()
            self._released = threading.Event()

    def decide(self, site: str) -> FaultRule | None:
        """Count a call of `site`; the first rule that applies to it."""
        with self._lock:
            self._calls[site] += 1
            for rule in self._rules:
                if rule.site == site and self._applies(rule):
                    self.counts[f"{site}:{rule.action.value}"] += 1
                    return rule
        return None

    def _applies(self, rule: FaultRule) -> bool:
        if rule.on_call is not None:
            return self._calls[rule.site] == rule.on_call
        return self._random.random() < rule.rate

    def reach(self, point: str) -> None:
        """Count a kill point; a process that a rule ends here says so on stderr with its last breath."""
        rule = self.decide(point)
        if rule is not None and rule.action is FaultAction.KILL:
            os.write(2, f"varve: fault injected: killed at {point}\n".encode())
            os.kill(os.getpid(), signal.SIGKILL)

    def passed(self) -> dict[str, int]:
        """How often each site was passed."""
        with self._lock:
            return dict(self._calls)

    def apply(self, site: str, data: np.ndarray | None = None) -> bool:
        """Let what is decided happen on the calling thread; False when the call is to be dropped.

        data: uint8, writable, already copied: a bit of it flips. Raises InjectedFaultError.
        """
        rule = self.decide(site)
        if rule is None:
            return True
        self.suffer(rule)
        if rule.action is FaultAction.BITFLIP and data is not None:
            self.flip_bit(data)
        return rule.action is not FaultAction.DROP

    def suffer(self, rule: FaultRule) -> None:
        """What a fault does before its call: wait for DELAY and HANG, raise InjectedFaultError for FAIL and FULL."""
        if rule.action is FaultAction.FAIL:
            raise InjectedFaultError(errno.EIO, f"injected at {rule.site}")
        if rule.action is FaultAction.FULL:
            raise InjectedFaultError(errno.ENOSPC, f"injected at {rule.site}")
        if rule.action is FaultAction.DELAY:
            self._released.wait(rule.seconds)
        elif rule.action is FaultAction.HANG:
            self._released.wait()

    def flip_bit(self, data: np.ndarray) -> None:
        """Flip a random bit of uint8 data of any shape."""
        if data.size:
            with self._lock:
                position, bit = self._random.randrange(data.size), self._random.randrange(8)
            data.reshape(-1)[position] ^= 1 << bit

    def release(self) -> None:
        """Ends all hangs and delays, those to come too."""
        self._released.set()
