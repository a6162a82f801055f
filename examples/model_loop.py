"""A loop of a language model that streams its tokens, and survives ``kill -9`` in the middle of a sentence.

Run it: ``python -m examples.model_loop``. It starts a runner, follows the answer token by token, kills the runner in
mid-sentence, and starts another one. The reader goes on, and is told which words are void.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

from holdfast import App, Invocation, stream

app = App(name="model-loop")

THOUGHTS = {
    "how far is the moon?": "I do not know it by heart . I will look it up .",
    "moon: 384,400 km": "The moon is about 384,400 km away . That is thirty Earths in a row .",
}
SECONDS = 0.05  # for each token


@app.step(retries=3)
async def think(prompt: str) -> str:
    """Ask the model. Its tokens are shown as they come."""
    tokens = THOUGHTS[prompt].split()
    for token in tokens:
        await stream("tokens").write(token)
        await asyncio.sleep(SECONDS)
    return " ".join(tokens)


@app.step(retries=3)
async def look_up(what: str) -> str:
    """Use a tool."""
    return f"{what}: 384,400 km"


@app.workflow
async def ask(question: str) -> str:
    """Think, use a tool, think again: each step is recorded, so a crash repeats at most the one that ran."""
    answer = await think(question)
    if "look it up" in answer:
        answer = await think(await look_up("moon"))
    return answer


def runner() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "holdfast", "run", "examples.model_loop:app", "--workers", "0"]
    quick = {"HOLDFAST_RUNNER_HEARTBEAT_SECONDS": "0.3", "HOLDFAST_RUNNER_CONSIDERED_DEAD_AFTER_MINUTES": "3s"}
    return subprocess.Popen(command, env=os.environ | quick, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def show(run: Invocation[str]) -> list[str]:
    """Print tokens as a page would, and kill the runner once in mid-sentence. Return what stands there in the end."""
    alive, shown = runner(), list[str]()
    try:
        has_struck, sentence = False, 0
        for chunk in run.stream("tokens"):
            if chunk.is_restart:
                del shown[sentence:]  # what the dead worker said of this answer is void
                print(f"\n[{chunk.step} starts over, attempt {chunk.attempt}]")
                continue
            if chunk.step == "think#2" and sentence == 0:
                sentence = len(shown)
            shown.append(chunk.value)
            print(chunk.value, end=" ", flush=True)
            if not has_struck and chunk.step == "think#2" and len(shown) == sentence + 5:
                has_struck = True
                os.kill(alive.pid, signal.SIGKILL)
                alive.wait()
                alive = runner()
        print()
    finally:
        alive.terminate()
        alive.wait()
    return shown


def main() -> None:
    question = "how far is the moon?"
    run = ask.submit(question)
    shown = show(run)
    answer = run.result(timeout=60)
    print(answer)
    assert " ".join(shown) == " ".join(THOUGHTS.values())
    assert answer == THOUGHTS["moon: 384,400 km"]


if __name__ == "__main__":
    main()
