"""A scenario: one question to headway, as one document with references."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from scenarios.faults import Faults
from scenarios.job import Job
from scenarios.layout import Pins
from scenarios.model import ModelSpec
from scenarios.operations import Checkpointing, DataReading
from scenarios.prices import Prices
from topologies.cluster import Cluster
from topologies.document import FileDocument, InputFile, LoadContext, Reference, load, resolve
from topologies.errors import InputError
from topologies.hardware import CATALOG

SCENARIOS = Path(__file__).parent
FAULTS, PRICES = SCENARIOS / "fault_presets", SCENARIOS / "price_books"

Allowance = Literal["tp-across-domains", "fewer-gpus", "zero-bubble", "mixed-replicas"]
"""What a layout may do only where the scenario says so.

Tensor parallelism across scale-up domains, idle GPUs, and schedules that split the backward pass (zb-h1, zbv,
dualpipe), which few trainers offer. mixed-replicas: on a cluster with two kinds of GPUs replicas that are cut
differently, or reach over both kinds, are tried too, and taken where they are faster."""


class Scenario(FileDocument):
    """Model, cluster, job and goal. ``layout`` pins what the planner must not change."""

    job: Job
    cluster: Annotated[Cluster, Reference(CATALOG / "clusters")]
    faults: Annotated[Faults, Reference(FAULTS)] = Faults(name="none")
    prices: Annotated[Prices, Reference(PRICES)] = Prices(name="none")
    checkpoint: Checkpointing = Checkpointing()
    data: DataReading = DataReading()
    layout: Pins = Field(default_factory=Pins)
    spare_nodes: Literal["beside", "inside"] = "beside"
    """Where spares come from while ``faults.spares`` leaves their number open: beside the cluster, as many as pay; or
    inside, the nodes that the job leaves idle (with ``allow: [fewer-gpus]`` the planner weighs them against work)."""
    exclude_nodes: str = ""
    """Broken or reserved nodes, as numbers and ranges (``3, 17-20``, the first node is 0) or names of the cluster;
    the planner may then leave further GPUs idle."""
    objective: Literal["time", "cost", "goodput", "energy"] = "time"
    allow: tuple[Allowance, ...] = ()
    """What layouts may do beyond the usual."""

    @model_validator(mode="before")
    @classmethod
    def _model_and_stack_belong_to_the_job(cls, content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        moved = {key: content[key] for key in ("model", "stack") if key in content}
        job = content.get("job")
        for key in moved:
            if isinstance(job, dict) and key in job:
                raise ValueError(f"{key!r} is given twice, at the top and in 'job'; keep the one at the top")
        rest = {key: value for key, value in content.items() if key not in moved}
        return rest | {"job": {**job, **moved}} if isinstance(job, dict) else rest

    @model_validator(mode="after")
    def _pools_of_failures_exist(self) -> Scenario:
        names = [pool.node.name for pool in self.cluster.pools]
        for failure in self.faults.failures:
            if failure.pool is not None and failure.pool not in names:
                raise ValueError(
                    f"failures of {failure.component!r} are of pool {failure.pool!r}, and the cluster's nodes are "
                    f"{', '.join(names)}; name one of them"
                )
        return self

    @property
    def model(self) -> ModelSpec:
        """The model of the job."""
        return self.job.model


def load_scenario(name: str, *, overrides: Iterable[str] = (), inputs: list[InputFile] | None = None) -> Scenario:
    """Read a scenario from a path or by its shipped name.

    Args:
        name: path of a file, or name of a shipped scenario.
        overrides: ``key.path=value`` texts, see ``topologies.document.apply_override``.
        inputs: receives every file that was read.

    Raises:
        InputError: no such scenario, or the file is not one.
    """
    path = Path(name)
    if not path.is_file():
        try:
            path = resolve(name, SCENARIOS, LoadContext(Path()))
        except ValueError as error:
            what, _, hint = str(error).partition("; ")
            raise InputError(what, hint=hint or None) from None
    return load(path, Scenario, inputs=inputs, overrides=overrides)
