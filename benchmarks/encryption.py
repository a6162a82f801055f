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


def rate(calls: int, size: int, **settings: str) -> tuple[float, float]:
    """Return how many calls per second are submitted and run, by the clock and by the time of the processor."""
    with tempfile.TemporaryDirectory() as folder, App(f"sqlite:///{folder}/b.db", name="bench", **settings) as app:

        @app.task(name="echo")
        async def echo(text: str) -> str:
            return text

        began, worked = time.perf_counter(), time.process_time()
        sent = echo.map(["x" * size] * calls)
        with app.runner(concurrency=100):
            for call in sent:
                call.result(timeout=300)
        return calls / (time.perf_counter() - began), calls / (time.process_time() - worked)


def main(calls: int = 3000, rounds: int = 5) -> None:
    for size in (100, 20_000):
        pairs = [(rate(calls, size), rate(calls, size, **KEYS)) for _ in range(rounds)]
        for number, what in enumerate(("by the clock", "by the processor")):
            plain, sealed = (statistics.median(each[number] for each in runs) for runs in zip(*pairs, strict=True))
            ratio = statistics.median(sealed[number] / plain[number] for plain, sealed in pairs)
            print(f"{size:>6} bytes, {what}: {plain:.0f}/s in the clear, {sealed:.0f}/s encrypted, ratio {ratio:.2f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
