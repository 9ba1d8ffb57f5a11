"""The daemon as a process: lock, log, node, control API, readiness, signals, drain, exit code."""

import logging
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import trio

import dep2p
from dep2p.concurrency.exception_groups import leaves
from dep2p.config.loader import Config
from dep2p.control_api.errors import code_of
from dep2p.daemon.api.context import Control, open_control
from dep2p.daemon.gc import collect_in_steps, tune_gc
from dep2p.daemon.http.server import HttpServer
from dep2p.daemon.lock import hold_lock, prepare_data_dir
from dep2p.daemon.logs import LogSink, close_log, open_log
from dep2p.daemon.problems import Problem
from dep2p.daemon.realm_files import RealmFiles
from dep2p.daemon.systemd import notify
from dep2p.error_codes import ERRORS
from dep2p.errors import Dep2pError

if TYPE_CHECKING:
    from dep2p.daemon.http.remote import RemoteControl

_logger = logging.getLogger("dep2p.daemon")
_OPEN_FILES_WANTED: Final = 65_536
_CONNECTIONS_END_S: Final = 1.0
_FORCED_EXIT_S: Final = 3.0


def run_daemon(config: Config) -> int:
    """Run until a signal, POST /v1/shutdown or a failure; returns the exit code of the process.

    0 after a drain, 128 + the signal after a second signal, else the exit code of the D-code, with a message on stderr.
    Must be called in the main thread, once for each process.
    """
    os.umask(0o077)
    try:
        prepare_data_dir(config.data_dir)
        with hold_lock(config.lock_file):
            return _run_locked(config)
    except Dep2pError as error:
        return _report(error)


def _run_locked(config: Config) -> int:
    try:
        sink = open_log(config.log)
    except OSError as error:
        raise Problem("D1003", f"[log] file: cannot open {config.log.file}: {error.strerror or error}") from None
    try:
        _raise_open_files()
        daemon = _Daemon(config, sink)
        try:
            trio.run(daemon.run)
        except BaseException as error:
            return _failed(error)
        _logger.info("stopped", extra={"exit_code": daemon.exit_code})
        return daemon.exit_code
    finally:
        close_log(sink)


def _raise_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES_WANTED if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES_WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError) as error:  # a sandbox may forbid it; the daemon runs with fewer connections
            _logger.warning("the limit of open files stays", extra={"soft": soft, "reason": str(error)})


class _Daemon:
    """One run of the daemon."""

    def __init__(self, config: Config, sink: LogSink) -> None:
        self.exit_code = 0
        self._config = config
        self._sink = sink
        self._stop = trio.Event()
        self._serving = False

    async def run(self) -> None:
        """Do everything between start and end."""
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch, signals, nursery.cancel_scope)
                await self._node()
                nursery.cancel_scope.cancel()

    async def _watch(self, signals: AsyncIterator[int], all_of_it: trio.CancelScope) -> None:
        async for number in signals:
            name = signal.Signals(number).name
            if not self._stop.is_set():
                _logger.info("a signal: draining, then stopping", extra={"signal": name})
                self._stop.set()
                if not self._serving:
                    all_of_it.cancel()
            else:
                _logger.warning("a second signal: stopping at once", extra={"signal": name})
                self.exit_code = 128 + number
                _exit_anyway(self.exit_code)
                all_of_it.cancel()

    async def _node(self) -> None:
        config = self._config
        # Imported here, so that errors of lock and configuration come before libp2p loads.
        from dep2p.daemon.queue_settings import queue_settings
        from dep2p.daemon.settings import gossip_params, public_pubsub
        from dep2p.daemon.trace_settings import trace_settings
        from dep2p.identity import Identity
        from dep2p.node.node import Node

        started_s = time.monotonic()
        identity = await trio.to_thread.run_sync(Identity.load_or_create, config.key_file)
        realms, problems = await trio.to_thread.run_sync(RealmFiles(config.realms_dir).load_all)
        trace_json = await trio.to_thread.run_sync(_trace_file, config.pubsub.trace_json)
        try:
            async with (
                Node.open(
                    realms=realms,
                    data_dir=config.data_dir,
                    identity=identity,
                    listen=config.node.listen,
                    advertise=config.node.advertise,
                    bootstrap=config.node.bootstrap,
                    mdns=config.node.mdns,
                    dht=config.node.dht,
                    rendezvous=config.node.rendezvous,
                    relay=config.node.relay,
                    limits=config.limits,
                    pubsub_params=gossip_params(config.pubsub, config.limits),
                    public_pubsub=public_pubsub(config.pubsub),
                    trace_json=trace_json,
                    trace_dir=config.trace_dir if config.trace.enabled else None,
                    trace_settings=trace_settings(config.trace),
                    queues=queue_settings(config),
                ) as node,
                open_control(node, config) as control,
            ):
                control.problems.extend(problems)
                control.log_lines_dropped = lambda: self._sink.lines_dropped
                await self._serve(control, started_s)
        except ValueError as error:
            raise Problem("D1003", str(error)) from error

    async def _serve(self, control: Control, started_s: float) -> None:
        from dep2p.daemon.api.app import ControlApp, build_app
        from dep2p.daemon.http.listeners import load_token, open_tcp, open_unix
        from dep2p.daemon.nsq.server import nsq_server

        config, server, remote_server = self._config, HttpServer(control.bounds), HttpServer(control.bounds)
        servers = (server, remote_server)
        control.connections = lambda: sum(each.connection_count for each in servers)
        control.refused = lambda: sum(each.refused for each in servers)
        app = build_app(control)
        nsq = control.nsq = nsq_server(config.nsq, control.node)
        control_apps: list[tuple[ControlApp, trio.SocketListener]] = [
            (ControlApp(app, control), open_unix(config.socket_path))
        ]
        if config.control.tcp:
            control_apps.append((ControlApp(app, control, load_token(config.token_file)), open_tcp(config.control.tcp)))
        remote = await trio.to_thread.run_sync(_open_remote, config, control, remote_server)
        async with trio.open_nursery() as nursery:
            if remote is not None:
                nursery.start_soon(remote[0].serve, ControlApp(app, control), remote[1])
            for control_app, listener in control_apps:
                nursery.start_soon(server.serve, control_app, [listener])
            if nsq is not None:
                await nursery.start(nsq.run)
            tune_gc()  # all modules are loaded by now
            nursery.start_soon(collect_in_steps)
            self._serving = True
            notify(config.notify_socket, f"READY=1\nSTATUS=peer {control.node.peer_id}")
            _logger.info("ready", extra=_ready_fields(control, time.monotonic() - started_s))
            await _first(self._stop, control.lifecycle.stop_requested)
            self._stop.set()
            notify(config.notify_socket, "STOPPING=1\nSTATUS=draining")
            if nsq is not None:
                nsq.stop()
            await control.lifecycle.drain()
            control.lifecycle.stop()
            control.subscriptions.end_all()
            for each in servers:
                each.end_keep_alive()
            with trio.move_on_after(_CONNECTIONS_END_S):
                for each in servers:
                    await each.wait_closed()
            nursery.cancel_scope.cancel()
        config.socket_path.unlink(missing_ok=True)


