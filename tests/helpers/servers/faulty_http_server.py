"""A web server over a folder that fails in the ways servers do."""

import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Server:
    """Serves a folder at `url`, with byte ranges.

    Attributes:
        requests: (file, first byte) of each GET.
        sent: bytes of each file that were sent.
        faults: by file name, a list; each GET takes its next one: "drop" closes the connection in
            the middle, "stall" falls silent there, "wrong" changes a byte, "short" tells another
            length, a number is an HTTP status, "" is none. A fault "always X" stays.
        ranges: whether it knows byte ranges.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.faults, self.ranges = folder, {}, True
        self.requests, self.sent, self.lock = [], Counter(), threading.Lock()
        self.ended = threading.Event()
        self.delay_s = 0.0
        self._start(0)

    def _start(self, port: int) -> None:
        self.server = ThreadingHTTPServer(("127.0.0.1", port), self._handler())
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        self.ended.set()
        self.server.shutdown()
        self.server.server_close()

    def restart(self) -> None:
        self.ended.clear()
        self._start(self.port)

    def starts_of(self, name: str) -> list[int]:
        """The first byte of each GET of a file."""
        return [first for file, first in self.requests if file == name]

    def _next_fault(self, name: str):
        with self.lock:
            queue = self.faults.get(name) or self.faults.get("*.tar" if name.endswith(".tar") else "", [])
            if not queue:
                return ""
            if str(queue[0]).startswith("always "):
                return queue[0].removeprefix("always ")
            return queue.pop(0)

    def _handler(self):
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_HEAD(self):
                self.answer(body=False)

            def do_GET(self):
                self.answer(body=True)

            def answer(self, *, body: bool):
                if server.ended.is_set():  # a connection that was kept open
                    self.close_connection = True
                    return None
                name = unquote(urlsplit(self.path).path).lstrip("/").removeprefix("bucket/")
                path = server.folder / name
                asked = self.headers.get("Range")
                first = int(asked.removeprefix("bytes=").split("-")[0]) if asked and server.ranges else 0
                fault = ""
                if body:
                    with server.lock:
                        server.requests.append((name, first))
                    fault = server._next_fault(name)
                    time.sleep(server.delay_s)
                if str(fault).isdigit():
                    return self.send_error(int(fault))
                if not path.is_file():
                    return self.send_error(404)
                data = path.read_bytes()
                if asked and server.ranges and first >= len(data):
                    return self.send_error(416)
                part = bytearray(data[first:])
                if fault == "wrong":
                    part[len(part) // 2] ^= 1
                self.send_response(206 if asked and server.ranges else 200)
                self.send_header("Content-Length", str(len(part) // 2 if fault == "short" else len(part)))
                self.send_header("ETag", '"0"')
                self.send_header("Last-Modified", "Sat, 01 Aug 2026 00:00:00 GMT")
                if asked and server.ranges:
                    self.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
                self.end_headers()
                if not body:
                    return None
                if fault in ("drop", "stall", "short"):
                    part = part[: len(part) // 2]
                self.wfile.write(part)
                with server.lock:
                    server.sent[name] += len(part)
                if fault == "stall":
                    server.ended.wait(30)
                if fault in ("drop", "stall", "short"):
                    self.close_connection = True
                return None

        return Handler
