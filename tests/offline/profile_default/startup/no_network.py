"""Run by every notebook kernel of `make test` (IPYTHONDIR=tests/offline): nothing leaves this machine.

A notebook that asks for the network fails here at once, and not only in the classroom that has none.
"""

import socket


def _here_only(connect):
    def checked(self, address):
        host = address[0] if isinstance(address, tuple) else "127.0.0.1"  # a path is a socket of this machine
        if self.family in (socket.AF_INET, socket.AF_INET6) and host not in ("127.0.0.1", "::1", "localhost"):
            raise OSError(f"a notebook asked for {host}, and the course runs without a network")
        return connect(self, address)

    return checked


socket.socket.connect = _here_only(socket.socket.connect)
socket.socket.connect_ex = _here_only(socket.socket.connect_ex)
