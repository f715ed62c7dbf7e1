"""An eventfd that makes a poller return."""

import os


class Wakeup:
    """Set by any thread, waited for by one through its file descriptor."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def set(self) -> None:
        """Make the descriptor readable."""
        os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Make the descriptor unreadable until the next `set`. Clear first, then look for work."""
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            pass

    def fileno(self) -> int:
        """For pollers and event loops."""
        return self._fd

    def close(self) -> None:
        """Close the descriptor."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
