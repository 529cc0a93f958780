from collections.abc import Callable
from pathlib import Path

import pytest

FILES = Path(__file__).resolve().parents[3].parent / "shared" / "data" / "practitioner-files"


@pytest.fixture
def practitioner() -> Callable[[str], tuple[str, Path]]:
    """Text and path of one real file, by folder and the start of its name: ``topo/01``."""

    def read(start: str) -> tuple[str, Path]:
        folder, _, name = start.partition("/")
        found = sorted((FILES / folder).glob(f"{name}*"))
        if not found:
            pytest.skip(f"the practitioner files are not here: {start}")
        return found[0].read_text(), found[0]

    return read
