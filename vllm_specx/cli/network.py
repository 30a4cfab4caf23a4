"""Where the server will listen, checked before anything is loaded."""

from __future__ import annotations

import errno
import ipaddress
import socket

from vllm_specx.config import ConfigError


def port_number(text: str, origin: str) -> int:
    """A TCP port from 1 to 65535. `origin` names who set it. Raises ConfigError."""
    port = int(text) if text.isascii() and text.isdecimal() and len(text) < 6 else 0
    if not 1 <= port <= 65535:
        raise ConfigError(f"{origin} is '{text}'; it must be a port number from 1 to 65535.")
    return port


def check_free(host: str, port: int) -> None:
    """Raise ConfigError if a server could not listen on host:port now.

    vLLM listens with SO_REUSEPORT, so it would share the port with another vLLM in silence.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "no name of a host"
        raise ConfigError(
            f"the host '{host}' is not an address of this machine ({reason}); "
            "set HOST to one, such as 127.0.0.1."
        ) from None
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise ConfigError(_sentence(error, host, port)) from None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _sentence(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use; stop what listens there or set PORT to another."
    if error.errno == errno.EACCES:
        return f"this user may not listen on port {port}; set PORT to one from 1024 up."
    if error.errno == errno.EADDRNOTAVAIL:
        return f"the host '{host}' is not an address of this machine; set HOST to one."
    return f"nothing can listen on {host} port {port}: {error.strerror}."
