"""The operator's process: whatever ends it, its Lease is free for the next."""

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from tests.redis_server import free_port

PROGRAM = "import sys; from minisgl_operator.main import main; sys.exit(main())"
LEASE = "/namespaces/system/leases"


class Server:
    """An API server without any object, but with a Lease; `broken` is the end of a path."""

    def __init__(self, broken: str = "") -> None:
        self._broken = broken
        self.lease: dict[str, dict[str, str]] = {}

    @property
    def holder(self) -> str:
        return self.lease["spec"]["holderIdentity"]

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if self._broken and request.path.endswith(self._broken):
            return web.json_response({"message": "broken"}, status=500)
        if LEASE in request.path:
            if request.method != "GET":
                self.lease = await request.json()
            return web.json_response(self.lease, status=200 if self.lease else 404)
        if request.query.get("watch"):
            response = web.StreamResponse()
            await response.prepare(request)
            await asyncio.Event().wait()
        nothing = {"items": [], "groups": [], "versions": [], "resources": []}
        return web.json_response({**nothing, "metadata": {"resourceVersion": "5"}})

    @asynccontextmanager
    async def operator(self, folder: Path) -> AsyncIterator[Process]:
        """The process that has this server in its kubeconfig."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        port = free_port()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        config, kubeconfig = folder / "config.yaml", folder / "kubeconfig"
        config.write_text("{image: a, redisImage: b, operatorNamespace: system}")
        kubeconfig.write_text(json.dumps({
            "apiVersion": "v1", "kind": "Config", "current-context": "a",
            "clusters": [{"name": "a", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
            "users": [{"name": "a", "user": {"token": "none"}}],
            "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}],
        }))  # fmt: skip
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", PROGRAM, "run", f"--config={config}",
            f"--port={free_port()}", env={**os.environ, "KUBECONFIG": str(kubeconfig)},
            stdout=PIPE, stderr=STDOUT,
        )  # fmt: skip
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            await runner.cleanup()


async def said(process: Process, words: str) -> None:
    """Wait until it has logged something."""
    assert process.stdout is not None
    async with asyncio.timeout(60):
        while words not in (await process.stdout.readline()).decode():
            assert not process.stdout.at_eof()


async def test_who_is_asked_to_end_gives_its_lease_up(tmp_path: Path) -> None:
    server = Server()
    async with server.operator(tmp_path) as process:
        await said(process, "Unresolved resources")  # kopf's: it has begun
        assert server.holder
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 60) == 0
    assert server.holder == ""


async def test_who_is_asked_to_end_while_it_may_list_nothing_yet_gives_its_lease_up(
    tmp_path: Path,
) -> None:
    server = Server(broken="/services")
    async with server.operator(tmp_path) as process:
        await said(process, "watch of Service")
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 60) == 0
    assert server.holder == ""


async def test_who_fails_before_it_watches_gives_its_lease_up(tmp_path: Path) -> None:
    server = Server(broken="/version")
    async with server.operator(tmp_path) as process:
        assert await asyncio.wait_for(process.wait(), 60) == 1
    assert server.holder == ""
