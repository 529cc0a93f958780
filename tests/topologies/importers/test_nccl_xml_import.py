from collections.abc import Callable
from pathlib import Path

import pytest

from topologies.errors import InputError
from topologies.importers.nccl_xml import import_nccl_xml

Practitioner = Callable[[str], tuple[str, Path]]

SMALL = """<system version="1">
  <cpu numaid="1" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143">
    <pci busid="0000:10:00.0" class="0x060400" link_speed="16.0 GT/s PCIe" link_width="16">
      <pci busid="0000:11:00.0" class="0x030200" vendor="0x10de" device="0x20b2" link_speed="16 GT/s" link_width="16">
        <gpu dev="0" sm="80" rank="0" gdr="1"><nvlink target="0000:21:00.0" count="12" tclass="0x030200"/></gpu>
      </pci>
      <pci busid="0000:12:00.0" class="0x060400" link_speed="8.0 GT/s PCIe" link_width="16">
        <pci busid="0000:13:00.0" class="0x020700" link_speed="16.0 GT/s PCIe" link_width="16">
          <nic><net name="mlx5_0" speed="100000" port="1" guid="0x1" gdr="1"/></nic>
        </pci>
        <pci busid="0000:14:00.0" class="0x020700" link_speed="16.0 GT/s PCIe" link_width="16">
          <nic><net name="mlx5_1" speed="100000" port="1" guid="0x2" gdr="1"/></nic>
        </pci>
      </pci>
    </pci>
  </cpu>
  <cpu numaid="0" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143">
    <pci busid="0000:21:00.0" class="0x030200" vendor="0x10de" device="0x20b2" link_speed="" link_width="0">
      <gpu dev="1" sm="80" rank="1" gdr="1"><nvlink target="0000:11:00.0" count="12" tclass="0x030200"/></gpu>
    </pci>
  </cpu>
</system>"""


def said(warnings: tuple[str, ...], *words: str) -> bool:
    return any(all(word in warning for word in words) for warning in warnings)


def test_a_small_node() -> None:
    topology = import_nccl_xml(SMALL)
    first, second = topology.gpus
    assert [port.name for port in topology.near_ports(first)] == ["mlx5_0", "mlx5_1"]
    assert topology.near_ports(second) == ()
    assert (first.product, first.nvlinks) == ("a100-80gb", {"0000:21:00.0": 12})
    assert topology.node_bytes_per_second == 25e9
    assert said(topology.warnings, "1 GPUs share no PCIe bridge with a NIC", "0000:21:00.0")
    assert said(topology.warnings, "not NUMA order (1,0)")
    assert said(topology.warnings, "PCIe speed unknown")


def test_two_nics_behind_one_slow_link_are_told() -> None:
    """Both NICs behind one PCIe 3.0 x16 link, which NCCL counts as 12 GB/s: half of what they could send (E.41)."""
    assert said(import_nccl_xml(SMALL).warnings, "mlx5_0, mlx5_1 (25 GB/s) share one PCIe link of 12 GB/s")


def test_islands_follow_links_and_switches() -> None:
    assert import_nccl_xml(SMALL).islands == (("0000:11:00.0", "0000:21:00.0"),)
    switched = SMALL.replace('target="0000:21:00.0"', 'target="s"').replace('target="0000:11:00.0"', 'target="s"')
    assert len(import_nccl_xml(switched).islands) == 1
    apart = SMALL.replace('target="0000:11:00.0"', 'target="elsewhere"').replace('target="0000:21:00.0"', 'target="s"')
    assert len(import_nccl_xml(apart).islands) == 2


