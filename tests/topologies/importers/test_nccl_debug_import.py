from collections.abc import Callable
from pathlib import Path

import pytest

from topologies.errors import InputError
from topologies.importers.nccl_debug import import_nccl_debug

Practitioner = Callable[[str], tuple[str, Path]]

SMALL = """\
NCCL version 2.27.5+cuda12.9
h1:10:11 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.1<0>
h1:10:11 [0] NCCL INFO Using network IB
h1:10:11 [0] NCCL INFO Channel 00/02 :    0   1   2   3
h1:10:11 [0] NCCL INFO Channel 01/02 :    0   1   2   3
h1:10:11 [1] NCCL INFO Channel 00/0 : 1[1] -> 2[0] [send] via NET/IB/1/GDRDMA
h2:10:11 [0] NCCL INFO Channel 00/0 : 1[1] -> 2[0] [receive] via NET/IB/0/GDRDMA
h1:10:11 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
h1:10:11 [0] NCCL INFO 2 coll channels, 2 collnet channels, 16 nvls channels, 4 p2p channels, 2 p2p channels per peer
"""


def said(warnings: tuple[str, ...], *words: str) -> bool:
    return any(all(word in warning for word in words) for warning in warnings)


def test_rails_that_cross_are_told() -> None:
    log = import_nccl_debug(SMALL)
    assert (log.version, log.hosts, log.ranks, log.channels) == ("2.27.5+cuda12.9", ("h1", "h2"), 4, 2)
    assert log.nics == {0: "mlx5_0", 1: "mlx5_1"}
    assert len(log.crossings) == 1
    assert (log.gdr, log.nvls) == (True, True)
    assert said(log.warnings, "rails cross on 1 connections", "NIC 1", "NIC 0")


def test_equal_nics_do_not_cross_and_lost_gpudirect_is_told() -> None:
    log = import_nccl_debug(SMALL.replace("NET/IB/1/GDRDMA", "NET/IB/0").replace("NET/IB/0/GDRDMA", "NET/IB/0"))
    assert log.crossings == ()
    assert log.gdr is False
    assert said(log.warnings, "2 of 2 hops between nodes go without GPUDirect")
    assert said(log.warnings, "NICs 1 (mlx5_1) carry nothing")


def test_sockets_and_forced_settings_are_told() -> None:
    text = (
        SMALL.replace("NET/IB/1/GDRDMA", "NET/Socket/0")
        + "h1:10:11 [0] NCCL INFO NCCL_ALGO set by environment to Ring.\n"
    )
    log = import_nccl_debug(text)
    assert log.settings == {"NCCL_ALGO": "Ring"}
    assert said(log.warnings, "TCP sockets")
    assert said(log.warnings, "NCCL_ALGO is forced to Ring")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "h1:1:1 [0] misc/socket.cc:1 NCCL WARN Call to connect failed\n",
            r"^d:1: tells nothing but: Call to connect failed",
        ),
        ("nothing of the kind\n", "holds no line of NCCL"),
        ("", "is empty"),
    ],
)
def test_logs_without_information_are_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        import_nccl_debug(text, "d")


def test_omni_path_cluster_prints_bits(practitioner: Practitioner) -> None:
    log = import_nccl_debug(*practitioner("nccl_debug/01"))
    assert log.version == "2.10.3+cuda11.3"
    assert len(log.hosts) == 4
    assert sorted(log.nics.values()) == ["hfi1_0", "hfi1_1", "hfi1_2", "hfi1_3"]
    assert log.busbw_bytes_per_second == pytest.approx(5.06e9, rel=1e-3)
    assert log.gdr is None
    assert said(log.warnings, "printed in Gbit/s", "5.06 GB/s")


def test_v100_with_twelve_channels(practitioner: Practitioner) -> None:
    log = import_nccl_debug(*practitioner("nccl_debug/02"))
    assert (log.channels, log.ranks, log.tree_channels, len(log.rings)) == (12, 4, 12, 12)
    assert log.rings[5] == (0, 3, 2, 1)
    assert log.network_hops == ()


def test_h200_over_roce_keeps_its_rails(practitioner: Practitioner) -> None:
    log = import_nccl_debug(*practitioner("nccl_debug/03"))
    assert (log.ranks, len(log.hosts), log.channels, log.nvls) == (16, 2, 16, False)
    assert log.settings["NCCL_NET_GDR_LEVEL"] == "PIX"
    expected = {"0": 0, "1": 2, "2": 3, "3": 4, "4": 5, "5": 6, "6": 7, "7": 9}
    assert log.gpu_nics == {gpu: (nic,) for gpu, nic in expected.items()}
    assert set(log.nics) - set(log.used_nics) == {1, 8}
    assert any((hop.nic, hop.proxy, hop.source) == (3, 2, 3) for hop in log.pxn_hops)
    assert (log.gdr, log.crossings) == (True, ())
    assert log.rings[3][:3] == (0, 11, 15)


def test_samples_of_a_new_version_do_not_stop_the_reader(practitioner: Practitioner) -> None:
    log = import_nccl_debug(*practitioner("nccl_debug/04"))
    assert (log.hosts, log.ranks, log.network) == (("node-01",), 8, "IB")
    assert log.algorithms == (("AllReduce", 33554432, "RING", "SIMPLE"),)
    assert log.settings == {"NCCL_SHM_DISABLE": "1"}
    assert said(log.warnings, "line 1", "Failed to initialize any NET plugin")
