"""Socket files in the run directory."""

from pathlib import Path

# sun_path has 108 bytes, one of them for the closing NUL.
MAX_SOCKET_PATH_BYTES = 107


class SocketPathError(Exception):
    """A socket's path is too long for the kernel."""


def socket_path(run_dir: Path, name: str) -> Path:
    """Where the socket `name` lies. Raises SocketPathError when the kernel would refuse the path."""
    path = run_dir / f"{name}.sock"
    length = len(bytes(path))
    if length > MAX_SOCKET_PATH_BYTES:
        raise SocketPathError(f"socket path {path} has {length} bytes, the limit is {MAX_SOCKET_PATH_BYTES}")
    return path
