"""`minisgl-operator run`: the operator's process.

Every replica answers /livez and /metrics; the one that holds the Lease watches and acts. When it
loses the Lease it ends, and its container starts again as one that waits.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import socket
import sys
from collections.abc import Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

from minisgl.logs import LOG_FORMATS, set_up_logging
from minisgl_operator.handlers import Manager, connections, run_kopf
from minisgl_operator.kube import WATCH_SECONDS, Api, ApiError
from minisgl_operator.lease import LeaderLease, Lost
from minisgl_operator.loop import Loop
from minisgl_operator.metrics import Metrics
from minisgl_operator.missing import Missing
from minisgl_operator.observed import Settings

log = logging.getLogger("minisgl_operator")

LEASE = "minisgl-operator"
WATCH_SILENCE = 3.0
"""In lengths of a watch: one that has not been opened anew for so long never will be."""
LOOK_SILENCE_SECONDS = 180.0
"""Every object is looked at each ten seconds."""


class ConfigError(Exception):
    """The configuration file is wrong: one line for the user, exit code 2."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 3: the cluster lacks the CRD, or rights; 2: wrong arguments or configuration; 1: it
    failed, or lost its Lease."""
    parser = argparse.ArgumentParser(prog="minisgl-operator", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", allow_abbrev=False, help="watch MiniSGLang objects and act")
    where = run.add_mutually_exclusive_group()
    where.add_argument("--namespace", metavar="NS", nargs="+", help="watch these namespaces only")
    where.add_argument(
        "--all-namespaces", action="store_true", help="watch the whole cluster (default)"
    )
    run.add_argument(
        "--config", metavar="FILE", help="YAML file with default images and so on (see the chart)"
    )
    run.add_argument("--port", type=int, default=8080, help="of /livez and /metrics (default 8080)")
    run.add_argument(
        "--watch-seconds", type=int, default=WATCH_SECONDS, metavar="N",
        help="watches are opened anew after so long; /livez fails when one is silent for three "
        f"times as long (default {WATCH_SECONDS})",
    )  # fmt: skip
    run.add_argument("--log-format", choices=LOG_FORMATS, default="json", help="default: json")
    args = parser.parse_args(argv)
    set_up_logging("operator", args.log_format)
    logging.getLogger("kopf").setLevel(logging.WARNING)
    for part in ("running", "orchestration"):  # each raises what it logs with a traceback
        logging.getLogger(f"kopf._core.reactor.{part}").addFilter(_without_traceback)
    try:
        settings = read_settings(args.config)
    except ConfigError as error:
        print(f"minisgl-operator: {error}", file=sys.stderr)
        return 2
    namespaces = sorted(set(args.namespace or []))
    if namespaces:
        settings = dataclasses.replace(settings, can_read_nodes=False)
    try:
        with asyncio.Runner(loop_factory=Loop) as runner:
            return runner.run(_serve(settings, namespaces, args.port, args.watch_seconds))
    except Missing as error:
        log.error("%s", error)
        return 3
    except (ApiError, Lost, OSError) as error:
        log.error("%s", error)
        return 1


def _without_traceback(record: logging.LogRecord) -> bool:
    return record.exc_info is None


def read_settings(path: str | None) -> Settings:
    """The configuration file as settings. `ConfigError` names the field and the fix."""
    fields = {f.name: f for f in dataclasses.fields(Settings)}
    given: dict[str, Any] = {}
    if path is not None:
        try:
            given = yaml.safe_load(Path(path).read_text("utf-8")) or {}
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(f"--config {path}: cannot be read: {error}") from None
        if not isinstance(given, dict):
            raise ConfigError(f"--config {path}: must be a mapping of fields")
    values: dict[str, Any] = {"operator_namespace": _own_namespace()}
    for key, value in given.items():
        name = "".join(f"_{c.lower()}" if c.isupper() else c for c in str(key))
        if name not in fields:
            known = ", ".join(sorted(fields))
            raise ConfigError(f"--config {path}: unknown field {key!r}; fields are: {known}")
        if name == "node_cidrs":
            if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
                raise ConfigError(f"--config {path}: {key} must be a list of CIDRs as text")
            values[name] = tuple(value)
            continue
        wanted = bool if fields[name].type is bool else str
        if not isinstance(value, wanted):
            raise ConfigError(f"--config {path}: {key} must be a {wanted.__name__}, not {value!r}")
        values[name] = value
    for f in fields.values():
        if f.default is dataclasses.MISSING and not values.get(f.name):
            raise ConfigError(f"--config {path or 'FILE'}: the field {f.name} must be given")
    return Settings(**values)


def _own_namespace() -> str:
    with contextlib.suppress(OSError):
        path = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"
        return Path(path).read_text("utf-8").strip()
    return os.environ.get("POD_NAMESPACE", "default")


async def _serve(
    settings: Settings, namespaces: Sequence[str], port: int, watch_seconds: int
) -> int:
    stop = asyncio.Event()
    _take_signals(stop)
    metrics = Metrics()
    managers: list[Manager] = []
    web_server = await _listen(port, metrics, managers, WATCH_SILENCE * watch_seconds)
    identity = f"{os.environ.get('POD_NAME') or socket.gethostname()}-{os.urandom(4).hex()}"
    # Clients of their own: whatever fills the connections of the other, the Lease is renewed.
    keeper, kube = await Api.connect(2), await Api.connect(connections(namespaces))
    lease = LeaderLease(keeper, settings.operator_namespace, LEASE, identity)

    async def work() -> None:
        metrics.leader.set(1)
        known = dataclasses.replace(
            settings,
            gateway_api=await kube.knows("HTTPRoute"),
            image_volumes=await kube.minor_version() >= 35,
        )
        manager = Manager(kube, known, metrics, namespaces, watch_seconds)
        managers.append(manager)
        await _watch(manager, namespaces, stop)

    try:
        if await until(stop, lease.acquire()):
            await act(lease, stop, work())
        return 0
    finally:
        await lease.release()
        await web_server.cleanup()
        await kube.close()
        await keeper.close()


def _take_signals(stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)


async def act(lease: LeaderLease, stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Do the work of who holds the Lease until it ends or `stop` is set. The Lease is kept until
    the work has ended. Raises what ended it: `Lost` when another may act."""
    keeping = asyncio.create_task(lease.keep())
    working = asyncio.create_task(until(stop, work))
    try:
        await asyncio.wait({keeping, working}, return_when=asyncio.FIRST_COMPLETED)
        if keeping.done():
            keeping.result()
        working.result()
    finally:
        for task in (working, keeping):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def until(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Whether the work was done before `stop` was set, which cancels it. Raises what it raises."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
        return working.done()
    finally:
        for task in (working, stopping):
            task.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)


