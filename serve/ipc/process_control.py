"""What a child process asks of the kernel: ignore the terminal's signals, die with its parent, show its name."""

import ctypes
import faulthandler
import gc
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
FULL_COLLECTION_AFTER = 2  # collections of the middle generation; 10 by default

# Signals that reach the whole process group. Only the launcher acts on them; it spawns with them blocked.
GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def become_child(name: str) -> None:
    """Set up this process as a child of the launcher. name: shown by `ps`, 15 bytes are kept."""
    for number in GROUP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def freeze_start_up() -> None:
    """What start-up made lives as long as the process: the collector need not look at it again.

    So full collections are cheap, and may come often. A web server leaves cycles behind with each request; those that
    grew old while they ran are freed by full collections only, of which there is one in thousands of requests else.
    """
    gc.collect()
    gc.freeze()
    gc.collect()  # the collector's count of old objects, of which a share must be new before it runs, starts at none
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, FULL_COLLECTION_AFTER)
