"""`holdfast`, killed once: a command for programs that start a server of their own.

The first server of each program dies by SIGKILL at a moment that MORTAL_SEED chooses, up to 1.5 s after it listens.
MORTAL_FOLDER keeps who has died.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from pathlib import Path

LONGEST_LIFE_SECONDS = 1.5


def main() -> int:
    is_mortal = first_of(os.getppid())
    with subprocess.Popen([Path(sys.executable).parent / "holdfast", *sys.argv[1:]], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        sys.stdout.buffer.write(server.stdout.readline())
        sys.stdout.buffer.flush()
        death = threading.Timer(life(), server.kill)
        if is_mortal:
            death.start()
        code = server.wait()
        death.cancel()
    return code if code >= 0 else 128 - code


def first_of(program: int) -> bool:
    """Return whether this is the first server of a program, and note that it is."""
    try:
        (Path(os.environ["MORTAL_FOLDER"]) / str(program)).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def life() -> float:
    """Return how long it lives: programs start in the same order with each seed."""
    number = sum(1 for _ in Path(os.environ["MORTAL_FOLDER"]).iterdir())
    return random.Random(f"{os.environ['MORTAL_SEED']}/{number}").uniform(0, LONGEST_LIFE_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