async def _watch(manager: Manager, namespaces: Sequence[str], stop: asyncio.Event) -> None:
    watching: set[asyncio.Task[None]] = set()
    try:
        await manager.start()
        log.info("watching %s", ", ".join(namespaces) or "all namespaces")
        watching.add(
            asyncio.create_task(run_kopf(manager, namespaces, partial(_take_signals, stop)))
        )
        for ended in (await asyncio.wait(watching))[0]:
            ended.result()
    finally:
        # The writers first: kopf takes its time, in which another may begin to act.
        await manager.close()
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)


async def _listen(
    port: int, metrics: Metrics, managers: list[Manager], watch_silence: float
) -> web.AppRunner:
    async def livez(_: web.Request) -> web.Response:
        for manager in managers:
            watched, looked = manager.silence()
            if watched > watch_silence:
                return web.Response(status=500, text=f"a watch is silent for {watched:.0f} s\n")
            if looked > LOOK_SILENCE_SECONDS:
                return web.Response(status=500, text=f"an object waits for {looked:.0f} s\n")
        return web.Response(text="ok\n")

    async def show_metrics(_: web.Request) -> web.Response:
        return web.Response(body=metrics.text(), content_type="text/plain")

    app = web.Application()
    app.router.add_get("/livez", livez)
    app.router.add_get("/metrics", show_metrics)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, None, port).start()
    return runner
