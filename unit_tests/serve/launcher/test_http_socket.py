import socket

import pytest

from serve.errors import LaunchError
from serve.launcher.http_socket import bind_http_socket, open_to_clients, url_of


def test_port_0_takes_a_free_port_and_refuses_clients_until_someone_listens() -> None:
    with bind_http_socket("127.0.0.1", 0) as bound:
        port = bound.getsockname()[1]
        assert url_of(bound, "127.0.0.1") == f"http://127.0.0.1:{port}"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=1)
        open_to_clients(bound)
        socket.create_connection(("127.0.0.1", port), timeout=1).close()


def test_a_port_that_another_starting_server_has_bound_is_in_use() -> None:
    with bind_http_socket("127.0.0.1", 0) as bound:
        port = bound.getsockname()[1]
        with pytest.raises(LaunchError, match=f"port {port} on 127.0.0.1 is in use"):
            bind_http_socket("127.0.0.1", port)


def test_a_port_is_free_again_while_old_connections_linger() -> None:
    with bind_http_socket("127.0.0.1", 0) as bound:
        open_to_clients(bound)
        port = bound.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port), timeout=1)
        bound.accept()[0].close()  # the server's side waits in TIME_WAIT
    client.close()
    bind_http_socket("127.0.0.1", port).close()


@pytest.mark.parametrize("host", ["no such host", "203.0.113.7"])
def test_an_address_of_nobody_here_is_one_line(host: str) -> None:
    with pytest.raises(LaunchError, match=host):
        bind_http_socket(host, 0)


def test_an_ipv6_url_has_brackets() -> None:
    with bind_http_socket("127.0.0.1", 0) as bound:
        assert url_of(bound, "::1").startswith("http://[::1]:")
