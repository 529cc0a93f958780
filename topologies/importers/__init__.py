"""Files that people already have, read into headway's own types.

``import_file`` tells the format by its content and returns what the file says, warnings, and the raw mapping of a
cluster where the file (with what the user adds) determines one. Each module reads one format: ``topo`` (nvidia-smi,
rocm-smi), ``nccl_xml``, ``slurm_topology``, ``topograph``, ``ibnetdiscover``, ``kubernetes``, ``nccl_curve`` (logs of
nccl-tests), ``nccl_debug``. What a file does not say stays unknown and is said to be.
"""

from __future__ import annotations

from topologies.importers.assemble import Choices
from topologies.importers.importing import Imported, import_file

__all__ = ["Choices", "Imported", "import_file"]
