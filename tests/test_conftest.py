"""The tests of a GPU run on a machine that has pytest and none of its plugins."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_pytest_starts_without_plugins_and_skips_what_needs_them() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-k", "row or shared_memory or calls"]
    # Of them the second has a marker of a plugin's, and the third is asynchronous throughout.
    files = ["tests/worker/gpu/test_rows.py", "tests/kernels/triton/test_ahead.py", "tests/client/test_async_client.py"]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run([*command, *files], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "there is no pytest-asyncio" in done.stdout
    assert " passed, " in done.stdout
