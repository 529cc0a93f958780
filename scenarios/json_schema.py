"""JSON Schemas of the documents, for editors: the keys as files spell them, quantities as text with a unit."""

from __future__ import annotations

from typing import Any

from scenarios.faults import Faults
from scenarios.model import ModelSpec
from scenarios.prices import Prices
from scenarios.scenario import Scenario
from topologies.cluster import Cluster
from topologies.document import FileDocument
from topologies.hardware import Gpu, Nic, Node

DOCUMENTS: dict[str, type[FileDocument]] = {
    "scenario": Scenario,
    "cluster": Cluster,
    "model": ModelSpec,
    "gpu": Gpu,
    "nic": Nic,
    "node": Node,
    "faults": Faults,
    "prices": Prices,
}
"""What ``headway schema`` can describe."""


def document_schema(kind: str) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a kind of document.

    Raises:
        ValueError: the kind is not one of DOCUMENTS.
    """
    if kind not in DOCUMENTS:
        raise ValueError(f"{kind!r} is not one of {', '.join(DOCUMENTS)}")
    schema = DOCUMENTS[kind].model_json_schema(by_alias=True)
    change = {"scenario": _lift_model_and_stack, "cluster": _allow_one_pool, "model": _allow_hugging_face_keys}
    if kind in change:
        schema = change[kind](schema)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _lift_model_and_stack(schema: dict[str, Any]) -> dict[str, Any]:
    """In a file these keys of the job stand at the top level."""
    job = schema["$defs"]["Job"]
    lifted = {key: job["properties"].pop(key) for key in ("model", "stack") if key in job["properties"]}
    needed = [key for key in lifted if key in job.get("required", [])]
    job["required"] = [key for key in job.get("required", []) if key not in lifted]
    properties = {**schema["properties"], **lifted}
    return {**schema, "properties": properties, "required": [*schema["required"], *needed]}


def _allow_one_pool(schema: dict[str, Any]) -> dict[str, Any]:
    """A cluster of one pool gives its node and number of nodes at the top level."""
    pool = schema["$defs"]["Pool"]["properties"]
    properties = {**schema["properties"], "node": pool["node"], "num_nodes": pool["num_nodes"]}
    forms = [{"required": ["pools"]}, {"required": ["node", "num_nodes"]}]
    required = [key for key in schema["required"] if key != "pools"]
    return {**schema, "properties": properties, "required": required, "oneOf": forms}


def _allow_hugging_face_keys(schema: dict[str, Any]) -> dict[str, Any]:
    """A model file is a ModelSpec, or has the keys of a Hugging Face config, which are many and not listed."""
    definitions = schema.pop("$defs", {})
    config = {"type": "object", "required": ["model_type"], "properties": {"model_type": {"type": "string"}}}
    return {"title": "Model", "$defs": definitions, "anyOf": [schema, config]}
