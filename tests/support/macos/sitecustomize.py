"""Python as on macOS, as far as Linux can show it: with this folder on PYTHONPATH.

sys.platform is darwin, processes start by spawn, /proc and /dev/shm are not there, and neither
is what only Linux has in os, signal, socket and the C library. psutil still reads /proc: on
macOS it asks the system. What this does not show: macOS's own libraries and PyTorch's build.
"""

import builtins
import ctypes
import io
import os
import platform
import signal
import socket
import sys
import sysconfig
import urllib.request

import psutil

# They import the part for this system. sysconfig reads a file that is named after it.
assert psutil and urllib.request and sysconfig.get_config_vars()

ONLY_ON_LINUX = {
    os: (
        "sched_getaffinity sched_setaffinity pidfd_open memfd_create eventfd eventfd_read "
        "eventfd_write splice copy_file_range posix_fadvise posix_fallocate pipe2 setresuid "
        "setresgid getresuid prlimit EPOLLIN MFD_CLOEXEC"
    ),
    signal: "pidfd_send_signal sigtimedwait sigwaitinfo SIGPWR SIGSTKFLT",
    socket: "AF_PACKET AF_NETLINK AF_VSOCK SO_PEERCRED",
}
HIDDEN = ("/proc", "/dev/shm")


def _hide(module, name):
    original = getattr(module, name)

    def hidden(path=".", *arguments, **options):
        text = os.fspath(path) if isinstance(path, (str, bytes, os.PathLike)) else ""
        text = os.fsdecode(text)
        if any(text == folder or text.startswith(folder + "/") for folder in HIDDEN):
            asks = sys._getframe(1).f_globals.get("__name__", "")
            if not asks.startswith("psutil"):
                raise FileNotFoundError(2, "No such file or directory", text)
        return original(path, *arguments, **options)

    setattr(module, name, hidden)


class _CLibrary(ctypes.CDLL):
    def __getattr__(self, name):
        if self._name is None and name in ("prctl", "unshare", "setns", "mount"):
            raise AttributeError(f"{name}: symbol not found")
        return super().__getattr__(name)


for module, names in ONLY_ON_LINUX.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
for name in ("open", "stat", "lstat", "listdir", "scandir", "access"):
    _hide(os, name)
_hide(builtins, "open")
_hide(io, "open")
ctypes.CDLL = _CLibrary
# Before 10.9 ipykernel needs no package of macOS.
platform.mac_ver = lambda: ("10.8", ("", "", ""), "x86_64")
sys.platform = "darwin"