def test_ports_of_one_guid_are_one_card() -> None:
    topology = import_nccl_xml(SMALL.replace('guid="0x2"', 'guid="0x1"'))
    assert [len(card) for card in topology.cards] == [2]
    assert said(topology.warnings, "several ports of one GUID", "NCCL_CROSS_NIC=0")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SMALL[: len(SMALL) // 2], r"^x:\d+:\d+: is not valid XML.*truncated"),
        ("<?xml version='1.0'?><!DOCTYPE s [<!ENTITY a 'aaaa'><!ENTITY b '&a;&a;'>]><system>&b;</system>", "entities"),
        ("<?xml version='1.0'?><!DOCTYPE s [<!ENTITY a SYSTEM 'file:///etc/passwd'>]><system>&a;</system>", "entities"),
        ("<graphs/>", "holds <graphs> at its top"),
        ("<system version='1'/>", "describes no GPU"),
        (SMALL.replace('count="12"', 'count="many"'), "count='many' of <nvlink> is not a whole number"),
        ("", "is empty"),
        ("\0", "is not a text file"),
    ],
)
def test_bad_and_hostile_xml_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        import_nccl_xml(text, "x")


def test_azure_ndv5(practitioner: Practitioner) -> None:
    topology = import_nccl_xml(*practitioner("nccl_xml/01"))
    assert (len(topology.gpus), len(topology.ports), topology.numa_nodes) == (8, 8, (0, 1))
    assert all(len(topology.near_ports(gpu)) == 1 for gpu in topology.gpus)
    assert topology.near_ports(topology.gpus_by_bus[3])[0].bus_id == "0104:00:00.0"
    assert topology.node_bytes_per_second is None
    assert said(topology.warnings, "without a rate")


def test_azure_ndv4_counts_gpus_by_bus_id(practitioner: Practitioner) -> None:
    topology = import_nccl_xml(*practitioner("nccl_xml/02"))
    assert topology.numa_nodes == (0, 1, 2, 3)
    assert [gpu.bus_id[:4] for gpu in topology.gpus_by_bus] == [
        "0001",
        "0002",
        "0003",
        "0004",
        "000b",
        "000c",
        "000d",
        "000e",
    ]
    assert [gpu.numa for gpu in topology.gpus_by_bus] == [1, 1, 0, 0, 3, 3, 2, 2]
    assert all(len(topology.near_ports(gpu)) == 2 for gpu in topology.gpus)
    assert said(topology.warnings, "index 0 sits on NUMA 1")


def test_oci_h100_with_dual_port_nics(practitioner: Practitioner) -> None:
    topology = import_nccl_xml(*practitioner("nccl_xml/03"))
    assert (len(topology.gpus), len(topology.ports), len(topology.cards)) == (8, 16, 8)
    assert topology.node_bytes_per_second == pytest.approx(2880e9 / 8)
    assert all(sorted(gpu.nvlinks.values()) == [4, 4, 5, 5] for gpu in topology.gpus)
    assert {gpu.product for gpu in topology.gpus} == {"h100-sxm"}
    assert said(topology.warnings, "8 cards have several ports of one GUID")
    assert said(topology.warnings, "180 Gbit/s is no standard rate")


def test_v100_with_one_visible_gpu_and_no_link_speed(practitioner: Practitioner) -> None:
    topology = import_nccl_xml(*practitioner("nccl_xml/04"))
    (gpu,) = topology.gpus
    assert sum(gpu.nvlinks.values()) == 6
    assert gpu.pcie_bytes_per_second == 16 * 60 * 100e6 / 8
    assert topology.near_ports(gpu) == ()
    assert said(topology.warnings, "1 GPU visible")


def test_mi300x(practitioner: Practitioner) -> None:
    topology = import_nccl_xml(*practitioner("nccl_xml/05"))
    assert topology.version == "2"
    assert sum(len(gpu.xgmi) for gpu in topology.gpus) == 56
    assert {gpu.gcn for gpu in topology.gpus} == {"gfx942"}
    assert topology.node_bytes_per_second == 8 * 50e9
    assert topology.warnings == ()


def test_placeholder_speeds_are_unknown(practitioner: Practitioner) -> None:
    topology = import_nccl_xml(*practitioner("nccl_xml/08"))
    assert {port.mbit_per_second for port in topology.ports} == {200_000_000}
    assert topology.node_bytes_per_second is None
    assert said(topology.warnings, "25,000 GB/s", "placeholder")
