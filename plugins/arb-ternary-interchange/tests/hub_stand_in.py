"""A stand-in of the Hugging Face Hub on loopback: a program, since no test has a network.

It prints its port, and keeps what is uploaded in the folder that it is given. The token ``good``
may write everywhere, ``reader`` nowhere; it knows no other.
"""

from __future__ import annotations

import base64
import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

KEPT = Path(sys.argv[1])


class Hub(BaseHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def answer(self, status: int, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def refused(self, *, writes: bool) -> bool:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token not in ("good", "reader"):
            self.answer(401, {"error": "Invalid user token."})
            return True
        if writes and token == "reader":
            self.answer(403, {"error": "You don't have the rights."})
            return True
        return False

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def do_GET(self) -> None:
        if self.path != "/api/whoami-v2":
            self.answer(404, {"error": "Repository not found"})
        elif not self.refused(writes=False):
            self.answer(200, {"type": "user", "name": "org", "auth": {}, "orgs": []})

    def do_POST(self) -> None:
        content = self.body()
        address = f"http://127.0.0.1:{self.server.server_address[1]}/org/small"
        if self.refused(writes=True):
            return
        if self.path == "/api/repos/create":
            asked = json.loads(content)
            (KEPT / "repository.json").write_text(json.dumps(asked))
            self.answer(200, {"url": address, "name": "org/small"})
        elif self.path.endswith("/preupload/main"):
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(content)["files"]
            ]
            self.answer(200, {"files": files})
        elif self.path.endswith("/commit/main"):
            for line in map(json.loads, content.splitlines()):
                if line["key"] == "file":
                    data = base64.b64decode(line["value"]["content"])
                    (KEPT / line["value"]["path"]).write_bytes(data)
            self.answer(
                200, {"commitUrl": f"{address}/commit/main", "commitOid": 40 * "a", "success": True}
            )
        else:
            self.answer(200, {})


with HTTPServer(("127.0.0.1", 0), Hub) as server:
    print(server.server_port, flush=True)
    server.serve_forever()
