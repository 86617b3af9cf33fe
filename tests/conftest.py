"""The repository root is no import root: `python -m pytest` must see what `pytest` sees.

A machine with a GPU may lack plugins of pytest. What it can run without them, it runs.
"""

import gc
import inspect
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from octavo.testing.trust import share_trust_stores

ROOT = str(Path(__file__).parents[1])
_PATCH = pytest.MonkeyPatch()
# Until all tests are collected: what is imported stays, and was looked at again and again.
gc.disable()
# The same examples on every machine, however slow.
settings.register_profile("octavo", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("octavo")

# Read when a kernel is made. Without a GPU they run in Triton's interpreter.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

sys.path[:] = [entry for entry in sys.path if entry not in ("", ROOT)]

# Of each plugin, by its name: a setting of pyproject.toml, which is unknown without it, and a marker of tests.
_PLUGINS = {"asyncio": ("asyncio_mode", "asyncio"), "timeout": ("timeout", "timeout")}


@pytest.fixture(scope="session")
def bundled_model() -> Path:
    """The directory of the bundled model, prepared if it is not yet.

    From then on torch has one thread: two wait for each other whenever a neighbour takes one's core.
    """
    from octavo.worker.loading.prepare import prepare_bundled_model

    torch.set_num_threads(1)
    return prepare_bundled_model()


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A certificate that signs others."""
    from octavo.testbed.credentials import make_authority

    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    return make_authority(tmp_path_factory.mktemp("authority"), "authority")


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    for plugin, (setting, _) in _PLUGINS.items():
        if not pluginmanager.hasplugin(plugin):
            parser.addini(setting, f"means nothing: there is no pytest-{plugin}")
    if not pluginmanager.hasplugin("asyncio"):
        parser.addini("asyncio_default_fixture_loop_scope", "means nothing: there is no pytest-asyncio")


def pytest_configure(config: pytest.Config) -> None:
    for plugin, (_, marker) in _PLUGINS.items():
        if not config.pluginmanager.hasplugin(plugin):
            config.addinivalue_line("markers", f"{marker}(...): means nothing: there is no pytest-{plugin}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.pluginmanager.hasplugin("asyncio"):
        return
    missing = pytest.mark.skip(reason="there is no pytest-asyncio")
    for item in items:
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.function):
            item.add_marker(missing)


def pytest_collection_finish() -> None:
    """Spares the garbage collector what stays to the end, and stacks, HTTP clients and Triton's interpreter what they
    repeat."""
    gc.collect()
    gc.freeze()
    gc.enable()
    if "octavo.testbed.stack" in sys.modules:
        from octavo.testing.launcher import fork_stacks

        fork_stacks(_PATCH)
    share_trust_stores(_PATCH)
    # It takes seconds to import.
    if os.environ.get("TRITON_INTERPRET") == "1" and "octavo.kernels.triton" in sys.modules:
        from octavo.testing.interpreter import spare_repetition

        spare_repetition(_PATCH)
