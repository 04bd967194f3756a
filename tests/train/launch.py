"""Runs training commands on several processes of this machine, as torchrun does, but as forks that need no time to start.

    python tests/train/launch.py NUM_PROCESSES CONFIG key=value ... [-- NUM_PROCESSES CONFIG key=value ...]

Ends with the first exit code that is not 0, after ending the other processes.
"""

import gc
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from matplotlib.figure import Figure

from tests.train.pictures import leave_undrawn

looked_for_garbage = gc.isenabled()
gc.disable()  # a start takes a fifth less, and what is frozen is not copied by the forks
from train.__main__ import main as train  # noqa: E402

if looked_for_garbage:
    gc.freeze()
    gc.enable()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def fork_training(arguments: list[str], first: Callable[[], None] = lambda: None) -> int:
    """The process that does something first and then trains, without pictures; its exit code is that of the command."""
    child = os.fork()
    if child:
        return child
    Figure.savefig = leave_undrawn  # type: ignore[method-assign]
    code = 1
    try:
        first()
        code = train(arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def take_rank(rank: int, num_processes: int, port: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_processes)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(num_processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def launch(num_processes: int, arguments: list[str]) -> int:
    port = free_port()
    running = {fork_training(arguments, partial(take_rank, rank, num_processes, port)) for rank in range(num_processes)}
    result = 0
    while running:
        child, status = os.wait()
        running.discard(child)
        code = os.waitstatus_to_exitcode(status)
        if code and not result:
            result = code
            for other in running:
                os.kill(other, signal.SIGKILL)
    return result


def commands(words: list[str]) -> list[list[str]]:
    """What stands between the words `--`."""
    found: list[list[str]] = [[]]
    for word in words:
        if word == "--":
            found.append([])
        else:
            found[-1].append(word)
    return found


if __name__ == "__main__":
    for num_processes, *arguments in commands(sys.argv[1:]):
        if code := launch(int(num_processes), arguments):
            sys.exit(code)
