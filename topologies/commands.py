"""``headway topology``: list, show, check and import hardware and clusters."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click
from rich.markup import escape
from rich.table import Table

from topologies.catalog import KINDS, find
from topologies.checks import Finding, power_watts
from topologies.cluster import Cluster
from topologies.console import command, console, json_option, print_json, say, write_output
from topologies.curves import Curves
from topologies.document import FileDocument, load, shipped
from topologies.drawing import fabric_svg
from topologies.errors import InputError
from topologies.fabric import count
from topologies.hardware import CATALOG, Gpu, Nic, Node
from topologies.importers import Choices, import_file
from topologies.importers.assemble import to_yaml
from topologies.importers.checking import check_named
from topologies.importers.facts import facts, flat
from topologies.summary import hardware, reaches, summary
from topologies.units import UNITS, format_quantity


@click.group()
def topology() -> None:
    """List, show and check hardware and clusters."""


@command("list")
@json_option
def list_command(as_json: bool) -> None:
    """List what is shipped: clusters, nodes, GPUs, NICs, published logs of collectives."""
    found = {
        folder: [_row(name, load(path, model)) for name, path in shipped(CATALOG / folder).items()]
        for folder, model in KINDS.items()
    }
    if as_json:
        print_json(found)
        return
    for folder, rows in found.items():
        table = Table(title=folder, title_justify="left", box=None, pad_edge=False)
        for heading in rows[0]:
            table.add_column(
                _without_unit(heading), justify="left" if heading in ("name", "title", "collectives") else "right"
            )
        for row in rows:
            table.add_row(*(_shown(key, value) for key, value in row.items()))
        console().print(table)
        console().print()


def _row(name: str, document: FileDocument) -> dict[str, Any]:
    row: dict[str, Any] = {"name": name, "title": document.name}
    match document:
        case Cluster():
            row |= {"num_gpus": document.num_gpus, "num_nodes": document.num_nodes, "gpu": document.gpu.name}
            row |= {"domain_size": document.domain_size, "fabric": document.fabric.kind}
        case Node():
            row |= {"gpus_per_node": document.gpus_per_node, "gpu": document.gpu.name}
            row |= {"bus_bandwidth_bytes_per_second": document.scale_up.bus_bandwidth_bytes_per_second}
            row |= {"network_bytes_per_second_per_gpu": document.network_bytes_per_second_per_gpu}
            row |= {"power_watts": document.power_watts}
        case Gpu():
            peaks = document.peak_flop_per_second
            row |= {f"{kind}_flop_per_second": peaks.get(kind) for kind in ("bf16", "fp8", "nvfp4")}
            row |= {"usable_memory_bytes": document.usable_memory_bytes}
            row |= {"memory_bandwidth_bytes_per_second": document.memory_bandwidth_bytes_per_second}
            row |= {"power_watts": document.power_watts}
        case Curves():
            row |= {"collectives": ", ".join(f"{one.kind} of {one.ranks}" for one in document.curves)}
        case Nic():
            row |= {"bandwidth_bytes_per_second": document.bandwidth_bytes_per_second}
    return row


@command()
@click.argument("name")
@click.option("--svg", "-o", metavar="FILE", help="Draw the fabric of a cluster as SVG; '-' is stdout.")
@json_option
def show(name: str, svg: str | None, as_json: bool) -> None:
    """Show a cluster, node, GPU, NIC or log of collectives by NAME or from a file."""
    document = find(name)
    if svg is not None:
        if not isinstance(document, Cluster):
            raise InputError(f"{name!r} is no cluster, and only a cluster has a fabric to draw", key="--svg")
        write_output(svg, fabric_svg(document))
        if svg == "-":
            return
    if isinstance(document, Cluster):
        if as_json:
            print_json(summary(document))
        else:
            _show_cluster(document)
    elif isinstance(document, Gpu | Nic | Node):
        content = hardware(document)
        if as_json:
            print_json(content | {"source": document.source})
        else:
            console().print(_facts(content))
            _show_sources(document)
    elif isinstance(document, Curves):
        if as_json:
            print_json(document.model_dump(exclude={"version"}))
        else:
            _show_curves(document)


def _show_curves(found: Curves) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in ("collective", "ranks", "size", "time"):
        table.add_column(heading, justify="left" if heading == "collective" else "right")
    for curve in found.curves:
        for size, seconds in curve.times_seconds.items():
            table.add_row(curve.kind, str(curve.ranks), size, format_quantity(seconds, "seconds"))
    console().print(escape(found.name), table)
    for curve in found.curves:
        console().print(f"{curve.kind} of {curve.ranks}: {escape(curve.origin)}", style="dim")


def _show_cluster(cluster: Cluster) -> None:
    out, gpu = console(), cluster.gpu
    fabric, counts = cluster.fabric, count(cluster)
    memory = format_quantity(gpu.usable_memory_bytes, "bytes")
    out.print(f"[bold]{escape(cluster.name)}[/bold]: {cluster.num_gpus:,} GPUs in {cluster.num_nodes:,} nodes")
    for pool in cluster.pools:
        out.print(f"{pool.num_nodes:,} x {pool.node.name} ({pool.node.gpus_per_node} x {pool.node.gpu.name})")
    out.print(f"{memory} usable a GPU, {cluster.domain_size} GPUs a scale-up domain, fabric {fabric.kind}\n")

    table = Table(box=None, pad_edge=False)
    for heading in ("reach", "GPUs", "oversubscription", "rate per GPU", "usable", "latency"):
        table.add_column(heading, justify="left" if heading == "reach" else "right")
    for level in reaches(cluster):
        rate = format_quantity(level.bytes_per_second_per_gpu, "bytes_per_second")
        usable = format_quantity(level.usable_bytes_per_second_per_gpu, "bytes_per_second")
        latency = format_quantity(level.latency_seconds, "seconds")
        table.add_row(level.name, f"{level.gpus:,}", f"{level.oversubscription:g}:1", rate, usable, latency)
    out.print(table)

    if counts is not None:
        table = Table(box=None, pad_edge=False)
        for heading in ("switches", "count", "cables from below", "ports used"):
            table.add_column(heading, justify="left" if heading == "switches" else "right")
        for switch in counts.levels:
            ports = f"{switch.ports_used} of {switch.ports}"
            table.add_row(switch.name, f"{switch.switches:,}", f"{switch.links:,}", ports)
        bisection = format_quantity(counts.bisection_bytes_per_second, "bytes_per_second")
        out.print()
        out.print(table)
        out.print(f"about {counts.optics:,} transceivers; bisection {bisection}, one direction")

    out.print()
    for store in cluster.storage:
        write = format_quantity(store.write_bytes_per_second, "bytes_per_second")
        read = format_quantity(store.read_bytes_per_second, "bytes_per_second")
        out.print(f"{store.name}: write {write}, read {read}{' a node' if store.per_node else ''}")
    megawatts = format_quantity(power_watts(cluster), "watts")
    out.print(f"power: at most {megawatts} with a PUE of {cluster.power.pue:g}; switches and storage not included\n")
    _show_sources(cluster)


def _facts(content: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    for key, value in content.items():
        inner = {f"{key}.{below}": entry for below, entry in value.items()} if isinstance(value, dict) else {key: value}
        for name, entry in inner.items():
            unit = key if key.startswith("peak") else name.rpartition(".")[2]
            label = name.replace("_flop_per_second.", " ") if key.startswith("peak") else name
            table.add_row(_without_unit(label), _shown(unit, entry))
    return table


def _shown(key: str, value: Any) -> str:
    dimension = _dimension(key)
    if value is None:
        return "-"
    if dimension and isinstance(value, float):
        return format_quantity(value, dimension, digits=4)
    return f"{value:,}" if isinstance(value, int) else str(value)


def _dimension(key: str) -> str | None:
    plain = key.removesuffix("_per_gpu")
    return next((unit for unit in sorted(UNITS, key=len, reverse=True) if plain.endswith(f"_{unit}")), None)


def _without_unit(key: str) -> str:
    dimension = _dimension(key)
    return (key.replace(f"_{dimension}", "") if dimension else key).replace("_", " ")


def _show_sources(document: FileDocument) -> None:
    console().print("sources")
    for key, source in document.source.items():
        console().print(f"  {key}: {source}", style="dim", highlight=False, markup=False)


@command("check")
@click.argument("name")
@json_option
@click.pass_context
def check_command(context: click.Context, name: str, as_json: bool) -> None:
    """Check a cluster by NAME or from a file, or what a tool printed; exit 1 where it cannot be built or used.

    What 'topology import' reads can be checked as it is: links that are missing or in the wrong place, parts without a
    way to each other, oversubscription, GPUs without a near NIC.
    """
    title, findings = check_named(name)
    failures = [finding for finding in findings if finding.level == "failure"]
    if as_json:
        print_json({"name": title, "ok": not failures, "findings": [asdict(finding) for finding in findings]})
    else:
        _tell(title, findings)
    if failures:
        context.exit(1)


def _tell(title: str, findings: list[Finding]) -> None:
    for finding in findings:
        click.echo(f"{finding.level}: {finding.rule}: {finding.text}")
    failures = sum(finding.level == "failure" for finding in findings)
    click.echo(f"{title}: {failures} failures, {len(findings) - failures} warnings")


@command("import")
@click.argument("file", type=click.Path(dir_okay=False))
@click.option("-o", "output", metavar="FILE", help="Write a cluster (YAML); - is stdout.")
@click.option("--gpu", help="GPU of the catalog, or a path, where FILE does not say it.")
@click.option("--node", help="Node of the catalog, or a path, where FILE tells only how nodes are joined.")
@click.option("--nic", help="NIC of the catalog, or a path, where FILE does not say the rate.")
@click.option("--cluster", help="Cluster on which a log of nccl-tests was measured.")
@click.option("--part", help="Switch or topology of FILE to take.")
@click.option("--collective", help="Program of nccl-tests, such as all_reduce, where the log does not say it.")
@click.option("--ranks", type=click.IntRange(min=2), help="Ranks of a log of nccl-tests, checked against its numbers.")
@json_option
def import_command(file: str, output: str | None, as_json: bool, **choices: Any) -> None:
    """Read what a tool printed or a scheduler uses: topologies, labels, nccl-tests and NCCL logs."""
    found = import_file(file, Choices(**choices))
    for warning in found.warnings:
        say(f"warning: {warning}")
    if output is not None:
        if found.cluster is None:
            raise found.undetermined or InputError("determines no cluster", file=file)
        write_output(output, to_yaml(found.cluster))
    if as_json:
        missing = None if found.undetermined is None else str(found.undetermined)
        said = {"file": found.file, "format": found.format, "found": facts(found.content)}
        print_json(said | {"warnings": found.warnings, "cluster": found.cluster, "undetermined": missing})
    elif output != "-":
        click.echo(f"{found.file}: {found.format}")
        for name, value in flat(facts(found.content)).items():
            click.echo(f"  {name}: {value}")
        if found.undetermined is not None:
            say(f"no cluster: {found.undetermined}")


for each in (list_command, show, check_command, import_command):
    topology.add_command(each)
