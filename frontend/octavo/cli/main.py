"""Dispatches `octavo` to its subcommands, which the services bring, and which are imported only when called."""

import importlib
import logging
import os
from typing import Any, Final

import click

_log = logging.getLogger(__name__)

# Name of the subcommand -> where its click command lives, and its line in `octavo --help`, so that printing that
# imports nothing.
_COMMANDS: Final[dict[str, tuple[str, str]]] = {
    "serve": ("octavo.cli.serve:serve", "Start frontend, scheduler and workers on this machine and keep them running."),
    "frontend": ("octavo.frontend.cli.frontend:frontend", "Run one frontend: tokenizer and gRPC."),
    "scheduler": ("octavo.scheduler.cli.serve:scheduler", "Run the scheduler: queues and block manager."),
    "replay": (
        "octavo.scheduler.cli.serve:replay",
        "Feed a scheduler's event log to a fresh core and compare its plans.",
    ),
    "explain": ("octavo.scheduler.cli.operate:explain", "Say where a request stands and what it waits for."),
    "requests": ("octavo.scheduler.cli.operate:requests", "List the requests that the scheduler holds."),
    "top": ("octavo.scheduler.cli.top:top", "Watch queues, blocks and token rates."),
    "workers": ("octavo.scheduler.cli.operate:workers", "List the workers: state, blocks, token rates."),
    "cordon": ("octavo.scheduler.cli.operate:cordon", "Give a worker no new requests until it is readmitted."),
    "drain": ("octavo.scheduler.cli.operate:drain", "Move a worker's requests away, and let it end."),
    "readmit": ("octavo.scheduler.cli.operate:readmit", "Give a worker requests again."),
    "quarantine": ("octavo.scheduler.cli.operate:quarantine", "List and clear what is refused after deaths."),
    "prefix": ("octavo.scheduler.cli.operate:prefix", "Pin, list and unpin prefixes that stay computed."),
    "cache": ("octavo.cli.main:cache", "List, reset, measure, verify and clear what prefix caching keeps."),
    "worker": ("octavo.worker.cli.worker:worker", "Run one worker: weights, KV blocks, the model."),
    "calibrate": ("octavo.worker.cli.calibrate:calibrate", "Measure how long a worker's steps take, for simulations."),
    "evaluate": ("octavo.quality.cli:evaluate", "Say how well a model predicts a text, and what its format lost."),
    "simulate": ("octavo.simulator.cli:simulate", "Tell how a load would run on workers that are not there."),
    "dynamo-worker": ("octavo.dynamo.cli:dynamo_worker", "Join a cell to a cluster of NVIDIA Dynamo."),
    "keys": ("octavo.cli.keys:keys", "Make the keys by which the processes know each other between hosts."),
    "generate": ("octavo.frontend.cli.client:generate", "Stream the continuation of a prompt to the terminal."),
    "chat": ("octavo.frontend.cli.client:chat", "Talk with the model in the terminal."),
    "run-batch": ("octavo.frontend.cli.run_batch:run_batch", "Have the calls in a file answered by a server."),
    "health": ("octavo.frontend.cli.client:health", "Probe a process's gRPC health; exit status 0 if it serves."),
    "bench": ("octavo.loadgen.cli:bench", "Load a server as many users would, and measure its answers."),
    "prepare-model": ("octavo.worker.cli.prepare:prepare_model", "Write the bundled model's directory to the cache."),
    "convert-weights": ("octavo.worker.cli.prepare:convert", "Turn a model's pickled weights into safetensors."),
    "quantize": ("octavo.worker.cli.prepare:quantize", "Write a model anew with quantised weights."),
}
# Those of `octavo cache`: scheduler and worker each bring what they know of it.
_CACHE_COMMANDS: Final[dict[str, tuple[str, str]]] = {
    "list": ("octavo.scheduler.cli.cache:list_tiers", "List the tiers of every worker: device, CPU memory, disk."),
    "reset": ("octavo.scheduler.cli.cache:reset", "Let no later request find what is cached now."),
    "measure": ("octavo.worker.cli.cache:measure", "Say whose KV blocks lie in a directory, and how many."),
    "verify": ("octavo.worker.cli.cache:verify", "Read all KV blocks in a directory and say which are damaged."),
    "clear": ("octavo.worker.cli.cache:clear_blocks", "Remove all KV blocks in a directory."),
}
# The extras by the packages that they install.
_EXTRA_OF: Final = {
    **dict.fromkeys(("torch", "safetensors", "numpy", "tqdm", "xxhash"), "worker"),
    **dict.fromkeys(("accelerate", "gguf"), "gguf"),
    "httpx": "bench",
    **dict.fromkeys(("transformers", "tokenizers", "huggingface_hub", "jinja2", "google"), "frontend"),
    "opentelemetry": "tracing",
    **dict.fromkeys(
        ("grpc_reflection", "grpc_status", "starlette", "uvicorn", "llguidance", "python_multipart"), "frontend"
    ),
}


