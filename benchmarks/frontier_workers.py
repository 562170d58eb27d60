"""The processes of frontier.py: those of a batch prepare side by side, then each measures while the others wait.

Most of a row's time goes into imports, weights and compilers. Doing that in parallel disturbs nobody, because no worker
of a batch measures before all of them are ready, and none prepares while one measures.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
NOTE_WIDTH = 240
LOG_LINES = 20
"""Of a failed worker, shown while the table goes on."""
READY, ANSWER, LOG = "ready", "answer.json", "log"
PAUSE = 0.05


class Worker:
    """A process that is given a folder: it leaves READY there, waits for its turn on standard input, leaves ANSWER.

    It writes to a file, not to a pipe: a compiler's helpers may outlive a worker that is stopped, and hold a pipe open.
    """

    def __init__(self, words: Sequence[str], folder: Path) -> None:
        self.folder = folder
        environment = {**os.environ, **OFFLINE}
        with Path(folder, LOG).open("w") as log:
            self.process = subprocess.Popen(
                [*words, str(folder)], stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment
            )

    def prepared(self, deadline: float) -> bool:
        """Wait until it is ready or has ended; whether that was before the deadline."""
        while not Path(self.folder, READY).exists() and self.process.poll() is None:
            if time.monotonic() > deadline:
                return False
            time.sleep(PAUSE)
        return True

    def answer(self, timeout: float) -> dict[str, Any]:
        """Let it measure: its figures, or how it ended without."""
        try:
            self.process.communicate(b"go\n", timeout)
            ending = f"The worker ended with status {self.process.returncode}"
        except subprocess.TimeoutExpired:
            ending = f"No answer within {timeout:g} s"
        self.stop()
        if Path(self.folder, ANSWER).exists():
            figures: dict[str, Any] = json.loads(Path(self.folder, ANSWER).read_text())
        else:
            last = self.lines()[-1:]
            figures = {"status": "failed", "note": shortened(": ".join([ending, *last]))}
        if figures.get("status") == "failed":
            print(*self.lines()[-LOG_LINES:], sep="\n", file=sys.stderr)
        return figures

    def lines(self) -> list[str]:
        return [line for line in Path(self.folder, LOG).read_text(errors="replace").splitlines() if line.strip()]

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def in_turn(commands: Sequence[Sequence[str]], timeout: float) -> Iterator[tuple[dict[str, Any], float]]:
    """The answer of each command, in their order, and the seconds it took to measure; all prepare at once."""
    with tempfile.TemporaryDirectory() as folder:
        workers = []
        try:
            for number, words in enumerate(commands):
                place = Path(folder, str(number))
                place.mkdir()
                workers.append(Worker(words, place))
            deadline = time.monotonic() + timeout
            for worker in workers:
                if not worker.prepared(deadline):
                    worker.stop()
            for worker in workers:
                start = time.monotonic()
                answer = worker.answer(timeout)
                yield answer, time.monotonic() - start
        finally:
            for worker in workers:
                worker.stop()


def serve(folder: Path, measure: Callable[[Callable[[], None]], dict[str, Any]]) -> None:
    """The other side: `measure` prepares, calls what it is given, and measures.

    The answer is written in one move, in case the process is stopped.
    """

    def ready() -> None:
        Path(folder, READY).touch()
        sys.stdin.readline()

    draft = Path(folder, "draft")
    draft.write_text(json.dumps(measure(ready)))
    draft.replace(Path(folder, ANSWER))


def shortened(text: str) -> str:
    """On one line that a table's notes have room for."""
    return textwrap.shorten(text, NOTE_WIDTH, placeholder=" …")
