"""A picture of a cluster's fabric as SVG: nodes, leaves, spines, cores, and how many cables lie between them.

Large fabrics repeat themselves: the first and the last of many equal things are drawn, with a gap between. A line is
drawn where there are cables; counts and rates in the labels are those of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from xml.sax.saxutils import escape

from topologies.cluster import Cluster
from topologies.fabric import FabricCounts, Wiring, count, wiring
from topologies.units import format_quantity

WIDTH, MARGIN, LABEL = 1000, 24, 150
ROW, BOX, STUB = 130, 34, 18
MOST_DRAWN = 4
"""Equal things that are drawn side by side before a gap stands for the rest."""
COLOURS = {"node": "#d9e8f6", "leaf": "#cfe9d4", "spine": "#fde6b3", "core": "#f6cfc5", "storage": "#e6dcf2"}
STYLE = "font-family:Helvetica,Arial,sans-serif;font-size:12px"


@dataclass(frozen=True, slots=True)
class _Box:
    kind: str
    number: int
    x: float
    y: float
    width: float

    @property
    def top(self) -> tuple[float, float]:
        return self.x + self.width / 2, self.y

    @property
    def bottom(self) -> tuple[float, float]:
        return self.x + self.width / 2, self.y + BOX


def fabric_svg(cluster: Cluster) -> str:
    """Draw a cluster's fabric; nodes that stand alone are drawn without switches."""
    wires, counts = wiring(cluster), count(cluster)
    levels = 1 if wires is None else wires.levels + 1
    floor = MARGIN + 40 + ROW * (levels - 1)
    height = floor + BOX + MARGIN + (ROW * 0.6 if cluster.storage_network else 0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" '
        f'height="{height:.0f}" role="img" style="{STYLE}">',
        f"<title>{escape(cluster.name)}</title>",
        f'<text x="{MARGIN}" y="{MARGIN + 4}" font-size="16" font-weight="bold">{escape(cluster.name)}</text>',
        f'<text x="{MARGIN}" y="{MARGIN + 24}">{escape(_headline(cluster, counts))}</text>',
    ]
    if wires is None or counts is None:
        parts += _draw(list(_boxes("node", cluster.num_nodes, floor)))
    else:
        parts += _drawn(cluster, wires, counts, floor)
    if cluster.storage_network is not None:
        parts.append(_storage(cluster, floor + ROW * 0.6))
    return "\n".join([*parts, "</svg>", ""])


def _headline(cluster: Cluster, counts: FabricCounts | None) -> str:
    gpus = f"{cluster.num_gpus:,} GPUs in {cluster.num_nodes:,} nodes, domains of {cluster.domain_size}"
    if counts is None:
        return f"{gpus}, no fabric"
    bisection = format_quantity(counts.bisection_bytes_per_second, "bytes_per_second")
    return (
        f"{gpus}; {cluster.fabric.kind}: {counts.switches:,} switches, {counts.links:,} cables, "
        f"about {counts.optics:,} transceivers, bisection {bisection}"
    )


def _drawn(cluster: Cluster, wires: Wiring, counts: FabricCounts, floor: float) -> list[str]:
    """Rows from the nodes up, joined to the row below."""
    totals = [cluster.num_nodes, *(level.switches for level in counts.levels)]
    names = ["node", *(level.name for level in counts.levels)]
    rows = [
        list(_boxes(name, total, floor - ROW * level))
        for level, (name, total) in enumerate(zip(names, totals, strict=True))
    ]
    cables = [
        _node_cables(cluster, wires),
        _uplinks(wires.uplinks_per_leaf, "leaf", wires.spines_per_pod, "spine", "pod"),
        _uplinks(wires.uplinks_per_spine, "spine", wires.cores_per_group, "core", "group"),
    ]
    parts: list[str] = []
    for level, upper in enumerate(rows[1:]):
        tier = cluster.fabric.tiers[level]
        parts += _cables(rows[level], upper, wires, tier.nodes if level == 0 else 1)
        y = floor - ROW * level - (ROW - BOX) / 2
        taper = f", {tier.oversubscription:g}:1" if tier.oversubscription > 1 else ""
        parts.append(_text(y, f"{counts.levels[level].links:,} cables{taper}", bold=True))
        parts.append(_text(y + 15, cables[level]))
    for row in rows:
        parts += _draw(row)
    for level, name in enumerate(names):
        y = floor - ROW * level + BOX / 2
        what = f"{totals[level]:,} {_plural(name, totals[level])}"
        used = f"{counts.levels[level - 1].ports_used} of {counts.levels[level - 1].ports} ports" if level else ""
        parts.append(_text(y, what, bold=True))
        parts.append(_text(y + 15, used or f"{cluster.node.gpus_per_node} GPUs each"))
    return parts


