"""What encryption costs: calls per second on SQLite, submitted and drained, with keys and without, side by side.

python -m benchmarks.encryption [calls] [rounds]
"""

from __future__ import annotations

import base64
import statistics
import sys
import tempfile
import time

from holdfast import App

KEYS = {"encryption_keys": f"k1:{base64.b64encode(b'1' * 32).decode()}"}


def rate(calls: int, size: int, **settings: str) -> float:
    """Return how many calls per second are submitted and run."""
    with tempfile.TemporaryDirectory() as folder, App(f"sqlite:///{folder}/b.db", name="bench", **settings) as app:

        @app.task(name="echo")
        async def echo(text: str) -> str:
            return text

        began = time.perf_counter()
        sent = echo.map(["x" * size] * calls)
        with app.runner(concurrency=100):
            for call in sent:
                call.result(timeout=300)
        return calls / (time.perf_counter() - began)


def main(calls: int = 3000, rounds: int = 5) -> None:
    for size in (100, 20_000):
        pairs = [(rate(calls, size), rate(calls, size, **KEYS)) for _ in range(rounds)]
        plain, sealed = (statistics.median(each) for each in zip(*pairs, strict=True))
        ratio = statistics.median(sealed / plain for plain, sealed in pairs)
        print(f"{size:>6} bytes: {plain:7.0f}/s in the clear, {sealed:7.0f}/s encrypted, ratio {ratio:.2f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
