"""What runs in a student's process: cells, then calls of functions, until the checks end it.

Nothing that this process says about itself is believed: it returns plain data, and what its
ranks send passes through the checks.
"""

import linecache
import queue
import sys
import threading
import traceback
import types
from typing import Any

from multigpu.exercise.channel import Channel, Closed
from multigpu.exercise.plain import NotPlain


def serve(channel: Channel, may_unpickle: bool) -> None:
    """Do what the messages say. Returns when the other side closes the channel."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    requests = None
    commands: queue.Queue[dict | None] = queue.Queue()
    answers: list[Any] = []

    def read() -> None:
        try:
            while True:
                message = channel.receive()
                if "number" in message:
                    answers[0].answer(message)
                else:
                    commands.put(message)
        except (Closed, NotPlain):
            commands.put(None)

    threading.Thread(target=read, daemon=True).start()
    while (message := commands.get()) is not None:
        reply: dict[str, Any] = {}
        try:
            if message["do"] == "run":
                _run(message["name"], message["source"], module)
            elif message["do"] == "load" and may_unpickle:
                _load(message["data"], module)
            elif message["do"] == "world":
                from multigpu.exercise.ranks import Requests, join_world

                requests = Requests(channel.send)
                answers.append(requests)
                join_world(message["rank"], message["size"], requests)
            elif message["do"] == "call":
                function = module.__dict__.get(message["function"])
                if function is None:
                    raise NameError(f"there is no {message['function']}")
                reply["value"] = function(*message["arguments"], **message["keywords"])
        except BaseException as error:
            reply = {"error": _describe(error)}
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            channel.send({"reply": reply})
        except NotPlain as error:
            channel.send({"reply": {"error": {"type": "NotPlain", "text": str(error), "lines": []}}})
        except Closed:
            return


def _run(name: str, source: str, module: types.ModuleType) -> None:
    filename = f"<{name}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    exec(compile(source, filename, "exec"), module.__dict__)


def _load(data: Any, module: types.ModuleType) -> None:
    import cloudpickle

    module.__dict__.update(cloudpickle.loads(data.numpy().tobytes()))


def _describe(error: BaseException) -> dict[str, Any]:
    """The error as plain data: type, text, and the lines of cells that it passed through."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename.startswith("<")]
    lines = [f"{frame.filename[1:-1]}, line {frame.lineno}: {frame.line}" for frame in own]
    if isinstance(error, SyntaxError) and error.filename and error.filename.startswith("<"):
        lines.append(f"{error.filename[1:-1]}, line {error.lineno}: {(error.text or '').strip()}")
    return {"type": type(error).__name__, "text": str(error)[:2000], "lines": lines[-5:]}