def _node_cables(cluster: Cluster, wires: Wiring) -> str:
    rate = format_quantity(wires.link_bytes_per_second, "bytes_per_second")
    rails = f"{cluster.fabric.rails} rails" if cluster.fabric.kind != "fat-tree" else "one ToR a rack"
    planes = ", two planes" if cluster.fabric.kind == "dual-plane" else ""
    return f"{cluster.node.nics_per_node} NICs a node, {rate} a cable, {rails}{planes}"


def _uplinks(links: int, lower: str, switches: int, upper: str, part: str) -> str:
    return (
        f"{links} {'uplink' if links == 1 else 'uplinks'} a {lower} to {switches} {_plural(upper, switches)} a {part}"
    )


def _joined(lower: _Box, upper: _Box, wires: Wiring, near: int) -> bool:
    """Whether cables lie between two; switches are numbered network by network, as ``topologies.fabric.graph`` does."""
    if upper.kind == "leaf":
        return upper.number // wires.leaves_per_group % wires.groups == lower.number // near
    if upper.kind == "spine":
        network, group = divmod(lower.number // wires.leaves_per_group, wires.groups)
        return upper.number // wires.spines_per_pod == network * wires.pods + group // wires.groups_per_pod
    pod, spine = divmod(lower.number, wires.spines_per_pod)
    return upper.number // wires.cores_per_group == pod // wires.pods * wires.spines_per_pod + spine


def _boxes(kind: str, total: int, y: float) -> Iterator[_Box | float]:
    """Boxes of a row; a number is the middle of a gap."""
    room = WIDTH - 2 * MARGIN - LABEL
    drawn = list(range(total)) if total <= 2 * MOST_DRAWN else [*range(MOST_DRAWN), -1, *range(total - 2, total)]
    step = room / len(drawn)
    for place, number in enumerate(drawn):
        x = MARGIN + LABEL + place * step
        if number < 0:
            yield x + step / 2
        else:
            yield _Box(kind, number, x + 4, y, step - 8)


def _draw(row: list[_Box | float]) -> list[str]:
    parts = []
    y = next(box.y for box in row if isinstance(box, _Box))
    for box in row:
        if isinstance(box, _Box):
            middle, base = box.x + box.width / 2, box.y + BOX / 2 + 4
            parts.append(
                f'<rect x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{BOX}" rx="4" '
                f'fill="{COLOURS[box.kind]}" stroke="#555"/>'
                f'<text x="{middle:.1f}" y="{base:.1f}" text-anchor="middle">{box.kind} {box.number}</text>'
            )
        else:
            parts.append(f'<text x="{box:.1f}" y="{y + BOX / 2 + 4:.1f}" text-anchor="middle">. . .</text>')
    return parts


def _cables(lower: list[_Box | float], upper: list[_Box | float], wires: Wiring, near: int) -> Iterator[str]:
    """Lines between the boxes of two rows; dashes lead to what is not drawn."""
    below, above = ([box for box in row if isinstance(box, _Box)] for row in (lower, upper))
    joined = [(box, other) for box in below for other in above if _joined(box, other, wires, near)]
    for box, other in joined:
        yield _line(box.top, other.bottom)
    for box in above:
        if box.number not in {other.number for _, other in joined}:
            x, y = box.bottom
            for aside in (-STUB, 0, STUB):
                yield _line((x, y), (x + aside, y + STUB), ' stroke-dasharray="3 3"')


def _line(start: tuple[float, float], end: tuple[float, float], style: str = "") -> str:
    (x, y), (u, v) = start, end
    return f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{u:.1f}" y2="{v:.1f}" stroke="#999" stroke-width="0.8"{style}/>'


def _storage(cluster: Cluster, y: float) -> str:
    network = cluster.storage_network
    assert network is not None
    rate = format_quantity(network.bandwidth_bytes_per_second, "bytes_per_second")
    stores = ", ".join(store.name for store in cluster.storage if not store.per_node) or "management"
    width = WIDTH - 2 * MARGIN - LABEL
    return (
        f'<rect x="{MARGIN + LABEL}" y="{y:.1f}" width="{width}" height="{BOX}" rx="4" '
        f'fill="{COLOURS["storage"]}" stroke="#555"/>'
        f'<text x="{MARGIN + LABEL + width / 2:.1f}" y="{y + BOX / 2 + 4:.1f}" text-anchor="middle">'
        f"storage network of its own: {rate} a node, {network.oversubscription:g}:1, to {escape(stores)}</text>"
    )


def _text(y: float, text: str, *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ' font-size="10" fill="#444"'
    words, lines = text.split(), [""]
    for word in words:
        if len(lines[-1]) + len(word) > 28:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "".join(
        f'<text x="{MARGIN}" y="{y + 12 * number:.1f}"{weight}>{escape(line)}</text>'
        for number, line in enumerate(lines)
    )


def _plural(name: str, number: int) -> str:
    if number == 1:
        return name
    return {"leaf": "leaves"}.get(name, f"{name}s")
