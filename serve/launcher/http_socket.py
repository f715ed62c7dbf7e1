"""The listening socket that all HTTP processes share; bound before anything slow happens."""

import errno
import socket

from serve.errors import LaunchError

BACKLOG = 2048


def bind_http_socket(host: str, port: int) -> socket.socket:
    """Bind, not yet listen: connections are refused until `open_to_clients`. Raises LaunchError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise LaunchError(f"--host {host} is no address of this machine: {error.strerror}") from error
    bound = socket.socket(family, kind, protocol)
    try:
        _bind(bound, address)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise LaunchError(f"port {port} on {host} is in use; choose another one with --port") from error
        raise LaunchError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return bound


def _bind(bound: socket.socket, address: object) -> None:
    """First without SO_REUSEADDR, so that no other starting server can bind the port beside this one.

    With it only when the port is refused, which is also the case shortly after a server there has ended.
    """
    try:
        bound.bind(address)  # type: ignore[arg-type]
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)  # type: ignore[arg-type]


def open_to_clients(bound: socket.socket) -> None:
    """Listen; HTTP processes accept. Once more does no harm.

    Connections inherit SO_REUSEADDR, which lets a later server bind the port while they linger. It is not set earlier,
    see `_bind`.
    """
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.listen(BACKLOG)


def url_of(bound: socket.socket, host: str) -> str:
    """Where clients reach the server, with the port that was really bound."""
    port = bound.getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}"
