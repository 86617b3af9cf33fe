"""`octavo quarantine`: what is refused because workers have died over it, and taking it again."""

import click

from octavo.scheduler.admin_client import TIMEOUT_S, admin_address_option, admin_stub
from octavo.scheduler.text_table import text_table
from octavo.v1 import admin_pb2 as pb


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
