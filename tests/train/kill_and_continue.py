"""Runs training commands one after the other, kills each at random moments, and starts it again until it ends by itself.

    python tests/train/kill_and_continue.py NUM_KILLS SEED LATEST CONFIG key=value ... [-- NUM_KILLS SEED LATEST CONFIG ...]

Each attempt is a fork of this process, which has imported everything: a start then takes no time. Moments are drawn so that a
share of them lies inside a save, before LATEST things have reached the disk. Prints one line an attempt: how it ended, and where
it was killed.
"""

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.train.launch import commands, fork_training
from train import checkpoint


def killed_in_a_save(rng: random.Random, latest: int) -> None:
    """At the n-th time that something of a checkpoint reaches the disk, or its folder gets its name."""
    left = rng.randrange(1, latest)

    def count_down(name: str) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            print(f"in a save, at {name}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    for module, name in ((checkpoint, "save_file"), (checkpoint, "flush"), (os, "replace")):
        original = getattr(module, name)

        def dying(*arguments: object, original=original, name=name) -> object:  # type: ignore[no-untyped-def]
            before = random.Random(left).random() < 0.5
            if before:
                count_down(name)
            result = original(*arguments)
            if not before:
                count_down(name)
            return result

        setattr(module, name, dying)


def killed_at_any_time(rng: random.Random) -> None:
    """After some computing time, so that a busy machine gets as far as an idle one."""
    end = time.process_time() + rng.uniform(0.0, 1.0)

    def strike() -> None:
        while time.process_time() < end:
            time.sleep(0.002)
        print("at any time", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=strike, daemon=True).start()


def attempt(arguments: list[str], kill: Callable[[], None] = lambda: None) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(fork_training(arguments, kill), 0)[1])


def kill_and_continue(num_kills: int, seed: int, latest: int, arguments: list[str]) -> int:
    rng, kills = random.Random(seed), 0
    while kills < num_kills:
        kill = partial(killed_in_a_save, latest=latest) if rng.random() < 0.4 else killed_at_any_time
        end = attempt(arguments, partial(kill, random.Random(rng.random())))
        print(f"end {end}", flush=True)
        if end == 0:
            break  # it was quicker than we
        if end != -signal.SIGKILL:
            return 1
        kills += 1
    print(f"kills {kills}", flush=True)
    return attempt(arguments)


if __name__ == "__main__":
    for num_kills, seed, latest, *arguments in commands(sys.argv[1:]):
        if code := kill_and_continue(int(num_kills), int(seed), int(latest), arguments):
            sys.exit(code)
