from collections.abc import Callable
from pathlib import Path

import pytest

from octavo.testing.cluster import Cluster, write_fake_model

MakeCluster = Callable[..., Cluster]


@pytest.fixture
def make_cluster(tmp_path: Path) -> MakeCluster:
    directory = write_fake_model(tmp_path / "model")
    return lambda **config: Cluster(directory, **config)
