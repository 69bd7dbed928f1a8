"""The process of a gateway: start, serve, drain."""

import asyncio
import contextlib
import logging
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn

from minisgl.bus import connect_worker
from minisgl.bus.base import REPLACED_CODE, ReplacedError
from minisgl.config import GatewayConfig
from minisgl.gateway.app import build_app
from minisgl.gateway.connection import connection_class
from minisgl.gateway.listen import bind_http, service_url
from minisgl.gateway.service import Service

log = logging.getLogger(__name__)

TICK_SECONDS = 0.25
BACKLOG = 2048
IDLE_SECONDS = 75
"""A connection without a request is closed after that: later than proxies, by default, do it, for
otherwise they would now and then send a request into a connection that is just being closed."""
CLOSE_SECONDS = 2
"""For connections that still write when the drain is over."""
FIRST_LOOK_SECONDS = 5.0
"""Before it has seen who serves, a gateway would refuse requests that others can take; but clients
must be told that the bus is away."""


class _Server(uvicorn.Server):
    """uvicorn, without its own signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run_gateway(
    config: GatewayConfig,
    *,
    sock: socket.socket | None = None,
    listen_when_ready: bool = False,
    on_ready: Callable[[], None] | None = None,
    asked: threading.Event | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT, finish the open streams, and return the exit code.

    `sock` is bound and does not listen yet; without it `config.host` and `config.port` are bound.
    With `listen_when_ready` clients are refused until a request can be served. `on_ready` is
    called once this listens. `asked` is set by a signal that came before this could take it.
    Raises `UsageError` or `StartError` for a start that fails.
    """
    from minisgl.hub import model_vocab_size, resolve_model
    from minisgl.text import load_tokenizer

    own = bind_http(config.host, config.port) if sock is None else sock
    # Each client is a file; the usual limit of 1,024 is for programs that use select().
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    try:
        folder = resolve_model(config.model, files="tokenizer")
        tokenizer = load_tokenizer(folder)
        vocabulary = model_vocab_size(folder) or tokenizer.vocab_size
        service = Service(config, connect_worker(config), tokenizer, vocabulary)
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(serve(service, own, listen_when_ready, on_ready, asked=asked))
    finally:
        own.close()


async def serve(
    service: Service,
    sock: socket.socket,
    listen_when_ready: bool = False,
    on_ready: Callable[[], None] | None = None,
    stop: asyncio.Event | None = None,
    asked: threading.Event | None = None,
) -> int:
    """Serve on a bound socket until a signal or `stop`; see `run_gateway`."""
    stop = stop or asyncio.Event()
    _on_signals(stop.set)
    if asked is not None and asked.is_set():
        stop.set()
    service.link.start()
    ticking = asyncio.create_task(_tick(service, stop))
    try:
        if listen_when_ready and not await _until(lambda: service.missing() is None, stop):
            return exit_code(service.failure)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(_until(service.link.healthy, stop), FIRST_LOOK_SECONDS)
        server = _Server(
            uvicorn.Config(
                build_app(service),
                http=connection_class(service.config.max_body_bytes),
                ws="none",
                timeout_keep_alive=IDLE_SECONDS,
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="off",
                backlog=BACKLOG,
                timeout_graceful_shutdown=CLOSE_SECONDS,
            )
        )
        # The launcher binds without it, to have the address alone until now. With it, connections
        # that linger after the end do not hinder the next start.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        serving = asyncio.create_task(server.serve([sock]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        if not serving.done():
            log.info("listening on %s", service_url(service.config.host, sock))
            if on_ready is not None:
                on_ready()
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait({serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        await _drain(service)
        server.should_exit = True
        await serving
        return exit_code(service.failure)
    finally:
        ticking.cancel()
        await asyncio.to_thread(service.link.stop)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """What makes the event loop; None: asyncio's own way."""
    try:
        import uvloop
    except ImportError:  # not on every platform; asyncio's own loop does the same, slower
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def _on_signals(stop: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()

    def interrupted() -> None:
        stop()
        loop.remove_signal_handler(signal.SIGINT)  # the second one ends the process at once

    # A gateway in a thread of a larger program is stopped by that program.
    with contextlib.suppress(ValueError, RuntimeError):
        loop.add_signal_handler(signal.SIGTERM, stop)
        loop.add_signal_handler(signal.SIGINT, interrupted)


async def _tick(service: Service, stop: asyncio.Event) -> None:
    while True:
        await asyncio.sleep(TICK_SECONDS)
        service.tick()
        if service.failure is not None:
            stop.set()


def exit_code(failure: BaseException | None) -> int:
    """How the process ends: as a worker of any role when another one has its name."""
    if isinstance(failure, ReplacedError):
        return REPLACED_CODE
    return int(failure is not None)


async def _until(condition: Callable[[], bool], stop: asyncio.Event) -> bool:
    """Return True when `condition` holds, False when `stop` was set before."""
    while not condition():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), 0.05)
            return False
    return True


async def _drain(service: Service) -> None:
    """Refuse new requests, let open answers finish, end what takes longer than the grace."""
    service.draining = True
    deadline = service.clock() + service.config.drain
    log.info("draining open=%d seconds=%g", len(service.calls), service.config.drain)
    while service.calls and service.clock() < deadline:
        await asyncio.sleep(0.05)
    if service.calls:
        service.end_all()
        end = service.clock() + CLOSE_SECONDS
        while service.calls and service.clock() < end:
            await asyncio.sleep(0.05)