class _Dispatcher(click.Group):
    """Finds its subcommands in a table of places; in a line, `prefix` comes before their names."""

    table, prefix = _COMMANDS, ""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.table:
            return None
        module_name, _, attribute = self.table[cmd_name][0].partition(":")
        try:
            command = getattr(importlib.import_module(module_name), attribute)
        except ModuleNotFoundError as error:
            self._explain(cmd_name, error)
            raise
        assert isinstance(command, click.Command)
        _show_variables(command)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return self._explained(ctx)
        except click.ClickException as error:
            from octavo.runtime.telemetry import logs

            if not logs.is_json():
                raise
            _log.error(error.format_message())
            ctx.exit(error.exit_code)

    def _explained(self, ctx: click.Context) -> Any:
        # Commands import what is heavy when they run, so this is not only about loading them.
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            self._explain(ctx.invoked_subcommand or "", error)
            raise

    def _explain(self, name: str, error: ModuleNotFoundError) -> None:
        _explain(self.prefix + name, error, self.table[name][0] if name in self.table else "")

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in self.table.items()])


class _CacheDispatcher(_Dispatcher):
    table, prefix = _CACHE_COMMANDS, "cache "


def _show_variables(command: click.Command) -> None:
    """Makes help name the environment variable of each option that has one."""
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            parameter.show_envvar = True
    for inner in command.commands.values() if isinstance(command, click.Group) else ():
        _show_variables(inner)


def _explain(command: str, error: ModuleNotFoundError, where: str) -> None:
    """Raises `click.ClickException` if the module is one that an installation may do without; `where` is the place of
    the command."""
    package = (error.name or "").partition(".")[0]
    if extra := _EXTRA_OF.get(package):
        if extra == "frontend" and where.startswith(("octavo.worker.", "octavo.quality.")):
            # The worker's extra brings the packages that it shares with the frontend.
            extra = "worker"
        if where.startswith("octavo.loadgen."):
            extra = "bench"
        what = f"needs {package}, which is not installed; in Octavo's source tree run: pip install '.[{extra}]'"
        raise click.ClickException(f"`octavo {command}` {what}") from error
    if package == "octavo":
        raise click.ClickException(f"`octavo {command}` is not part of this installation: {error}") from error


@click.group(cls=_Dispatcher, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(package_name="octavo")
@click.option(
    "--log-level",
    envvar="OCTAVO_LOG_LEVEL",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    help="Least severe log line to print, to stderr.",
)
@click.option(
    "--log-format",
    envvar="OCTAVO_LOG_FORMAT",
    type=click.Choice(["console", "json"]),
    default="console",
    help="Log lines for people (console), or one JSON object each (json).",
)
@click.pass_context
def main(context: click.Context, log_level: str, log_format: str) -> None:
    """PagedAttention serving: a frontend, a scheduler and workers."""
    # Imported here: `--help` needs neither.
    from octavo.cli.supervision import follow_supervisor
    from octavo.runtime.telemetry import logs

    follow_supervisor()
    logs.configure(log_level, log_format)
    if context.invoked_subcommand == "serve":
        # Its processes log as it does.
        os.environ.update(OCTAVO_LOG_LEVEL=log_level, OCTAVO_LOG_FORMAT=log_format)


@click.group(cls=_CacheDispatcher)
def cache() -> None:
    """List, reset, measure, verify and clear what prefix caching keeps: on devices, in CPU memory, on disks."""


_show_variables(main)

if __name__ == "__main__":
    main()
