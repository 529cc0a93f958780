"""Spawned ranks import the helpers of these tests by name; started jobs end with their test."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start headway as its user does; what still runs when the test ends is ended."""
    jobs: list[subprocess.Popen[str]] = []

    def start_one(*arguments: str) -> subprocess.Popen[str]:
        headway = str(Path(sys.executable).parent / "headway")
        job = subprocess.Popen(
            [headway, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL
        )
        jobs.append(job)
        return job

    yield start_one
    for job in jobs:
        if job.poll() is None:
            job.terminate()
        job.communicate()
