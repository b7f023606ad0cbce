"""The TCP sockets of this process, by their inodes.

Asked of the sockets themselves: the kernel's table of connections is not read at one moment.
"""

import contextlib
import os
import socket

__all__ = ["congestion_controls", "connected", "listening"]


def _opened():
    """(inode, socket) of each TCP socket of IPv4 and IPv6, open until the next one."""
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, as that of the listing itself
            if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(descriptor))) as one:
                if one.type == socket.SOCK_STREAM and one.family != socket.AF_UNIX:
                    yield os.fstat(one.fileno()).st_ino, one


def listening():
    """{inode: (address, port)} of those on which this process listens."""
    return {
        inode: one.getsockname()[:2]
        for inode, one in _opened()
        if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    }


def congestion_controls():
    """{inode: the name of what controls its congestion} of those that are connected."""
    found = {}
    for inode, one in _opened():
        with contextlib.suppress(OSError):  # it listens, or has lost its peer
            one.getpeername()
            name = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
            found[inode] = name.rstrip(b"\0").decode()
    return found


def connected():
    """{inode: (port here, port there)} of those that are connected."""
    found = {}
    for inode, one in _opened():
        with contextlib.suppress(OSError):  # it listens, or has lost its peer
            found[inode] = one.getsockname()[1], one.getpeername()[1]
    return found
