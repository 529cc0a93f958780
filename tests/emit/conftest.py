"""Facts about other people's programs, each with its source."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def facts() -> Callable[[str], dict[str, Any]]:
    def read(name: str) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((Path(__file__).parent / "facts" / f"{name}.json").read_text())
        return content

    return read
