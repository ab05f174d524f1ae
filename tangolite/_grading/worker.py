"""Computer algebra in a process of its own that can be killed: both ends of the pipe.

Algebra on a model's output may run for ever, and Python cannot stop a thread. So math-verify (with its own
timeouts off: they use `signal.alarm`, which works in the main thread of a POSIX program only) runs in a child
process, asked over pipes, one JSON object a line. This file is both the client (`Worker`) and, run as a
script, the child; only the child imports sympy. The child is started by file name, so it never imports the
package, nor the user's script.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import subprocess
import sys
import threading
import time

STARTUP_SECONDS = 120.0  # sympy takes one or two to import; a starved machine takes far longer
MEMORY_BYTES = 4 << 30  # where the system can limit it

logger = logging.getLogger(__name__)


class Worker:
    """A child process that answers one request at a time; safe from any thread; started when first needed.

    `script` is a file whose `serve` loop answers requests. After a timeout the child is killed and another
    takes its place; `restarts` counts these and deaths. After `fork` a process starts a child of its own.
    """

    def __init__(self, script: str = __file__, *arguments: str):
        self.script, self.arguments = script, arguments
        self.restarts = 0
        self.broken = False
        self._forget()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget_inherited)

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        self._replies: queue.SimpleQueue = queue.SimpleQueue()
        self._ready = False
        self._pid = os.getpid()

    def _forget_inherited(self) -> None:
        """In a forked process: the child belongs to the parent.

        Close our copies of its pipes, or it would never see that the parent has gone; keep the object, whose
        destructor would complain of a process that is not ours.
        """
        self._inherited = self._process
        if self._process is not None:
            for pipe in (self._process.stdin, self._process.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()
        self.restarts = 0
        self._forget()

    def ask(self, request: dict, timeout: float) -> tuple[dict | None, float]:
        """The reply to a request and the seconds that it took; (None, seconds) after a timeout or a death.

        Waiting for other threads and for the child to start does not count as time of this request.
        """
        if self._pid != os.getpid():
            self._forget_inherited()
        with self._lock:
            try:
                for _ in range(2):  # once more if the child was found dead
                    if not self._started():
                        return None, 0.0
                    begun = time.monotonic()
                    reply = self._exchange(request, timeout)
                    seconds = time.monotonic() - begun
                    if reply is not None:
                        return reply, seconds
                    self.restarts += 1
                    self._kill()
                    if seconds > 0.9 * timeout:
                        self._start()  # imports while the caller goes on
                        return None, seconds
                return None, seconds
            except BaseException:  # an interrupt would leave a reply in the pipe for the next request
                self._kill()
                raise

    def _exchange(self, request: dict, timeout: float) -> dict | None:
        try:
            data = json.dumps(request).encode("ascii") + b"\n"
            while data:  # a signal may cut a write short
                data = data[self._process.stdin.write(data) :]
        except OSError:
            return None
        return self._receive(timeout)

    def _receive(self, timeout: float) -> dict | None:
        try:
            line = self._replies.get(timeout=max(0.0, timeout))
            return json.loads(line) if line else None
        except (queue.Empty, ValueError):
            return None

    def _started(self) -> bool:
        if self.broken:
            return False
        if self._process is not None and self._process.poll() is not None:  # died since
            self.restarts += 1
            self._kill()
        if self._process is None and not self._start():
            return False
        if not self._ready:
            hello = self._receive(STARTUP_SECONDS)
            self._ready = bool(hello and hello.get("ready"))
            if not self._ready:
                self.broken = hello is not None
                logger.error("The answer checker did not start (%s): only simple answers are graded.", hello)
                self._kill()
        return self._ready

    def _start(self) -> bool:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "PYTHONHASHSEED": "0",
        }
        for name in ("PYTHONWARNINGS", "PYTHONINSPECT"):  # not meant for this child
            environment.pop(name, None)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", self.script, *self.arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                env=environment,
                creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
            )
            self._replies = queue.SimpleQueue()
            listen = threading.Thread(
                target=_listen,
                args=(self._process.stdout, self._replies),
                name="grading-replies",
                daemon=True,
            )
            listen.start()
        except (OSError, RuntimeError, ValueError) as problem:  # no processes, or the interpreter is closing
            logger.error("The answer checker cannot be started: %s", problem)
            self._kill()
            return False
        return True

    def _kill(self) -> None:
        process, self._process, self._ready = self._process, None, False
        if process is None:
            return
        with contextlib.suppress(OSError):
            process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired, OSError):
            process.wait(timeout=5)
        with contextlib.suppress(OSError):
            process.stdin.close()

    def close(self) -> None:
        """End the child process, if this process started one. The next request starts another."""
        if self._pid == os.getpid():
            self._kill()


def _listen(pipe, replies: queue.SimpleQueue) -> None:
    """Hand on the child's lines; an empty one says that it has died."""
    with contextlib.suppress(OSError, ValueError):
        buffer = b""
        while chunk := pipe.read(65536):
            *lines, buffer = (buffer + chunk).split(b"\n")
            for line in lines:
                replies.put(line)
    replies.put(b"")
    with contextlib.suppress(OSError):
        pipe.close()


# --- the child ---


def serve(prepare) -> None:
    """Answer requests until the pipe closes. `prepare()` imports and returns the function that answers."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    out, sys.stdout = sys.stdout.buffer, open(os.devnull, "w")  # noqa: SIM115  (what libraries print goes nowhere)
    requests: queue.SimpleQueue = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin.buffer:
            requests.put(line)
        os._exit(0)  # the parent has gone: stop even in the middle of a computation

    def send(reply: dict) -> None:
        out.write(json.dumps(reply).encode("ascii") + b"\n")
        out.flush()

    threading.Thread(target=listen, daemon=True).start()
    with contextlib.suppress(Exception):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    try:
        answer = prepare()
    except Exception as problem:
        send({"ready": False, "problem": repr(problem)})
        return
    send({"ready": True})
    while True:
        request = json.loads(requests.get())
        try:
            send(answer(request))
        except Exception as problem:
            send({"match": False, "reason": f"algebra failed: {type(problem).__name__}"})


def _algebra():
    """Load the neighbour by its path: as a script this file belongs to no package."""
    import importlib.util

    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "algebra.py")
    spec = importlib.util.spec_from_file_location("_grading_algebra", path)
    algebra = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(algebra)
    return lambda request: algebra.compare(request["gold"], request["answer"])


if __name__ == "__main__":
    serve(_algebra)
