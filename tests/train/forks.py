"""A copy of this process that does something of its own and ends: what would take seconds to start has been imported in it."""

import os
import select
import signal
import sys
import traceback
import warnings
from collections.abc import Callable


def in_a_fork(work: Callable[[], str], seconds: float = 60) -> tuple[int, str]:
    """The exit code of a process that does the work, and what the work returned.

    Waits until nobody is left, neither the process nor those that it has started.
    """
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of the threads there may be, which the copy does not need
        child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reading)
            os.write(writing, work().encode())
            code = 0
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)
    os.close(writing)
    said = b""
    try:
        while True:
            ready, _, _ = select.select([reading], [], [], seconds)
            assert ready, f"somebody is left after {seconds} s"
            part = os.read(reading, 65_536)
            if not part:
                break
            said += part
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        os.close(reading)
        status = os.waitpid(child, 0)[1]
    return os.waitstatus_to_exitcode(status), said.decode()
