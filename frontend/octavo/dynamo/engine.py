"""Presents a cell as an engine of Dynamo. The only module that imports Dynamo."""

import argparse
import asyncio
import logging
import os
import signal
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Self

from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, Worker, WorkerConfig
from dynamo.common.backend.health_check import build_health_check_payload
from dynamo.common.backend.publisher import KvEventSource, ZmqSource
from dynamo.common.configuration.groups.runtime_args import DynamoRuntimeArgGroup, DynamoRuntimeConfig
from dynamo.common.utils.runtime import parse_endpoint
from dynamo.common.utils.token_ids import token_ids_to_list
from dynamo.llm import exceptions

from octavo.client.errors import OctavoError
from octavo.client.results import Model
from octavo.dynamo.cell import Cell
from octavo.dynamo.chunks import Chunk, exception_name
from octavo.dynamo.config import DynamoWorkerConfig
from octavo.dynamo.requests import RequestRefused

_log = logging.getLogger(__name__)


class OctavoEngine(LLMEngine):  # type: ignore[misc]
    """Answers Dynamo's requests from one cell, whose `models` are one model by all its names.

    A worker whose cell takes no more requests leaves the cluster, and `joins_again` as another, so that nothing stays
    of what the cluster knew of its cache: Dynamo's subscription to KV events would be away for seconds, and miss some.
    """

    def __init__(self, config: DynamoWorkerConfig, cell: Cell, models: Sequence[Model]) -> None:
        self._is_lost = False
        self._num_signals = 0
        self._config = config
        self._cell = cell
        self._models = models
        self._watch: asyncio.Task[None] | None = None

    @classmethod
    async def from_args(
        cls, argv: list[str] | None = None, config: DynamoWorkerConfig | None = None
    ) -> tuple[Self, WorkerConfig]:
        """Makes the engine, as soon as the cell takes requests. `argv` holds Dynamo's own options.

        Raises `OctavoError` where the cell refuses to say what it serves, and `ValueError` for an unusable option.
        """
        config = config or DynamoWorkerConfig()
        runtime = _runtime_config(argv)
        cell = Cell(config.connection.open_async(config.server), config.connection.metadata)
        models = await cell.ready()
        # Octavo holds answers to JSON schemas; structural tags are for engines that have them.
        settings = {"model_name": config.model, "served_model_name": models[0].id, "structural_tag": None}
        return cls(config, cell, models), WorkerConfig.from_runtime_config(runtime, **settings)

    async def start(self, worker_id: int) -> EngineConfig:
        """Tells what the cell serves, and begins to watch it."""
        model, *others = self._models
        self._watch = asyncio.create_task(self._leave_with_the_cell())
        return EngineConfig(
            model=self._config.model,
            served_model_name=model.id,
            model_aliases=[other.id for other in others],
            llm=LlmRegistration(
                context_length=model.max_model_len,
                kv_cache_block_size=model.block_size or None,
                total_kv_blocks=model.kv_blocks or None,
            ),
        )

    async def generate(self, request: Mapping[str, Any], context: Any) -> AsyncGenerator[Chunk]:
        """Yields the chunks of an answer. Raises exceptions of Dynamo."""
        try:
            asked = {**request, "token_ids": token_ids_to_list(request["token_ids"])}
            async for chunk in self._cell.generate(asked, context.id()):
                yield chunk
        except RequestRefused as error:
            raise exceptions.InvalidArgument(str(error)) from error
        except OctavoError as error:
            raise getattr(exceptions, exception_name(error))(str(error)) from error

    async def abort(self, context: Any) -> None:
        """Ends a request whose client has gone."""
        self._cell.abort(context.id())

    async def cleanup(self) -> None:
        """Lets what runs end, while the worker gets nothing new, and hangs up."""
        if self._watch:
            self._watch.cancel()
        await self._cell.close(self._config.drain_timeout_s)

    async def kv_event_sources(self) -> list[KvEventSource]:
        """Says where the cell's scheduler tells what is cached; one rank stands for all its workers."""
        return [ZmqSource(self._config.kv_events)] if self._config.kv_events else []

    async def health_check_payload(self) -> dict[str, Any] | None:
        """Returns a request for one token, after a token that every vocabulary has."""
        payload: dict[str, Any] = build_health_check_payload(0)
        return payload

    def signalled(self) -> None:
        """Books a signal that ends the process, this one's own or another's."""
        self._num_signals += 1

    @property
    def joins_again(self) -> bool:
        """Tells whether the cell was lost, and nobody else has wanted the process to end."""
        return self._is_lost and self._num_signals == 1

    async def _leave_with_the_cell(self) -> None:
        why = await self._cell.left()
        if self._num_signals:
            return
        _log.warning("leaving the cluster: %s", why)
        self._is_lost = True
        # Dynamo's runtime ends a worker on a signal alone.
        os.kill(os.getpid(), signal.SIGTERM)


async def serve(config: DynamoWorkerConfig, argv: list[str]) -> bool:
    """Is a worker of the cluster until a signal, or until the cell takes no more requests; returns whether to join it
    again. Raises what `OctavoEngine.from_args` does."""
    os.environ.setdefault("DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT", str(config.shutdown_timeout_s))
    engine, worker = await OctavoEngine.from_args(argv, config)
    # Dynamo's runtime puts handlers of its own before these, and calls them.
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, engine.signalled)
    await Worker(engine, worker).run()
    return engine.joins_again


def _runtime_config(argv: list[str] | None) -> DynamoRuntimeConfig:
    """Reads Dynamo's own options. Raises `ValueError`; ends the process, as argparse does, for one that is none."""
    parser = argparse.ArgumentParser("octavo dynamo-worker [Octavo's options]", allow_abbrev=False)
    DynamoRuntimeArgGroup().add_arguments(parser)
    runtime = DynamoRuntimeConfig.from_cli_args(parser.parse_args(argv))
    runtime.validate()
    endpoint = runtime.endpoint or f"{runtime.namespace}.backend.generate"
    runtime.namespace, runtime.component, runtime.endpoint = parse_endpoint(endpoint)
    return runtime
