"""The operator's commands: `octavo explain`, `requests`, `prefix`, `quarantine`, `workers`, `cordon`, `drain` and
`readmit`."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from google.protobuf.duration_pb2 import Duration

from octavo.scheduler.cli.admin_client import TIMEOUT_S, admin_address_option, admin_stub, connected, read_address
from octavo.scheduler.cli.tables import terminal_width, text_table
from octavo.v1 import admin_pb2 as pb
from octavo.v1 import generation_pb2, generation_pb2_grpc

_STATES = {
    "waiting": pb.REQUEST_STATE_WAITING,
    "running": pb.REQUEST_STATE_RUNNING,
    "swapped": pb.REQUEST_STATE_SWAPPED,
}
_STATE_NAMES = {state: name for name, state in _STATES.items()}
_REASONS = {
    pb.Obstacle.KIND_TOKEN_BUDGET: "needs {needed} tokens of the next step, which has {available} left",
    pb.Obstacle.KIND_SEQUENCE_SLOTS: "needs {needed} sequence slots, {available} are free",
    pb.Obstacle.KIND_KV_BLOCKS: "needs {needed} KV blocks, {available} are free",
    pb.Obstacle.KIND_SWAPPED: "requests swapped out come back first: {available}",
    pb.Obstacle.KIND_PREEMPTION: "what runs needs {needed} KV blocks and {available} are free, so it preempts first",
    pb.Obstacle.KIND_CAPACITY: "may grow to {needed} KV blocks, there are {available} in all",
    pb.Obstacle.KIND_DELAY: "prompts gather for {needed} ms, {available} have passed",
    pb.Obstacle.KIND_NO_WORKER: "there is no worker that takes it",
    pb.Obstacle.KIND_ISOLATION: "requests over which workers may have died are computed alone first: {available}",
    pb.Obstacle.KIND_DISK: "the worker's disk is reading {needed} KV blocks of it",
    pb.Obstacle.KIND_MOVE: "the worker copies {needed} KV blocks of it, to go on with them",
    pb.Obstacle.KIND_PREFIX_COPY: "the worker copies {needed} KV blocks that it begins with from another one",
}
_MISSES = {
    pb.CacheLookup.REASON_SHORT: "the rest fills no block before the last token, which is always computed",
    pb.CacheLookup.REASON_OFF: "the scheduler runs without prefix caching",
    pb.CacheLookup.REASON_BYPASSED: "log probabilities of its prompt are wanted, so all of it is computed",
    pb.CacheLookup.REASON_EVICTED: "the block with token {position} made way for others {evicted:.1f} s before",
    pb.CacheLookup.REASON_OTHER_WORKER: "more of it was computed by another worker, {elsewhere}",
    pb.CacheLookup.REASON_NOT_KEPT: "more of it was computed there, but is gone, or was not ready",
    pb.CacheLookup.REASON_DIFFERS: "token {position} is {token}; the longest beginning known has {other_token} there",
    pb.CacheLookup.REASON_ENDS: "the longest beginning known ends before token {position}",
    pb.CacheLookup.REASON_OTHER_SALT: "its tenant has sent more of it, behind another cache salt",
    pb.CacheLookup.REASON_UNKNOWN: "more of it was never computed, as far as is remembered",
}


@click.command()
@click.argument("request_id", metavar="ID")
@admin_address_option
def explain(request_id: str, admin_address: str) -> None:
    """Say where the request ID stands and what it waits for, in numbers.

    Also where its beginning was found computed, and why not more of it, which is known for a while after its end.
    """
    with admin_stub(admin_address) as stub:
        answer = stub.ExplainRequest(pb.ExplainRequestRequest(request_id=request_id), timeout=TIMEOUT_S)
    for explanation in answer.explanations:
        click.echo("\n".join(explanation_lines(explanation)))


def explanation_lines(explanation: pb.Explanation) -> Iterator[str]:
    """Puts an explanation into sentences, one a line."""
    status = explanation.status
    if status.state == pb.REQUEST_STATE_ENDED:
        yield f"{status.request_id}: ended, {_seconds(status)} after it was admitted"
        yield f"  tenant {status.tenant or '-'}, priority {status.priority}, frontend {status.frontend_id}"
        yield from cache_lines(explanation.cache)
        return
    where = f" on {status.worker_id}" if status.worker_id else ""
    where += f", on its way to {status.moves_to}" if status.moves_to else ""
    yield f"{status.request_id}: {_STATE_NAMES[status.state]}{where}, {_seconds(status)} after it came"
    yield (
        f"  {status.prompt_tokens} prompt tokens, {status.output_tokens} generated in {status.sequences} sequences,"
        f" {status.computed_tokens} computed; preempted {status.preemptions} times, {status.swaps} of them swapped out"
    )
    if status.drafts:
        yield (
            f"  {status.drafts} drafts: {status.drafted_tokens} guesses checked, {status.accepted_tokens} right;"
            f" {1 + status.accepted_tokens / status.drafts:.2f} tokens from a step with one"
        )
    yield f"  tenant {status.tenant or '-'}, priority {status.priority}, frontend {status.frontend_id}"
    if explanation.HasField("cache"):
        yield from cache_lines(explanation.cache)
    yield from _step_lines(explanation) if status.state == pb.REQUEST_STATE_RUNNING else _wait_lines(explanation)


def cache_lines(cache: pb.CacheLookup) -> Iterator[str]:
    """Says in two lines where the beginning of a request was found, and why not more of it."""
    found = cache.device_tokens + cache.cpu_tokens + cache.disk_tokens + cache.replica_tokens
    tiers = {"device": cache.device_tokens, "CPU memory": cache.cpu_tokens, "disk": cache.disk_tokens}
    parts = ", ".join(f"{count} {'on the' if name != 'CPU memory' else 'in'} {name}" for name, count in tiers.items())
    if cache.replica_tokens:
        parts += f", {cache.replica_tokens} on {cache.source}"
    yield f"  found computed: {found} of {cache.tokens} tokens: {parts}; {cache.worker_id}"
    reason = _MISSES.get(cache.reason, "why not more is something that this program does not know")
    yield "  " + reason.format(
        position=cache.position,
        token=cache.token,
        other_token=cache.other_token,
        evicted=cache.evicted.ToMilliseconds() / 1000,
        elsewhere=cache.elsewhere,
    )


def _step_lines(explanation: pb.Explanation) -> Iterator[str]:
    if explanation.step_ids:
        steps = ", ".join(map(str, explanation.step_ids))
        yield f"  steps under way with it: {steps}; tokens chosen in them: {explanation.tokens_in_flight}"
    else:
        yield "  no step with it is under way"
        yield from _obstacle_lines(explanation)


def _obstacle_lines(explanation: pb.Explanation) -> Iterator[str]:
    for obstacle in explanation.obstacles:
        reason = _REASONS.get(obstacle.kind, "waits for something that this program does not know")
        where = f"{obstacle.worker_id}: " if obstacle.worker_id else ""
        yield "  " + where + reason.format(needed=obstacle.needed, available=obstacle.available)


def _wait_lines(explanation: pb.Explanation) -> Iterator[str]:
    num_ahead = explanation.queue_position - 1
    if num_ahead:
        named = ", ".join(explanation.ahead_request_ids)
        more = f" and {num_ahead - len(explanation.ahead_request_ids)} more" if num_ahead > 100 else ""
        yield f"  place {explanation.queue_position} in the queue, behind {named}{more}"
    yield from _obstacle_lines(explanation)
    if not explanation.obstacles:
        yield "  there is room for it" + (" once its turn comes" if num_ahead else ": it joins the next step")


def _seconds(status: pb.RequestStatus) -> str:
    return f"{status.age.ToMilliseconds() / 1000:.1f} s"


@click.command()
@click.option("--state", type=click.Choice(list(_STATES)), help="Only those in this state.")
@click.option("--tenant", help="Only those of this tenant; '' for those without one.")
@admin_address_option
def requests(state: str | None, tenant: str | None, admin_address: str) -> None:
    """List the requests that the scheduler holds, in the order in which they came.

    A terminal shows the columns that it has room for; a pipe gets all of them.
    """
    query = pb.ListRequestsRequest(state=_STATES[state] if state else None, tenant=tenant)
    with admin_stub(admin_address) as stub:
        rows = [_row(status) for status in _all_pages(stub, query)]
    head = "ID TENANT PRIORITY STATE WORKER PROMPT COMPUTED OUTPUT SEQUENCES PREEMPTED SWAPPED AGE"
    dispensable = "SWAPPED SEQUENCES PRIORITY COMPUTED PREEMPTED TENANT WORKER PROMPT OUTPUT AGE"
    click.echo(text_table(head, rows, width=terminal_width(), dispensable=dispensable))


def _all_pages(stub: Any, query: pb.ListRequestsRequest) -> Iterator[pb.RequestStatus]:
    while True:
        page = stub.ListRequests(query, timeout=TIMEOUT_S)
        yield from page.requests
        if not page.next_page_token:
            return
        query.page_token = page.next_page_token


def _row(status: pb.RequestStatus) -> list[object]:
    return [
        status.request_id,
        status.tenant or "-",
        status.priority,
        _STATE_NAMES[status.state],
        status.worker_id or "-",
        status.prompt_tokens,
        status.computed_tokens,
        status.output_tokens,
        status.sequences,
        status.preemptions,
        status.swaps,
        _seconds(status),
    ]


@click.group()
def prefix() -> None:
    """Keep the beginnings of many prompts computed, for requests to name."""


@prefix.command()
@click.argument("name")
@click.option("--text", help="The prefix as text, as it would stand in a prompt.")
@click.option("--file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A file with that text.")
@click.option("--token-ids", help="The prefix as token ids, with commas between them.")
@click.option(
    "--server",
    envvar="OCTAVO_SERVER",
    callback=read_address,
    default="127.0.0.1:50051",
    help="gRPC address of a frontend, which tokenizes.",
)
@admin_address_option
def pin(name: str, text: str | None, file: Path | None, token_ids: str | None, server: str, admin_address: str) -> None:
    """Compute a prefix on every worker and keep it under NAME."""
    if sum(source is not None for source in (text, file, token_ids)) != 1:
        raise click.UsageError("give the prefix by one of --text, --file and --token-ids")
    if token_ids is not None:
        ids = _parse_ids(token_ids)
    else:
        ids = _tokenize(server, text if file is None else _read_text(file))
    with admin_stub(admin_address) as stub:
        stub.PinPrefix(pb.PinPrefixRequest(name=name, token_ids=ids), timeout=TIMEOUT_S)
    click.echo(f"pinned {name}: {len(ids)} tokens")


def _parse_ids(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) < 2**31 for part in parts):
        raise click.UsageError(f"--token-ids {text[:100]!r} is not a list such as 1,15,7")
    return [int(part) for part in parts]


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise click.ClickException(f"cannot read {path} as UTF-8 text: {error}") from error


def _tokenize(server: str, text: str | None) -> list[int]:
    with connected(server, "octavo.v1.GenerationService") as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        answer = stub.Tokenize(generation_pb2.TokenizeRequest(text=text), timeout=TIMEOUT_S)
    return list(answer.ids)


@prefix.command("list")
@admin_address_option
def list_prefixes(admin_address: str) -> None:
    """List what is pinned, and which workers have it computed."""
    with admin_stub(admin_address) as stub:
        answer = stub.ListPrefixes(pb.ListPrefixesRequest(), timeout=TIMEOUT_S)
    rows = [
        [each.name, each.tokens, _joined(each.ready_worker_ids), _joined(each.pending_worker_ids)]
        for each in answer.prefixes
    ]
    click.echo(text_table("NAME TOKENS READY-ON PENDING-ON", rows))


def _joined(names: Any) -> str:
    return ", ".join(names) or "-"


@prefix.command()
@click.argument("name")
@admin_address_option
def unpin(name: str, admin_address: str) -> None:
    """Let the prefix NAME go."""
    with admin_stub(admin_address) as stub:
        stub.UnpinPrefix(pb.UnpinPrefixRequest(name=name), timeout=TIMEOUT_S)
    click.echo(f"unpinned {name}")


# -- quarantine -------------------------------------------------------------------------------------------------------


@click.group()
def quarantine() -> None:
    """List and clear what is refused because workers have died over it."""


@quarantine.command("list")
@admin_address_option
def list_payloads(admin_address: str) -> None:
    """List the payloads that are refused now, with the deaths that they are refused for."""
    with admin_stub(admin_address) as stub:
        answer = stub.ListQuarantine(pb.ListQuarantineRequest(), timeout=TIMEOUT_S)
    rows = [
        [each.payload, each.request_id, each.prompt_tokens, f"{each.remaining.ToSeconds()} s"]
        for each in answer.payloads
    ]
    click.echo(text_table("PAYLOAD REQUEST PROMPT-TOKENS REMAINING", rows))
    for each in answer.payloads:
        click.echo(f"{each.payload}: {each.reason}")


@quarantine.command()
@click.argument("payload", required=False)
@click.option("--all", "everything", is_flag=True, help="All that is refused.")
@admin_address_option
def clear(payload: str | None, everything: bool, admin_address: str) -> None:
    """Take the PAYLOAD again, by its hash or the first digits of it."""
    if bool(payload) == everything:
        raise click.UsageError("give a payload, or --all")
    request = pb.ClearQuarantineRequest(all=True) if everything else pb.ClearQuarantineRequest(payload=payload)
    with admin_stub(admin_address) as stub:
        answer = stub.ClearQuarantine(request, timeout=TIMEOUT_S)
    click.echo(f"cleared {answer.cleared}")


# -- workers, cordon, drain, readmit ----------------------------------------------------------------------------------


_HEAD = "ID STATE DEVICE RANKS RUNNING SWAPPED BLOCKS-FREE BLOCKS TOKENS/S"
# Columns that a narrow terminal leaves out, from the first on.
_DISPENSABLE = "RANKS SWAPPED DEVICE TOKENS/S BLOCKS-FREE BLOCKS"
_WORKER_STATES = {
    pb.WORKER_STATE_READY: "ready",
    pb.WORKER_STATE_CORDONED: "cordoned",
    pb.WORKER_STATE_DRAINING: "draining",
}
_LOOK_INTERVAL_S = 0.1

_worker_argument = click.argument("worker_id", metavar="ID")


@click.command()
@admin_address_option
def workers(admin_address: str) -> None:
    """List the workers. TOKENS/S is what one computes in a second of work.

    A terminal shows the columns that it has room for; a pipe gets all of them.
    """
    with admin_stub(admin_address) as stub:
        load = stub.GetLoad(pb.GetLoadRequest(), timeout=TIMEOUT_S)
    rows = [_worker_row(worker) for worker in load.workers]
    click.echo(text_table(_HEAD, rows, width=terminal_width(), dispensable=_DISPENSABLE))


def state_name(worker: pb.Worker) -> str:
    """Says in a word whether the worker gets work."""
    return _WORKER_STATES.get(worker.state, "unknown")


def _worker_row(worker: pb.Worker) -> list[object]:
    return [
        worker.id,
        state_name(worker),
        worker.device,
        worker.world_size,
        worker.running,
        worker.swapped,
        worker.blocks_free,
        worker.blocks_total,
        worker.token_rate,
    ]


@click.command()
@_worker_argument
@admin_address_option
def cordon(worker_id: str, admin_address: str) -> None:
    """Give the worker ID no new requests until it is readmitted, even if it is started anew."""
    with admin_stub(admin_address) as stub:
        stub.CordonWorker(pb.CordonWorkerRequest(worker_id=worker_id), timeout=TIMEOUT_S)
    click.echo(f"cordoned {worker_id}")


@click.command()
@_worker_argument
@admin_address_option
def readmit(worker_id: str, admin_address: str) -> None:
    """Give the worker ID requests again: undoes a cordon, or a drain that is not over."""
    with admin_stub(admin_address) as stub:
        stub.ReadmitWorker(pb.ReadmitWorkerRequest(worker_id=worker_id), timeout=TIMEOUT_S)
    click.echo(f"readmitted {worker_id}")


@click.command()
@_worker_argument
@click.option(
    "--grace",
    type=click.FloatRange(min=0, max=86_400),
    show_default="the scheduler's --drain-grace",
    help="Seconds that requests may go on there before they are moved to other workers.",
)
@click.option("--wait", is_flag=True, help="Return only once the worker has been let go.")
@admin_address_option
def drain(worker_id: str, grace: float | None, wait: bool, admin_address: str) -> None:
    """Give the worker ID no new requests, move those that run on, and let its process end.

    A process of this name that is started later is a worker like any other.
    """
    request = pb.DrainWorkerRequest(worker_id=worker_id, grace=None if grace is None else _duration(grace))
    with admin_stub(admin_address) as stub:
        stub.DrainWorker(request, timeout=TIMEOUT_S)
        if wait:
            _wait(stub, worker_id)
    click.echo(f"drained {worker_id}" if wait else f"draining {worker_id}")


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration


def _wait(stub: Any, worker_id: str) -> None:
    """Waits until no worker of this name drains. Raises `click.ClickException` if it was readmitted, or is there
    anew."""
    while True:
        load = stub.GetLoad(pb.GetLoadRequest(), timeout=TIMEOUT_S)
        states = [worker.state for worker in load.workers if worker.id == worker_id]
        if not states:
            return
        if states != [pb.WORKER_STATE_DRAINING]:
            raise click.ClickException(f"{worker_id} drains no more: it was readmitted, or has already come back")
        time.sleep(_LOOK_INTERVAL_S)
