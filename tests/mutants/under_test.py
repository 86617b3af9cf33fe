"""A pytest plugin for tests of a mutant: they see nothing but their own tree, and a found bug is not made smaller."""

import resource
import sys
from pathlib import Path

import pytest
from hypothesis import Phase, settings

settings.register_profile("mutants", derandomize=True, deadline=None, phases=[Phase.explicit, Phase.generate])
# A mutant that loops for ever may hoard while it does.
_MEMORY_BYTES = 4 << 30


def pytest_configure() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuses to test any module of ours that is not under the root of the run, such as one that is installed."""
    root = session.config.rootpath
    files = {
        name: getattr(module, "__file__", None) for name, module in sys.modules.items() if name.startswith("octavo.")
    }
    strangers = sorted(name for name, file in files.items() if file and not Path(file).is_relative_to(root))
    if strangers or not any(files.values()):
        raise pytest.UsageError(f"not of the tree under {root}: {', '.join(strangers) or 'nothing of it is imported'}")
