"""``headway collective``: one collective on a cluster, by NCCL's choice or as flows on links."""

from __future__ import annotations

from typing import get_args

import click
from rich.markup import escape

from simulator.collective_answer import CollectiveAnswer, answer_collective
from simulator.disturbance_texts import BESIDE_HELP, DEAD_HELP, SLOW_LINK_HELP, read_faults, read_others
from topologies.catalog import load_cluster
from topologies.cluster import CollectiveKind
from topologies.console import command, console, inputs_json, json_option, print_json, say, tell_inputs
from topologies.document import InputFile
from topologies.errors import Infeasible, InputError
from topologies.units import format_quantity, parse_quantity


@command()
@click.argument("kind", type=click.Choice(get_args(CollectiveKind)))
@click.option("--cluster", "cluster_name", required=True, metavar="NAME|FILE", help="See 'headway topology list'.")
@click.option("--gpus", type=click.IntRange(min=2), required=True, help="Ranks, packed node by node.")
@click.option("--bytes", "size", required=True, metavar="SIZE", help="The whole buffer as in nccl-tests: '8 GiB'.")
@click.option("--flows", is_flag=True, help="Play it on the links of the fabric instead of NCCL's own model.")
@click.option("--dead", multiple=True, metavar="LINK", help=f"{DEAD_HELP} Plays flows.")
@click.option("--slow-link", multiple=True, metavar="LINK=SHARE", help=f"{SLOW_LINK_HELP} Plays flows.")
@click.option("--beside", multiple=True, metavar="KIND:FIRST-LAST:SIZE", help=f"{BESIDE_HELP} Plays flows.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of hashed paths.")
@json_option
def collective(
    kind: CollectiveKind,
    cluster_name: str,
    gpus: int,
    size: str,
    flows: bool,
    dead: tuple[str, ...],
    slow_link: tuple[str, ...],
    beside: tuple[str, ...],
    seed: int,
    as_json: bool,
) -> None:
    """Predict one collective of KIND on a cluster."""
    try:
        size_bytes = parse_quantity(size, "bytes")
    except ValueError as error:
        what, _, hint = str(error).partition("; ")
        raise InputError(what, hint=hint or None, key="--bytes") from None
    inputs: list[InputFile] = []
    cluster = load_cluster(cluster_name, inputs)
    tell_inputs(inputs)
    if gpus > cluster.num_gpus:
        raise Infeasible(
            f"a collective on {cluster.name}",
            needed=f"{gpus} GPUs",
            available=str(cluster.num_gpus),
            relax=("fewer --gpus", "a larger cluster"),
        )
    faults, others = read_faults(dead, slow_link), read_others(beside)
    found = answer_collective(kind, cluster, gpus, size_bytes, flows=flows, faults=faults, others=others, seed=seed)
    for warning in found.warnings:
        say(f"warning: {warning}")
    if as_json:
        asked = {"kind": kind, "gpus": gpus, "bytes": size_bytes, "inputs": inputs_json(inputs)}
        print_json(found.as_json() | asked)
        return
    console().print(f"{kind} of {format_quantity(size_bytes, 'bytes')} over {gpus} GPUs of {escape(cluster.name)}")
    _show_collective(found)


def _show_collective(found: CollectiveAnswer) -> None:
    out, time = console(), found.time
    out.print(
        f"{format_quantity(time.seconds, 'seconds', 4)}, "
        f"algbw {format_quantity(time.algbw_bytes_per_second, 'bytes_per_second', 4)}, "
        f"busbw {format_quantity(time.busbw_bytes_per_second, 'bytes_per_second', 4)} "
        f"({escape(time.algorithm)}, {escape(time.protocol)})"
    )
    played = found.played
    more = f" and {played.bottlenecks - 1:,} like it" if played is not None and played.bottlenecks > 1 else ""
    out.print(f"bound by {escape(found.bottleneck)}{more}")
    if played is not None and found.closed_form is not None:
        out.print(
            f"{played.flows:,} flows in {played.flow_classes:,} classes; at most {_told(played.high_seconds)} where "
            f"unequal flows share links; NCCL's model alone: {_told(found.closed_form.seconds)}"
        )
    if found.beside_seconds is not None:
        out.print(f"beside the other jobs, which go on all the time: {_told(found.beside_seconds)}")
    out.print(f"basis: {escape(found.basis)}", style="dim")
    out.print(f"not modelled: {'; '.join(found.not_modelled)}", style="dim")


def _told(seconds: float) -> str:
    return format_quantity(seconds, "seconds")
