"""What runs in a student's process: cells, then calls of functions, until the checks end it.

Nothing that this process says about itself is believed: it returns plain data, and what its
ranks send passes through the checks.
"""

import os
import queue
import sys
import threading
import traceback
import types
from typing import Any

import torch

from multigpu.exercise.channel import Channel, Closed
from multigpu.exercise.given import Given, run_cell
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
            reply = _do(commands.get(), requests, given)
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


def _do(message: dict, requests: Requests, given: Given) -> dict[str, Any]:
    if message["do"] == "run":
        if message["given"]:
            given.run(message["name"], message["source"])
        else:
            run_cell(message["name"], message["source"], given.answer)
    elif message["do"] == "world":
        join_world(message["rank"], message["size"], requests)
    elif message["do"] == "call":
        function = given.find(message["function"])
        value = function(*message["arguments"], **message["keywords"])
        if requests.failed is not None:
            raise requests.failed
        return {"value": value}
    elif message["do"] == "value":
        return {"value": given.find(message["name"])}
    return {}


def _describe(error: BaseException) -> dict[str, Any]:
    """The error as plain data: type, text, and the lines of cells that it passed through."""
    frames = traceback.extract_tb(error.__traceback__)
    cell_frames = [frame for frame in frames if frame.filename.startswith("<")]
    lines = [
        f"{frame.filename[1:-1]}, line {frame.lineno}: {frame.line}" for frame in cell_frames
    ]
    if isinstance(error, SyntaxError) and error.filename and error.filename.startswith("<"):
        text = (error.text or "").strip()
        lines.append(f"{error.filename[1:-1]}, line {error.lineno}: {text}")
    try:
        text = str(error)[:2000]
    except Exception as problem:
        text = f"its __str__ raised {type(problem).__name__}"
    return {"type": type(error).__name__, "text": text, "lines": lines[-5:]}
