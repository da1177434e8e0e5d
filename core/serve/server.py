"""A server from its recipe to its end: bind, load, serve, drain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import uvicorn

from core.recipe import Recipe
from core.serve.app import Service, create_app
from core.serve.client import EngineClient
from core.serve.launch import EngineProcess
from core.serve.prompts import ModelTokenizer, Prompts
from core.text import Vocabulary
from core.types import PartwiseError

_CONNECTIONS_SECONDS: Final = 5
_BACKLOG: Final = 2048

log = logging.getLogger("partwise.serve")


class Server:
    """One server. `load_tokenizer` runs in a thread while the engine process loads the model."""

    def __init__(
        self, recipe: Recipe, model: str, engine: EngineProcess, load_tokenizer: Callable[[], ModelTokenizer]
    ) -> None:
        settings = recipe.server
        self.client = EngineClient(engine, settings.hang_seconds)
        self.service = Service(self.client, model, settings.max_body, settings.api_key)
        self._recipe = recipe
        self._load_tokenizer = load_tokenizer
        self._sock = _bind(settings.host, settings.port)
        self.parts: Mapping[str, str] = {}
        self._stopping = asyncio.Event()
        self._impatient = asyncio.Event()

    @property
    def url(self) -> str:
        host, port = self._sock.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def run(self, on_ready: Callable[[], None] = lambda: None) -> int:
        """Serve until `stop`; the exit code. PartwiseError: the engine or the tokenizer cannot be loaded."""
        http = _Http(uvicorn.Config(
            create_app(self.service),
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=_CONNECTIONS_SECONDS,
        ))  # fmt: skip
        serving = asyncio.create_task(http.serve(sockets=[self._sock]))
        try:
            if await self._load():
                on_ready()
                await self._drained()
        finally:
            http.should_exit = True
            await serving
            died = self.client.state == "dead"
            await self.client.close()
        return 1 if died else 0

    def stop(self) -> None:
        """Take no new requests and end when the running ones have; at once when called again."""
        self.service.draining = True
        if self.client.num_live and not self._stopping.is_set():
            log.warning("%d requests are still running; a second signal ends them", self.client.num_live)
        if self._stopping.is_set():
            self._impatient.set()
        self._stopping.set()

    def handle_signals(self) -> None:
        """SIGTERM and SIGINT call `stop`."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.stop)

    async def _load(self) -> bool:
        """Engine and tokenizer side by side. False: stopped before they were there."""
        loading = asyncio.ensure_future(
            asyncio.gather(
                self.client.start(self._recipe.model_dump(mode="json")), asyncio.to_thread(self._open_tokenizer)
            )
        )
        stopping = asyncio.ensure_future(self._stopping.wait())
        await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            loading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await loading
            return False
        stopping.cancel()
        ready, (tokenizer, vocabulary) = loading.result()
        self.parts = ready.parts
        self.service.prompts = Prompts(tokenizer, vocabulary, ready.max_model_len)
        return True

    def _open_tokenizer(self) -> tuple[ModelTokenizer, Vocabulary]:
        tokenizer = self._load_tokenizer()
        return tokenizer, Vocabulary(tokenizer.backend)

    async def _drained(self) -> None:
        """Wait for `stop`, then for what runs, at most `server.drain_seconds`."""
        await self._stopping.wait()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle_or_impatient(), self._recipe.server.drain_seconds)
        self.client.end_all("the server has shut down")

    async def _idle_or_impatient(self) -> None:
        while self.client.num_live and not self._impatient.is_set():
            await asyncio.sleep(0.05)


class _Http(uvicorn.Server):
    """uvicorn, which leaves signals to us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # the protocol is named because asyncio only then sends small pieces at once (TCP_NODELAY)
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(_BACKLOG)  # now, because two sockets may be bound to one port until one of them listens
    except OSError as error:
        sock.close()
        raise PartwiseError(
            f"cannot listen on {host}:{port}: {error.strerror}; set server.port or server.host"
        ) from None
    return sock
