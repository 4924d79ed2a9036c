"""A small server with OpenAI's chat API, over real HTTP, which misbehaves when it is told to.

Imported by test_endpoint.py. A question is the last user turn; what `faults` holds for it is done
one fault a request, and then it is answered: `answer to QUESTION`, one token a word.
"""

import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HANG = "hang"
CUT = "cut"
"""half of the body, then the connection is closed"""


@dataclass(kw_only=True)
class Fault:
    """A response instead of the usual one."""

    status: int = 200
    body: Any = None
    """bytes as they are, others as JSON"""
    headers: dict[str, str] = field(default_factory=dict)


def completion(content: str | None, reason: str | None = "stop", **message) -> dict:
    """A response body as vLLM and SGLang send it."""
    words = len((content or "").split())
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": content, **message},
                "finish_reason": reason,
            }
        ],
        "usage": {"prompt_tokens": 7, "completion_tokens": words, "total_tokens": 7 + words},
    }


class ChatServer(ThreadingHTTPServer):
    """Counts and keeps what it is asked."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.models = ["tiny"]
        self.faults: dict[str, list[Any]] = {}
        self.always: Any = None
        """a fault for every question"""
        self.wait_s = 0.0
        self.hold_until = 0
        """answers wait until so many requests were in flight together"""
        self.bodies: list[dict] = []
        self.times_s: list[float] = []
        self.keys: set[str | None] = set()
        self.answered: Counter[str] = Counter()
        self.in_flight = 0
        self.most_in_flight = 0
        self.changed = threading.Condition()
        self.closing = threading.Event()

    def handle_error(self, request, client_address) -> None:
        """A client that has gone away is no error."""

    def questions(self) -> list[str]:
        """What was asked, in order, repeats included."""
        return [body["messages"][-1]["content"] for body in self.bodies]


@contextlib.contextmanager
def chat_server() -> Iterator[ChatServer]:
    """Serve for as long as the block runs."""
    server = ChatServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: ChatServer

    def log_message(self, format, *args) -> None:
        pass

    def do_GET(self) -> None:
        self.server.keys.add(self.headers["Authorization"])
        if self.path != "/v1/models":
            self._send(Fault(status=404, body={"detail": f"no {self.path}"}))
            return
        self._send(Fault(body={"data": [{"id": name} for name in self.server.models]}))

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/chat/completions":
            self._send(Fault(status=404, body={"detail": f"no {self.path}"}))
            return
        question = body["messages"][-1]["content"]
        with server.changed:
            server.bodies.append(body)
            server.times_s.append(time.monotonic())
            server.keys.add(self.headers["Authorization"])
            server.in_flight += 1
            server.most_in_flight = max(server.most_in_flight, server.in_flight)
            server.changed.notify_all()
            server.changed.wait_for(lambda: server.most_in_flight >= server.hold_until, 10)
            faults = server.faults.get(question)
            fault = faults.pop(0) if faults else server.always
        time.sleep(server.wait_s)
        usual = Fault(body=completion(f"answer to {question}"))
        with server.changed:  # before the client can know, or its next request would count too
            server.in_flight -= 1
            server.answered[question] += fault is None
        if fault == HANG:
            server.closing.wait()
        elif fault == CUT:
            self._send(usual, cut=True)
        else:
            self._send(fault or usual)

    def _send(self, fault: Fault, cut: bool = False) -> None:
        data = fault.body if isinstance(fault.body, bytes) else json.dumps(fault.body).encode()
        self.send_response(fault.status)
        for name, value in {"Content-Length": str(len(data)), **fault.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if cut else data)
        self.close_connection = self.close_connection or cut
