"""Ties a process to its parent's life, so that a killed launcher leaves no orphan. Linux only.

As a program (`python -m branchline.cli.parent PID COMMAND…`) it ties itself and becomes COMMAND, to which the
terminal's signals are blocked: they go to the whole process group, and the parent alone acts on them.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.5


def follow(pid: int) -> None:
    """Die when `pid` does: by the kernel if it is our parent, else by looking twice a second."""
    if os.getppid() == pid:
        _bind()
        if os.getppid() == pid:
            return
    if not _is_alive(pid):
        os._exit(1)
    threading.Thread(target=_poll, args=(pid,), name="parent-watch", daemon=True).start()


def _bind() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


def _poll(pid: int) -> None:
    while _is_alive(pid):
        time.sleep(_POLL_S)
    os._exit(1)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _main() -> None:
    pid, *command = sys.argv[1:]
    _bind()  # survives exec
    if os.getppid() != int(pid):
        sys.exit(1)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})  # so does this
    os.execv(command[0], command)


if __name__ == "__main__":
    _main()
