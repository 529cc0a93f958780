"""A rail-optimized subnet as ibnetdiscover prints it, whole and damaged: what is missing or crossed is named."""

import json

import pytest
from click.testing import CliRunner

from planner.cli import headway
from topologies.importers.ibnetdiscover import import_ibnetdiscover

RAILS, HOSTS, SPINES, CABLES = 4, 6, 3, 2


def subnet(*, cut=(), crossed=(), down=()):
    """Text of a fabric of ``RAILS`` leaves and ``SPINES`` spines.

    ``cut``: (leaf, spine, cable) that are not there; ``crossed``: (host, rail, rail) that are swapped; ``down``:
    (host, rail) without a link.
    """
    ports = {}
    lines = []

    def port(switch):
        ports[switch] = ports.get(switch, 0) + 1
        return ports[switch]

    blocks = {
        f"S-{kind}{number}": [] for kind, count in (("leaf", RAILS), ("spine", SPINES)) for number in range(count)
    }
    hosts = {}
    for host in range(HOSTS):
        for rail in range(RAILS):
            if (host, rail) in down:
                continue
            leaf = rail
            for who, one, other in crossed:
                if who == host:
                    leaf = other if rail == one else one if rail == other else leaf
            here, guid = port(f"S-leaf{leaf}"), f"H-{host}.{rail}"
            blocks[f"S-leaf{leaf}"].append(f'[{here}] "{guid}"[1](a) # "node-{host} mlx5_{rail}" lid 1 4xNDR')
            hosts[guid] = (f"node-{host} mlx5_{rail}", f'[1](a) "S-leaf{leaf}"[{here}] # lid 1 "leaf" lid 2 4xNDR')
    for leaf in range(RAILS):
        for spine in range(SPINES):
            for cable in range(CABLES):
                if (leaf, spine, cable) in cut:
                    continue
                low, high = port(f"S-leaf{leaf}"), port(f"S-spine{spine}")
                blocks[f"S-leaf{leaf}"].append(f'[{low}] "S-spine{spine}"[{high}] # "spine {spine}" lid 3 4xNDR')
                blocks[f"S-spine{spine}"].append(f'[{high}] "S-leaf{leaf}"[{low}] # "leaf {leaf}" lid 4 4xNDR')
    for guid, rows in blocks.items():
        lines += [f"switchguid=0x{guid}", f'Switch 64 "{guid}" # "{guid[2:]}" enhanced port 0', *rows, ""]
    for guid, (name, row) in hosts.items():
        lines += [f"caguid=0x{guid}", f'Ca 1 "{guid}" # "{name}"', row, ""]
    return "\n".join(lines)


def test_a_whole_fabric_lacks_nothing():
    assert import_ibnetdiscover(subnet()).warnings == ()


def test_a_missing_cable_is_named_with_what_its_peers_have():
    (warning,) = [one for one in import_ibnetdiscover(subnet(cut=[(2, 1, 0)])).warnings if "missing" in one]
    assert (
        warning == "missing links: 1 of 12 pairs of switches have fewer cables than others: leaf2 to spine1 has 1 of 2"
    )
    both = import_ibnetdiscover(subnet(cut=[(2, 1, 0), (2, 1, 1), (0, 0, 1)])).warnings
    (warning,) = [one for one in both if "missing" in one]
    assert "leaf2 to spine1 has 0 of 2" in warning
    assert "leaf0 to spine0 has 1 of 2" in warning


def test_crossed_rails_are_named():
    (warning,) = import_ibnetdiscover(subnet(crossed=[(4, 1, 3)])).warnings
    assert warning.startswith("rails crossed: 2 adapters")
    assert "node-4 mlx5_1 to leaf3" in warning
    assert "node-4 mlx5_3 to leaf1" in warning


def test_a_port_that_is_down_is_named():
    warnings = import_ibnetdiscover(subnet(down=[(5, 2)])).warnings
    assert "missing links: 1 ports that other hosts have are not there: node-5 mlx5_2" in warnings


@pytest.mark.parametrize(("damage", "code"), [({}, 0), ({"cut": [(2, 1, 0)]}, 1), ({"crossed": [(4, 1, 3)]}, 1)])
def test_check_reads_what_the_tool_printed(damage, code, tmp_path):
    path = tmp_path / "subnet.txt"
    path.write_text(subnet(**damage))
    found = CliRunner().invoke(headway, ["topology", "check", str(path), "--json"])
    assert found.exit_code == code
    content = json.loads(found.stdout)
    assert content["ok"] == (code == 0)
    assert [one["level"] for one in content["findings"]].count("failure") == len(damage)
