"""Hosts with networks of their own, and cables between them that lose, delay and drop packets when they are told to.

A host is a network namespace, a cable a pair of TUN devices whose packets this process carries. Nothing of it has a
name on the machine: all of it is gone when the test process ends, however it ends. Needs root and /dev/net/tun.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import functools
import os
import random
import socket
import struct
import sys
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, TypeVar

T = TypeVar("T")

# <linux/sched.h>, <linux/if_tun.h>, <linux/sockios.h>, <linux/if.h>
_CLONE_NEWNET: Final = 0x40000000
_TUNSETIFF: Final = 0x400454CA
_IFF_TUN_NO_PI: Final = 0x1001
_SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFDSTADDR, _SIOCSIFNETMASK = 0x8914, 0x8916, 0x8918, 0x891C
_IFF_UP_RUNNING: Final = 0x41

_PACKETS_AT_ONCE: Final = 64
_MAX_PACKET_BYTES: Final = 65_536


class Host:
    """A network namespace; what is started by `command` sees no other network."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.namespace = _in_thread(_new_namespace)
        self._devices = 0
        self._listening: list[socket.socket] = []

    def command(self, *arguments: str) -> tuple[str, ...]:
        """Return a command that runs another on this host."""
        return ("nsenter", f"--net=/proc/{os.getpid()}/fd/{self.namespace}", *arguments)

    def inside(self, function: Callable[[], T]) -> T:
        """Call a function in a thread on this host; sockets and devices that it opens stay there."""

        def entered() -> T:
            _checked(_LIBC.setns(self.namespace, _CLONE_NEWNET))
            return function()

        return _in_thread(entered)

    async def reaches(self, address: str, port: int, *, within_s: float = 0.7) -> bool:
        """Return whether a process of this host can open a connection."""
        program = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), float(sys.argv[3]))"
        arguments = (sys.executable, "-S", "-c", program, address, str(port), str(within_s))
        process = await asyncio.create_subprocess_exec(*self.command(*arguments), stderr=asyncio.subprocess.PIPE)
        _, said = await process.communicate()
        assert process.returncode == 0 or b"Error: " in said, said.decode()
        return process.returncode == 0

    def listen(self, address: str, port: int) -> None:
        """Accept connections until the host is closed, and say nothing."""
        self._listening.append(self.inside(lambda: socket.create_server((address, port))))

    def open_device(self, address: str, peer: str, netmask: str) -> int:
        """Make a network device and return the descriptor that its packets come from and go to."""
        name = f"cable{self._devices}".encode()
        self._devices += 1

        def opened() -> int:
            device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name, _IFF_TUN_NO_PI))
            with socket.socket() as control:
                for request, value in ((_SIOCSIFADDR, address), (_SIOCSIFDSTADDR, peer), (_SIOCSIFNETMASK, netmask)):
                    fcntl.ioctl(control, request, _address_request(name, value))
                fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH22x", name, _IFF_UP_RUNNING))
            return device

        return self.inside(opened)

    def close(self) -> None:
        """Give the namespace up; it ends with its last process."""
        for listening in self._listening:
            listening.close()
        os.close(self.namespace)


class NearHost(Host):
    """Where namespaces are not permitted: this machine."""

    def __init__(self, name: str) -> None:
        self.name = name

    def command(self, *arguments: str) -> tuple[str, ...]:
        return arguments

    def inside(self, function: Callable[[], T]) -> T:
        return function()

    def close(self) -> None:
        """Nothing is held."""


@functools.cache
def are_namespaces_permitted() -> bool:
    """Return whether this process may make hosts and cables; else say why not."""
    try:
        left, right = Host("left"), Host("right")
        Cable(left, "10.77.0.1", right, "10.77.0.2").close()
    except OSError as error:
        sys.stderr.write(f"no network namespaces here, a TCP proxy stands for the network: {error}\n")
        return False
    left.close()
    right.close()
    return True


class Cable:
    """Connects two hosts and nothing else. Carries packets while the loop runs that it was plugged in on."""

    def __init__(self, left: Host, left_address: str, right: Host, right_address: str, *, seed: int = 1) -> None:
        # The host at the right sends everything into the cable, as one would that tries every way out; the one at the
        # left has several cables and must not forward between them.
        self._left = left.open_device(left_address, right_address, "255.255.255.255")
        self._right = right.open_device(right_address, left_address, "255.0.0.0")
        self._toward = {left.name: self._left, right.name: self._right}
        self._random = random.Random(seed)
        self._dropped_toward: set[int] = set()
        self.loss = 0.0
        """Share of the packets that are lost, in either direction."""
        self.delay_s = 0.0
        """What each packet takes, in either direction."""
        self.carried = self.lost = 0
        """Packets."""

    def cut(self, *, toward: str | None = None) -> None:
        """Drop every packet, or only those toward one host."""
        self._dropped_toward = set(self._toward.values()) if toward is None else {self._toward[toward]}

    def mend(self) -> None:
        """Carry packets again."""
        self._dropped_toward = set()

    @asynccontextmanager
    async def plugged_in(self) -> AsyncIterator[None]:
        """Carry packets while the block runs."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._left, self._carry, self._left, self._right)
        loop.add_reader(self._right, self._carry, self._right, self._left)
        try:
            yield
        finally:
            for device in (self._left, self._right):
                loop.remove_reader(device)
            self.close()

    def close(self) -> None:
        """Take the devices away."""
        for device in (self._left, self._right):
            os.close(device)
        self._toward = {}

    def _carry(self, source: int, target: int) -> None:
        for _ in range(_PACKETS_AT_ONCE):
            try:
                packet = os.read(source, _MAX_PACKET_BYTES)
            except BlockingIOError:
                return
            if target in self._dropped_toward or self._random.random() < self.loss:
                self.lost += 1
            elif self.delay_s:
                asyncio.get_running_loop().call_later(self.delay_s, self._deliver, target, packet)
            else:
                self._deliver(target, packet)

    def _deliver(self, target: int, packet: bytes) -> None:
        if target in self._toward.values():
            self.carried += 1
            os.write(target, packet)


_LIBC: Final = ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{os.strerror(number)}: hosts need root and network namespaces")


def _new_namespace() -> int:
    _checked(_LIBC.unshare(_CLONE_NEWNET))
    with socket.socket() as control:
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", _IFF_UP_RUNNING))
    # A namespace may inherit it from the machine, and a router between the hosts is what must not be.
    forwarding = Path("/proc/sys/net/ipv4/ip_forward")
    if forwarding.read_text().strip() != "0":
        forwarding.write_text("0")
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _address_request(name: bytes, address: str) -> bytes:
    return struct.pack("16sHH4s16x", name, socket.AF_INET, 0, socket.inet_aton(address))


def _in_thread(function: Callable[[], T]) -> T:
    # A thread of its own: the namespace is an attribute of the thread, and ends with it.
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(function).result()