def _open_remote(
    config: Config, control: Control, server: HttpServer
) -> "tuple[RemoteControl, trio.SocketListener] | None":
    """Listen with TLS for other machines when the configuration says where."""
    if not config.control.tls:
        return None
    from dep2p.config.contexts import certificate_fingerprint
    from dep2p.daemon.http.certificate import load_tls_context, make_certificate
    from dep2p.daemon.http.listeners import load_token, open_tls
    from dep2p.daemon.http.remote import RemoteControl

    cert_file, key_file = config.tls_files
    if config.control.tls_cert_file == "auto":
        make_certificate(cert_file, key_file)
    context = load_tls_context(cert_file, key_file)
    token = load_token(config.token_file)
    listener = open_tls(config.control.tls)
    _logger.info(
        "the control API listens with TLS for programs on other machines",
        extra={"address": config.control.tls, "fingerprint": certificate_fingerprint(cert_file)},
    )
    return RemoteControl(server, context, token, control.bounds, control.counts), listener


def _trace_file(chosen: str) -> Path | None:
    if not chosen:
        return None
    path = Path(chosen).expanduser()
    try:
        path.open("ab").close()  # its error comes before anything starts
    except OSError as error:
        raise Problem("D1003", f"[pubsub] trace_json: cannot open {path}: {error.strerror or error}") from None
    return path


async def _first(*events: trio.Event) -> None:
    async with trio.open_nursery() as nursery:

        async def wait(event: trio.Event) -> None:
            await event.wait()
            nursery.cancel_scope.cancel()

        for event in events:
            nursery.start_soon(wait, event)


def _ready_fields(control: Control, took_s: float) -> dict[str, object]:
    return {
        "version": dep2p.__version__,
        "pid": os.getpid(),
        "peer_id": control.node.peer_id,
        "listen": control.node.listen_addrs(),
        "realms": [realm.name for realm in control.node.realms()],
        "socket": str(control.config.socket_path),
        "took_s": round(took_s, 3),
    }


def _exit_anyway(code: int) -> None:
    """End the process in a few seconds even when something does not react to its cancellation."""

    def end() -> None:
        time.sleep(_FORCED_EXIT_S)
        os._exit(code)

    threading.Thread(target=end, name="dep2p-exit", daemon=True).start()


def _failed(error: BaseException) -> int:
    cause = _cause(error)
    if isinstance(cause, Dep2pError):
        _logger.error("stopped by an error", extra={"code": _code_of(cause), "reason": str(cause)})
        return _report(cause)
    if isinstance(cause, KeyboardInterrupt):
        return 128 + signal.SIGINT
    _logger.critical("stopped by an internal error", exc_info=error)
    return _report(cause)


def _cause(error: BaseException) -> BaseException:
    """Return the error inside groups; one of ours before others, since it says more."""
    causes = leaves(error)
    ours = [cause for cause in causes if isinstance(cause, Dep2pError)]
    return (ours or causes)[0]


def _code_of(error: BaseException) -> str:
    return error.code if isinstance(error, Problem) else code_of(error)


def _report(error: BaseException) -> int:
    """Print the error and the next step to stderr; return the exit code."""
    code = _code_of(error)
    info = ERRORS[code]
    detail = str(error) if isinstance(error, Dep2pError) else f"{type(error).__name__}: {error}"
    lines = [
        f"error: {info.title}",
        f"  cause: {detail}",
        f"  try:   {info.what_to_try}",
        f"  code:  {code} (dep2p errors show {code})",
    ]
    try:
        sys.stderr.write("\n".join(lines) + "\n")
        sys.stderr.flush()
    except OSError:
        return info.exit_code  # stderr is closed: the exit code is the only report
    return info.exit_code
