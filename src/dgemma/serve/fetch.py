"""Pictures from the web, for `dgemma serve --fetch-images`: from public addresses only, bounded in bytes and seconds.

A client could otherwise read what only this machine reaches. So a name is looked up once, all of its addresses must be
public, and the connection goes to one of these. A redirect would need the same checks, and is not followed.
"""

import http.client
import ipaddress
import socket
import ssl
import threading
import time
from urllib.parse import urlsplit

_MOST_BYTES = 16 << 20
_SECONDS = 10.0
_GATEWAYS = [ipaddress.ip_network(each) for each in ("64:ff9b::/96", "2002::/16")]  # lead to any IPv4 address


def fetch(url: str) -> bytes:
    """Return the content of an http or https URL; raise ValueError if it is not public, too large or too slow."""
    end = time.monotonic() + _SECONDS
    try:
        parts = urlsplit(url)
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
        host = parts.hostname or ""
        connection = http.client.HTTPConnection(host, port)
        connection.sock = socket.create_connection((_public_address(host, port), port), timeout=_SECONDS)
        # The timeout is that of one packet, and a server may send its answer byte by byte. TLS takes the socket over.
        line = connection.sock.dup()
        alarm = threading.Timer(max(0.0, end - time.monotonic()), line.shutdown, [socket.SHUT_RDWR])
        alarm.start()
        try:
            if parts.scheme == "https":
                connection.sock = ssl.create_default_context().wrap_socket(connection.sock, server_hostname=host)
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            connection.request("GET", target, headers={"Accept": "image/*", "User-Agent": "dgemma"})
            return _read(connection.getresponse(), end)
        finally:
            alarm.cancel()
            connection.close()
            line.close()
    except KeyError:
        raise ValueError("its scheme is neither http nor https") from None
    except (OSError, http.client.HTTPException, UnicodeError) as error:
        raise ValueError(f"it could not be fetched ({type(error).__name__})") from None


def _public_address(host: str, port: int) -> str:
    """Look a name up, and return its first address if all are public."""
    found = [str(place[4][0]) for place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    addresses = [ipaddress.ip_address(address.partition("%")[0]) for address in found]
    if not all(address.is_global and not any(address in gateway for gateway in _GATEWAYS) for address in addresses):
        raise ValueError("its address is not public")
    return found[0]


def _read(response: http.client.HTTPResponse, end: float) -> bytes:
    if response.status != 200:
        raise ValueError(f"its server answered {response.status}")
    data = response.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES >> 20} MiB")
    if time.monotonic() > end:
        raise ValueError(f"it took more than {_SECONDS:.0f} s")
    return data
