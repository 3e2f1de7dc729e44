"""What runs in a student's process: cells, then calls of functions, until the checks end it.

Nothing that this process says about itself is believed: it returns plain data, and what its
ranks send passes through the checks.
"""

import linecache
import os
import queue
import sys
import threading
import traceback
import types
from typing import Any

import torch

from multigpu.exercise.channel import Channel, Closed
from multigpu.exercise.plain import NotPlain
from multigpu.exercise.ranks import Requests, join_world


def serve(channel: Channel) -> None:
    """Do what the messages say. The process ends when the other side closes the channel."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    requests = Requests(channel.send)
    given = Given(module.__dict__)
    commands: queue.Queue[dict] = queue.Queue()

    def read() -> None:
        try:
            while True:
                message = channel.receive()
                if "number" in message:
                    requests.answer(message)
                else:
                    commands.put(message)
        except (Closed, NotPlain):
            # The checks have ended this process. Its code may wait for an answer.
            os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    torch.manual_seed(0)
    # After a fork, torch makes its pool of threads anew when a thread first needs it. Threads
    # that start together, as those of DataParallel, fail there now and then: "Invalid thread
    # pool!". Here one thread makes it, before the student's code starts any.
    torch.set_num_threads(1)
    while True:
        try:
            reply = _do(commands.get(), module, requests, given)
        except BaseException as error:
            reply = {"error": _describe(error)}
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            channel.send({"reply": reply})
        except Closed:
            return
        except Exception as error:  # NotPlain, or one of a class of the answer's own
            channel.send({"reply": {"error": _describe(error)}})


class GivenChanged(Exception):
    """The answer has replaced or changed what is given, which a check relies on."""


class Given:
    """What the cells that are given define: functions, classes, modules, values.

    A check that calls a given function relies on it, and on all that it calls. An answer that
    gives one of these names to something else, or that changes a given function or class, is
    refused: the check believes no word of it.
    """

    def __init__(self, names: dict[str, Any]):
        self.names = names
        self.kept: dict[str, list[Any]] = {}

    def keep(self) -> None:
        """Note what there is now."""
        # An answer's docstring becomes the module's.
        own = {name for name in self.names if not name.startswith("__")}
        self.kept = {name: _marks(self.names[name]) for name in own}

    def check(self) -> None:
        """Raise GivenChanged if something is not what it was."""
        for name, marks in self.kept.items():
            if [*map(id, marks)] != [*map(id, _marks(self.names.get(name)))]:
                raise GivenChanged(f"it changes {name}, which is given: leave it as it is")


def _marks(value: Any) -> list[Any]:
    """The object, and what makes up a function or a class."""
    if isinstance(value, types.FunctionType):
        return [value, value.__code__, value.__defaults__, value.__kwdefaults__]
    if isinstance(value, type):
        own = [each for each in vars(value).values() if isinstance(each, types.FunctionType)]
        return [value, *(mark for method in own for mark in _marks(method))]
    return [value]


def _do(
    message: dict, module: types.ModuleType, requests: Requests, given: Given
) -> dict[str, Any]:
    names = module.__dict__
    if message["do"] == "run":
        _run(message["name"], message["source"], module)
        if message["given"]:
            given.keep()
    elif message["do"] == "world":
        join_world(message["rank"], message["size"], requests)
    elif message["do"] == "call":
        given.check()
        function = _named(names, message["function"])
        value = function(*message["arguments"], **message["keywords"])
        given.check()
        if requests.failed is not None:
            raise requests.failed
        return {"value": value}
    elif message["do"] == "value":
        return {"value": _named(names, message["name"])}
    return {}


def _named(names: dict[str, Any], name: str) -> Any:
    if name not in names:
        raise NameError(f"the answer does not define {name}")
    return names[name]


def _run(name: str, source: str, module: types.ModuleType) -> None:
    filename = f"<{name}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    exec(compile(source, filename, "exec"), module.__dict__)


def _describe(error: BaseException) -> dict[str, Any]:
    """The error as plain data: type, text, and the lines of cells that it passed through."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename.startswith("<")]
    lines = [f"{frame.filename[1:-1]}, line {frame.lineno}: {frame.line}" for frame in own]
    if isinstance(error, SyntaxError) and error.filename and error.filename.startswith("<"):
        text = (error.text or "").strip()
        lines.append(f"{error.filename[1:-1]}, line {error.lineno}: {text}")
    try:
        text = str(error)[:2000]
    except Exception as problem:
        text = f"its __str__ raised {type(problem).__name__}"
    return {"type": type(error).__name__, "text": text, "lines": lines[-5:]}
