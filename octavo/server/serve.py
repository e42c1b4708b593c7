"""Run the application under uvicorn: bind, say so, drain on a signal, leave.

First SIGTERM or SIGINT: readiness goes off, new work is refused, what is in the house gets
`drain` seconds. A second signal ends at once.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import uvicorn

import octavo
from octavo.assembly import Assembly, Template
from octavo.config import ServerConfig
from octavo.core.admission import Admission, Limits
from octavo.errors import InvalidRequest, OctavoError, Overloaded
from octavo.server import certificate
from octavo.server.app import App
from octavo.server.auth import Keys
from octavo.server.dialect import Dialect
from octavo.server.driver import RESTART_SECONDS, Driver
from octavo.server.live import measured_floor
from octavo.server.metrics import Metrics
from octavo.server.service import Served
from octavo.server.telemetry import Telemetry
from octavo.server.wire import wire

log = logging.getLogger("octavo")

# The engine's thread needs the interpreter for a moment between steps: it must not wait 5 ms.
SWITCH_INTERVAL = 0.0005


def bind(config: ServerConfig) -> socket.socket:
    """A listening socket. Raises `InvalidRequest` if the address cannot be had."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((config.host, config.port))
    except OSError as error:
        bound.close()
        raise InvalidRequest(
            f"cannot bind {config.host}:{config.port}: {error.strerror}; try another --port"
        ) from None
    bound.set_inheritable(True)
    return bound


class Shutdown:
    """The wish to end: asked once it drains, asked twice it does not wait."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    def ask(self) -> None:
        (self.second if self.first.is_set() else self.first).set()

    def on_signals(self) -> Shutdown:
        """Ask at SIGTERM and SIGINT. Only in the main thread."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.ask)
        return self


async def serve(
    app: App, bound: socket.socket, shutdown: Shutdown, ready: Callable[[], None]
) -> None:
    """Serve until `shutdown` is asked for. `ready` is called once connections are taken."""
    config = uvicorn.Config(
        app,
        http=wire(app.config),
        ws="none",
        lifespan="off",
        log_level="warning",
        log_config=None,  # its lines are ours to write
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=2,
        timeout_keep_alive=75,
        backlog=2048,
    )
    config.load()
    app.certificate = config.ssl = app.certificate or certificate.context(app.config)
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    sys.setswitchinterval(SWITCH_INTERVAL)
    # What is loaded stays: the collector need not walk it again in mid-stream.
    gc.collect()
    gc.freeze()
    app.start()
    try:
        await server.startup(sockets=[bound])
    except OSError as error:  # somebody else was faster to listen
        await app.stop()
        text = f"cannot listen: {error.strerror}; try another --port"
        raise InvalidRequest(text) from None
    try:
        ready()
        running = asyncio.create_task(server.main_loop())
        await shutdown.first.wait()
        await _drain(app, shutdown)
        server.should_exit = True
        await running
    finally:
        await server.shutdown(sockets=[bound])
        await app.stop()
        app.write_step_log()
        gc.unfreeze()  # or the kernels' binding takes what is frozen for leaked, and says so


async def _drain(app: App, shutdown: Shutdown) -> None:
    """Wait for what is in the house; end it after `drain` seconds or when asked twice."""
    await app.rest()
    if not app.service.occupancy.live:
        log.info("stopping: nothing runs")
    else:
        log.warning(
            "stopping: %d requests have up to %g s to end",
            app.service.occupancy.live,
            app.config.drain,
        )
    deadline = app.service.driver.clock() + app.config.drain
    while (
        app.service.occupancy.live
        and app.service.driver.clock() < deadline
        and not shutdown.second.is_set()
    ):
        await asyncio.sleep(0.02)
    if app.service.occupancy.live:
        log.warning("ending %d requests", app.service.occupancy.live)
        app.service.driver.abort_all(Overloaded("the server is shutting down", RESTART_SECONDS))
    for _ in range(50):
        if not app.service.occupancy.live:
            break
        await asyncio.sleep(0.02)


def rehearse(template: Template | None) -> None:
    """Write one conversation, so that the first caller does not wait for the template's compiler.
    What is wrong with it, if something is, each caller is told."""
    if template is not None:
        with suppress(OctavoError):
            template([{"role": "user", "content": "Hello"}])


def application(made: Assembly, config: ServerConfig, keys: Keys) -> App:
    """The application that serves an assembled model."""
    rehearse(made.template)
    served = Served(
        name=config.served_model_name or made.name,
        tokenizer=made.tokenizer,
        template=made.template,
        dialect=Dialect.of(made.tokenizer.chat_templates),
        door=made.door,
        system_fingerprint=made.system_fingerprint,
        version=octavo.__version__,
        created=int(time.time()),
        priority=made.config.policy == "priority",
        timed=made.engine.scheduler.policy.timed,
        hidden_size=made.hidden_size,
    )
    driver = Driver(made.engine, timings=made.engine.scheduler.stats.take_timings)
    limits = Limits(
        config.max_queued_tokens,
        config.max_tenant_tokens,
        config.max_queued_seconds,
        keys.weights,
    )
    admission = Admission(made.engine.scheduler, limits)
    names = served.name if config.vllm_metric_names else None
    metrics = Metrics(made.engine.snapshot, names)
    app = App(served, driver, config, metrics, keys, admission)
    if config.otel_endpoint is not None:
        app.send_telemetry(Telemetry(config.otel_endpoint, served.name, served.version))
    app.service.measured_floor = measured_floor(made)
    return app
