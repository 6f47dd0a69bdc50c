"""Serve the runs of a folder on one port of loopback, with one token.

/                    the list: states, curves over one another, recipes, logs, from the files of the runs; the state of
                     one in progress is that of its buffer
/runs/NAME/          the page of a run
/runs/NAME/v1/...    passed on to the buffer of the run, as `tba.Run` has it: that of the run in progress, or a
                     read-only one over a copy of the files, which the first request starts
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import RedirectResponse, StreamingResponse
from tba_buffer.page.files import page_answer, page_router

from tba.clients import BufferClient
from tba.errors import ConfigError, NotFoundError, TbaError
from tba.server import Authenticator
from tba.server.problems import install_problem_handlers
from tba.server.serve import Server, bind
from tba.tokens import operator_client_token
from tba_cli.child_processes import interrupt_on_signals
from tba_cli.reports.run_list import end_of_log, run_details, run_folders, run_row
from tba_cli.run_folder import RunFolder
from tba_cli.run_target import Page, endpoints_of, page_url
from tba_cli.scripting.run_handle import Run

LOOPBACK = "127.0.0.1"
STATE_TIMEOUT_S = 2.0
"""Longest time to ask a run in progress for its state: the list waits for it."""
MAX_OPEN = 8
"""Most runs whose pages are open; the one that was opened first is closed for another."""
READ_BYTES = 64 * 1024
PASSED_ON = ("content-type", "content-disposition")


def serve_runs(place: Path, *, port: int, show: Callable[[Page], None]) -> None:
    """Serve the list of the runs in `place`, and their pages, until Ctrl-C or SIGTERM.

    Args:
        port: port on loopback; 0: a free one.
        show: called once the list can be opened.
    """
    if not place.is_dir():
        raise ConfigError(
            f"there is no folder {place} with runs; start a run with `tba run RECIPE`, or name its folder"
        )
    if RunFolder(place).marker_path.exists():
        raise ConfigError(f"{place} is a run: `tba view {place}` shows it, `tba runs {place.parent}` all beside it")
    token, opened, sock = secrets.token_hex(24), dict[str, Run](), bind(LOOPBACK, port)

    async def show_page() -> None:
        show(Page(page_url(f"http://{LOOPBACK}:{sock.getsockname()[1]}", token), str(token_file)))
        print(f"the runs in {place}; Ctrl-C ends it", file=sys.stderr)

    app = build_app(place, Authenticator({"operator": token}), opened)
    with interrupt_on_signals(), tempfile.TemporaryDirectory(prefix="tba-runs-") as folder:
        token_file = Path(folder) / "token"  # the folder has mode 0700
        token_file.write_text(token, encoding="utf-8")
        try:
            with suppress(KeyboardInterrupt):
                Server(app, start=show_page).run(sockets=[sock])
        finally:
            with ThreadPoolExecutor(MAX_OPEN) as pool:  # each of them waits for its processes
                list(pool.map(Run.close, opened.values()))


def build_app(place: Path, auth: Authenticator, opened: dict[str, Run]) -> FastAPI:
    """Build the application; `opened` receives the runs whose pages are open, for the caller to close."""
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    install_problem_handlers(app)
    known = auth.only("operator")

    def folder_of(name: str) -> RunFolder:
        folder = run_folders(place).get(name)
        if folder is None:
            raise NotFoundError(f"there is no run {name!r} in {place}")
        return folder

    # plain functions run in a thread: a file of metrics may be long
    @app.get("/v1/runs", dependencies=known)
    def runs() -> dict[str, Any]:
        return {"folder": str(place), "runs": [_row(folder) for folder in run_folders(place).values()]}

    @app.get("/v1/runs/{name}", dependencies=known)
    def details(name: str) -> dict[str, Any]:
        return run_details(folder_of(name))

    @app.get("/v1/runs/{name}/logs/{log}", dependencies=known)
    def log_text(name: str, log: str) -> dict[str, str]:
        return {"text": end_of_log(folder_of(name), log)}

    @app.get("/runs/{name}")
    async def without_slash(request: Request) -> Response:
        return RedirectResponse(f"{request.scope['raw_path'].decode()}/")

    @app.api_route("/runs/{name}/{path:path}", methods=["GET", "POST", "PATCH"])
    async def page_of_run(name: str, path: str, request: Request) -> Response:
        folder = folder_of(name)
        if not path or path.startswith("page/"):
            return page_answer(path.removeprefix("page/") or "index.html", request)
        auth.check(request.headers.get("authorization", ""), ["operator"])
        if name not in opened and len(opened) >= MAX_OPEN:
            await asyncio.to_thread(opened.pop(next(iter(opened))).close)
        run = opened.setdefault(name, Run(folder.path))
        # the path as it was sent: an id may hold an encoded slash
        target = "/" + request.scope["raw_path"].decode().split("/", 3)[3]
        target += f"?{request.url.query}" if request.url.query else ""
        sent, body = {key: request.headers[key] for key in PASSED_ON if key in request.headers}, await request.body()
        answer = await asyncio.to_thread(lambda: run.client.relay(request.method, target, body, sent))
        headers = {key: answer.headers[key] for key in PASSED_ON if key in answer.headers}
        return StreamingResponse(answer.stream(READ_BYTES), answer.status, headers)

    app.include_router(page_router("runs.html"))
    return app


def _row(folder: RunFolder) -> dict[str, Any]:
    row = run_row(folder)
    if row["state"] == "running":
        with suppress(TbaError):  # it starts or ends, or its buffer is busy
            url, tokens_file, ca_file = endpoints_of(folder)
            token, timeout_s = operator_client_token(tokens_file), STATE_TIMEOUT_S
            with closing(BufferClient(url, token=token, retry_s=0, timeout_s=timeout_s, ca_file=ca_file)) as client:
                said = client.summary()
            row |= {"state": said.state, "reason": said.finding}
    return row
