"""Lists all campaigns: what each needs, and what it does `count` times."""

import asyncio
import contextlib
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from octavo.chaos import books, deaths, departures, drains, overload, poison, soak
from octavo.chaos.report import CampaignReport, in_logs, shortened
from octavo.chaos.system import Campaign, SystemUnderLoad, system
from octavo.testbed.stack import Stack
from octavo.testbed.tiny_model import write_byte_model
from octavo.wire.base import SCHEMA_VERSION
from octavo.worker.loading.prepare import prepare_bundled_model

_PROGRESS_S: Final = 10.0
_FAKE: Final = {
    "OCTAVO_DEVICE": "fake",
    "OCTAVO_FAKE_STEP_MS": "10",
    "OCTAVO_NUM_BLOCKS": "4096",
    # How long streams stand still is measured; a machine on which a scheduler takes long to start loses none of them.
    "OCTAVO_SCHEDULER_GRACE": "300",
}


@dataclass(frozen=True)
class Setting:
    """Describes a campaign and what it runs on. `logged`: the judge reads the scheduler's event log when it has ended;
    `is_real`: with the bundled model instead of the fake one; `is_old`: all processes begin as an older version."""

    run: Campaign
    environment: dict[str, str] = field(default_factory=dict)
    workers: int = 2
    frontends: int = 1
    num_questions: int = 40
    num_tokens: int = 80
    logged: bool = False
    is_real: bool = False
    is_old: bool = False


CAMPAIGNS: Final[dict[str, Setting]] = {
    "kill-workers": Setting(deaths.kill_workers),
    "kill-real-workers": Setting(
        deaths.kill_real_workers, deaths.REAL_MODEL_ENVIRONMENT, num_questions=10, num_tokens=20, is_real=True
    ),
    "kill-schedulers": Setting(deaths.kill_schedulers),
    "freeze-workers": Setting(deaths.freeze_workers),
    "leave": Setting(departures.leave, {"OCTAVO_NUM_BLOCKS": "16384"}, num_questions=20, logged=True),
    "drain": Setting(drains.drain, frontends=len(drains.FRONTENDS)),
    "upgrade": Setting(drains.upgrade, frontends=len(drains.FRONTENDS), is_old=True),
    "poison": Setting(poison.kill_by_request, poison.ENVIRONMENT, workers=poison.WORKERS),
    "hang-workers": Setting(deaths.hang_workers),
    "spoil": Setting(poison.spoil, poison.ENVIRONMENT, workers=poison.WORKERS),
    "run-out": Setting(poison.run_out, poison.CROWDED),
    "soak": Setting(soak.soak, {"OCTAVO_NUM_BLOCKS": "16384"}),
    "overload": Setting(overload.overload, overload.OVERLOAD_ENVIRONMENT, num_tokens=40),
    "expire": Setting(overload.expire, overload.EXPIRE_ENVIRONMENT, logged=True),
}


def run(
    name: str,
    count: int,
    seed: int = 0,
    progress: Callable[[str], None] = lambda text: None,
    old: Path | None = None,
) -> CampaignReport:
    """Runs one campaign on processes of its own. How far it is goes to `progress`, now and then. `old` is where an
    older version is installed, for those that begin with one. Raises `ValueError` if none is."""
    setting = CAMPAIGNS[name]
    if setting.is_old and not _speaks_another_schema(old):
        raise ValueError(f"{name} needs a directory with an older version whose message schema is another, not {old}")
    with _stack(setting, old) as stack:
        return asyncio.run(_run(name, setting, stack, count, seed, progress))


async def _run(
    name: str, setting: Setting, stack: Stack, count: int, seed: int, progress: Callable[[str], None]
) -> CampaignReport:
    async with system(stack, seed, workers=setting.workers, frontends=setting.frontends) as found:
        await found.learn(setting.num_questions, setting.num_tokens)
        began, following = time.monotonic(), asyncio.create_task(_follow(found, progress))
        figures = await setting.run(found, count)
        seconds = round(time.monotonic() - began, 1)
        following.cancel()
        await found.rest()
        figures |= _read_books(found) if setting.logged else {}
        faults = shortened([*found.judge.faults, *in_logs(stack)])
        return CampaignReport(name, count, seconds, found.judge.num_whole, found.kinds, figures, faults)


async def _follow(system: SystemUnderLoad, progress: Callable[[str], None]) -> None:
    began = time.monotonic()
    while True:
        await asyncio.sleep(_PROGRESS_S)
        judge, seconds = system.judge, time.monotonic() - began
        progress(
            f"{seconds:.0f} s: {len(judge.aftermaths)} strikes, {judge.num_whole} whole, {len(judge.faults)} wrong"
        )


def _read_books(system: SystemUnderLoad) -> dict[str, float]:
    """Ends the scheduler, so that all of its log is there."""
    system.stack.kill("scheduler", signal.SIGTERM)
    judged = 0
    for log in books.logs(system.stack.directory):
        for step in books.steps(log):
            system.judge.take(step)
            judged += 1
    return {"steps_judged": judged, "latest_step_after_leaving_s": round(system.judge.latest_step_s, 4)}


def _speaks_another_schema(installed: Path | None) -> bool:
    base = (installed or Path()) / "octavo" / "wire" / "base.py"
    found = re.search(r"^SCHEMA_VERSION = (\d+)$", base.read_text(), re.MULTILINE) if base.exists() else None
    return found is not None and int(found[1]) != SCHEMA_VERSION


@contextlib.contextmanager
def _stack(setting: Setting, old: Path | None) -> Iterator[Stack]:
    with tempfile.TemporaryDirectory(prefix="octavo-") as parent:
        directory, environment = Path(parent) / "run", {**({} if setting.is_real else _FAKE), **setting.environment}
        model = prepare_bundled_model() if setting.is_real else _fake_model(Path(parent) / "byte-model")
        if setting.is_old:
            environment["PYTHONPATH"] = str(old)
        if setting.logged:
            environment["OCTAVO_EVENT_LOG"] = str(directory / books.EVENT_LOG)
        with Stack(model, directory, environment) as stack:
            yield stack


def _fake_model(directory: Path) -> Path:
    write_byte_model(directory)
    return directory
