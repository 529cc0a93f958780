"""The free numbers of the closed form, each with its allowed range and its source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from pydantic import Field, model_validator

from topologies.document import Document, FileDocument, load
from topologies.units import Bytes, Seconds

SHIPPED = Path(__file__).parent / "parameters.yaml"


class Parameter(Document):
    """A plain number."""

    value: float
    low: float
    high: float
    """Physical range: a fit stays inside."""
    source: str = Field(min_length=1)

    @model_validator(mode="after")
    def _stays_in_range(self) -> Parameter:
        if not self.low <= self.value <= self.high:
            raise ValueError(
                f"{self.value} lies outside {self.low} to {self.high}; widen the range or correct the value"
            )
        return self


class SecondsParameter(Parameter):
    """A time."""

    value: Seconds
    low: Seconds
    high: Seconds


class BytesParameter(Parameter):
    """A size."""

    value: Bytes
    low: Bytes
    high: Bytes


class Efficiency(Parameter):
    """A share of a peak; no large GEMM is known that beats 0.85 of its dense peak."""

    high: float = Field(le=0.85)


class Parameters(FileDocument):
    """All free numbers. A few per GPU generation, the others global."""

    gemm_efficiency: dict[str, dict[str, Efficiency]]
    gpu_factor: dict[str, Parameter]
    attention_efficiency: dict[str, Efficiency]
    kernel_factor: dict[str, Parameter]

    shape: Parameter
    memory_efficiency: Parameter
    memory_ops: Parameter
    memory_ops_eager: Parameter
    special_layers: Parameter
    cast: Parameter
    accumulate: Parameter
    attention_half_sequence: Parameter
    unfused_scores: Parameter
    unfused_gemm: Parameter
    moe_gemm: Parameter
    moe_permute: Parameter
    moe_imbalance: Parameter
    mamba_scan_passes: Parameter
    graph_partial: Parameter
    graph_full: Parameter
    untuned: Parameter
    lora_memory_ops: Parameter
    lora_backward: Parameter
    exposed_tp_backward: Parameter
    cpu_adam: Parameter
    power: Parameter
    moe_release: Parameter

    host_layer: SecondsParameter
    host_moe_layer: SecondsParameter
    host_expert: SecondsParameter
    early_deepspeed: SecondsParameter
    step_constant: SecondsParameter

    exposed_tp: Parameter
    exposed_tp_overlapped: Parameter
    exposed_cp: Parameter
    exposed_ep: Parameter
    exposed_ep_overlapped: Parameter
    exposed_pp: Parameter
    exposed_pp_overlapped: Parameter
    exposed_dp: Parameter
    exposed_dp_overlapped: Parameter
    exposed_fsdp: Parameter
    all_to_all: Parameter
    nic: Parameter
    jitter: Parameter
    reserve: BytesParameter
    reserve_cpu: BytesParameter
    fragmentation: Parameter

    band: dict[str, Parameter]
    evidence: dict[str, int] = Field(default_factory=dict)
    """Published runs that the fit rests on: by generation, precision, kind of model and tuning (``evidence_key``), and
    by GPU (``on H200 SXM``)."""

    def items(self) -> Iterator[tuple[str, Parameter]]:
        """Yield every parameter under a dotted name: ``jitter``, ``gemm_efficiency.hopper.bf16``."""
        yield from _walk("", {name: getattr(self, name) for name in type(self).model_fields})

    def with_values(self, values: Mapping[str, float]) -> Parameters:
        """Return a copy with other values, in SI units, by dotted name.

        Raises:
            ValueError: an unknown name, or a value outside its range.
        """
        known = dict(self.items())
        content = self.model_dump()
        for name, value in values.items():
            if name not in known:
                raise ValueError(f"{name!r} is not a parameter")
            *path, last = name.split(".")
            place = content
            for part in path:
                place = place[part]
            place[last]["value"] = value
        return Parameters.model_validate(content)


def _walk(prefix: str, content: Mapping[str, object]) -> Iterator[tuple[str, Parameter]]:
    for name, entry in content.items():
        if isinstance(entry, Parameter):
            yield f"{prefix}{name}", entry
        elif isinstance(entry, Mapping) and name != "source":
            yield from _walk(f"{prefix}{name}.", entry)


@cache
def shipped_parameters() -> Parameters:
    """Return the parameters that headway ships."""
    return load(SHIPPED, Parameters)
