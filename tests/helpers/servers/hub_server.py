"""A local Hub: the routes of the Hugging Face Hub that huggingface_hub's client needs here, and the ways they fail."""

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from types import SimpleNamespace
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

TOKEN = "hf_theRightToken"
_REPO = re.compile(
    r"/api/(model|dataset)s/([^/]+(?:/[^/]+)?)/(revision|tree|branch|preupload|commit)(?:/(.*))?$"
)
_RESOLVE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)$")


@dataclass
class Repo:
    """A repository.

    Attributes:
        refs: commit of each branch and tag.
        commits: files of each commit.
    """

    private: bool = False
    gated: bool = False
    refs: dict = field(default_factory=dict)
    commits: dict = field(default_factory=dict)

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        """Sets the files of a branch; returns the new commit."""
        content = repr((len(self.commits), sorted(files.items()))).encode()
        sha = hashlib.sha1(content).hexdigest()
        self.commits[sha], self.refs[branch] = dict(files), sha
        return sha

    def resolve(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.refs.get(revision)

    @property
    def files(self) -> dict[str, bytes]:
        return self.commits[self.refs["main"]]


class Hub:
    """Serves repositories at `url`.

    Attributes:
        repos: by ("model" or "dataset", name).
        requests: (method, path) of each.
        tokens: that were sent.
        faults: by a part of "METHOD PATH", a list; each request takes its next one: "drop" closes the
            connection without an answer, "echo" refuses and repeats the token, a number is an HTTP status.
            A fault "always X" stays.
    """

    def __init__(self) -> None:
        self.repos, self.requests, self.tokens, self.faults, self.stored = {}, [], set(), {}, {}
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def add(self, name: str, files: dict[str, bytes], *, kind: str = "model", **options) -> Repo:
        repo = self.repos[kind, name] = Repo(**options)
        repo.commit(files)
        return repo

    def next_fault(self, request: str) -> str:
        for part, queue in self.faults.items():
            if part in request and queue:
                return queue[0].removeprefix("always ") if queue[0].startswith("always ") else queue.pop(0)
        return ""


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A local Hub for huggingface_hub, with a cache of the test's own, no token, and without waiting."""
    from huggingface_hub import constants, file_download
    from huggingface_hub.utils import _http, close_session

    close_session()
    server, cache = Hub(), tmp_path / "hub_cache"
    for name, value in {
        "ENDPOINT": server.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": server.url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(cache),
        "HF_TOKEN_PATH": str(cache / "token"),
        "HF_HUB_DISABLE_XET": True,
    }.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    for module in (_http, file_download):
        clock = SimpleNamespace(**{**vars(module.time), "sleep": lambda _: None})
        monkeypatch.setattr(module, "time", clock)
    yield server
    server.stop()


def _handler(hub: Hub):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def handle_any(self):
            self.path = unquote(urlsplit(self.path).path) if "?" not in self.path else self.path
            path, query = unquote(urlsplit(self.path).path), parse_qs(urlsplit(self.path).query)
            self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            hub.requests.append((self.command, path))
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
            hub.tokens |= {token} - {""}
            self.allowed = token == TOKEN
            self.fault = hub.next_fault(f"{self.command} {path}")
            if self.fault == "echo":
                return self.fail(422, "", f"cannot take {token}")
            if self.fault.isdigit():
                return self.fail(int(self.fault), "", "of the test")
            if token and not self.allowed:
                return self.fail(401, "", "Invalid credentials in Authorization header")
            if self.fault == "drop":
                self.close_connection = True
                return None
            if path.startswith("/lfs/"):
                hub.stored[path.removeprefix("/lfs/")] = self.body
                return self.answer(b"")
            if path == "/api/validate-yaml":
                return self.json({"errors": [], "warnings": []})
            if path == "/api/repos/create":
                return self.create(json.loads(self.body))
            if path.endswith(".git/info/lfs/objects/batch"):
                return self.batch(json.loads(self.body))
            if match := _RESOLVE.match(path):
                kind = "dataset" if match[1] else "model"
                return self.resolve(kind, match[2], match[3], match[4])
            if match := _REPO.match(path):
                return self.api(match[1], match[2], match[3], match[4] or "", query)
            if match := re.match(r"/api/(model|dataset)s/([^/]+(?:/[^/]+)?)$", path):
                return self.api(match[1], match[2], "revision", "main", query)
            return self.fail(404, "", f"no route {path}")

        do_GET = do_HEAD = do_POST = do_PUT = handle_any

        # -- answers

        def answer(self, data: bytes, status: int = 200, **headers):
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def json(self, value, **headers):
            self.answer(json.dumps(value).encode(), Content_Type="application/json", **headers)

        def fail(self, status: int, code: str, message: str, **headers):
            self.answer(b"", status, X_Error_Code=code, X_Error_Message=message, **headers)

        def find(self, kind, name, revision):
            """The repository and the commit, or None after an error was sent."""
            repo = hub.repos.get((kind, name))
            if repo is None or (repo.private and not self.allowed):
                return self.fail(404 if self.allowed else 401, "RepoNotFound", "Repository not found")
            commit = repo.resolve(revision)
            if commit is None:
                return self.fail(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return repo, commit

        # -- routes

        def create(self, asked):
            if not self.allowed:
                return self.fail(401, "", "Invalid username or password.")
            kind = asked.get("type") or "model"
            name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            if name.startswith("others/"):
                return self.fail(403, "", "You don't have the rights to create a model under this namespace")
            if (kind, name) in hub.repos:
                self.answer(json.dumps({"url": f"{hub.url}/{name}"}).encode(), 409)
                return None
            private = asked.get("visibility") == "private" or asked.get("private") is True
            hub.repos[kind, name] = Repo(private=private)
            hub.repos[kind, name].commit({".gitattributes": b""})
            return self.json({"url": f"{hub.url}/{name}", "name": name})

        def batch(self, asked):
            wanted = [
                {
                    "oid": one["oid"],
                    "size": one["size"],
                    "actions": {"upload": {"href": f"{hub.url}/lfs/{one['oid']}"}},
                }
                for one in asked["objects"]
            ]
            return self.json({"objects": wanted, "transfer": "basic"})

        def resolve(self, kind, name, revision, file):
            if not (found := self.find(kind, name, revision)):
                return None
            repo, commit = found
            if repo.gated and not self.allowed:
                return self.fail(401, "GatedRepo", "Access is restricted")
            data = repo.commits[commit].get(file)
            if data is None:
                return self.fail(404, "EntryNotFound", "Entry not found", X_Repo_Commit=commit)
            headers = {
                "ETag": f'"{hashlib.sha256(data).hexdigest()}"',
                "X_Repo_Commit": commit,
                "Accept_Ranges": "bytes",
            }
            if asked := self.headers.get("Range"):
                first, last = re.match(r"bytes=(\d+)-(\d*)", asked).groups()
                part = data[int(first) : int(last) + 1 if last else None]
                headers["Content_Range"] = f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}"
                return self.answer(part, 206, **headers)
            return self.answer(data, **headers)

        def api(self, kind, name, what, rest, query):
            if what == "revision":
                if found := self.find(kind, name, rest):
                    repo, commit = found
                    files = [
                        {"rfilename": file, "size": len(data)}
                        for file, data in sorted(repo.commits[commit].items())
                    ]
                    info = {"id": name, "sha": commit, "private": repo.private, "siblings": files, "tags": []}
                    self.json({**info, "gated": "auto" if repo.gated else False, "downloads": 0, "likes": 0})
                return None
            if what == "tree":
                revision, _, folder = rest.partition("/")
                if found := self.find(kind, name, revision):
                    deep = query.get("recursive", ["False"])[0].lower() in ("true", "1")
                    self.tree(found[0].commits[found[1]], folder, recursive=deep)
                return None
            if not self.allowed:
                return self.fail(401, "", "Invalid username or password.")
            if not (found := self.find(kind, name, rest if what != "branch" else "main")):
                return None
            repo, commit = found
            if what == "branch":
                if rest in repo.refs:
                    return self.fail(409, "", "Reference already exists")
                repo.refs[rest] = commit
                return self.json({})
            if what == "preupload":
                files = [
                    {
                        "path": file["path"],
                        "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                        "shouldIgnore": False,
                    }
                    for file in json.loads(self.body)["files"]
                ]
                return self.json({"files": files})
            return self.take_commit(name, repo, rest, commit)

        def tree(self, files, folder, *, recursive):
            below = folder and f"{folder}/"
            inside = sorted(path.removeprefix(below) for path in files if path.startswith(below))
            if not inside:
                return self.fail(404, "EntryNotFound", "Entry not found")
            folders = {str(parent) for path in inside for parent in PurePosixPath(path).parents} - {"."}
            entries = [
                *({"type": "directory", "path": below + path, "oid": "0" * 40} for path in sorted(folders)),
                *(
                    {"type": "file", "path": below + path, "oid": "0" * 40, "size": len(files[below + path])}
                    for path in inside
                ),
            ]
            return self.json([e for e in entries if recursive or "/" not in e["path"].removeprefix(below)])

        def take_commit(self, name, repo, branch, commit):
            files = dict(repo.commits[commit])
            for line in self.body.splitlines():
                operation = json.loads(line)
                value = operation["value"]
                if operation["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif operation["key"] == "lfsFile":
                    files[value["path"]] = hub.stored[value["oid"]]
                elif operation["key"] == "deletedFile":
                    del files[value["path"]]
            sha = repo.commit(files, branch)
            return self.json({"commitUrl": f"{hub.url}/{name}/commit/{sha}", "commitOid": sha})

    return Handler
