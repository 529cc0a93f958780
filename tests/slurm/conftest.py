"""One Slurm for all tests of this folder; they are skipped where it cannot be started."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from slurm_cluster import SlurmCluster, slurm_cluster, why_not


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    reason = why_not()
    if reason is not None:
        pytest.skip(f"no Slurm here: {reason}")
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster
