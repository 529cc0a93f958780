"""What things cost, each price with its source and date."""

from __future__ import annotations

from topologies.document import FileDocument
from topologies.units import UsdPerJoule, UsdPerSecond


class Prices(FileDocument):
    """A price book."""

    gpu_usd_per_second: UsdPerSecond = 0.0
    """Renting one GPU, with its share of everything else."""
    electricity_usd_per_joule: UsdPerJoule = 0.0
    """0 where the rent includes it."""
