from collections.abc import Callable
from pathlib import Path

import pytest

from topologies.errors import InputError
from topologies.importers.topo import import_gpu_list, import_topo

Practitioner = Callable[[str], tuple[str, Path]]

MESH = """\
\tGPU0\tGPU1\tGPU2\tmlx5_0\tmlx5_1\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV4\tNV4\tSYS\tPIX\t16-31\t1
GPU1\tNV4\t X \tNV4\tPIX\tSYS\t0-15\t0
GPU2\tNV4\tNV4\t X \tSYS\tSYS\t32-47\t2
mlx5_0\tSYS\tPIX\tSYS\t X \tSYS
mlx5_1\tPIX\tSYS\tSYS\tSYS\t X

Legend:
  X    = Self
"""


def said(warnings: tuple[str, ...], *words: str) -> bool:
    return any(all(word in warning for word in words) for warning in warnings)


def test_a_small_mesh_with_one_gpu_far_from_nics() -> None:
    matrix = import_topo(MESH)
    assert matrix.link == "nvlink"
    assert not matrix.switched
    assert matrix.nvlinks == {"GPU0": 8, "GPU1": 8, "GPU2": 8}
    assert matrix.near_nics == {"GPU0": ("mlx5_1",), "GPU1": ("mlx5_0",), "GPU2": ()}
    assert matrix.rails == 2
    assert said(matrix.warnings, "GPU2 have no near NIC")
    assert said(matrix.warnings, "GPU order is not NIC order")
    assert said(matrix.warnings, "GPU order is not NUMA order")


def test_islands_are_connected_over_others() -> None:
    text = "\tGPU0\tGPU1\tGPU2\nGPU0\tX\tSYS\tNV2\nGPU1\tSYS\tX\tNV2\nGPU2\tNV2\tNV2\tX\n"
    assert import_topo(text).islands == (("GPU0", "GPU1", "GPU2"),)


def test_launcher_labels_and_colours_are_no_obstacle() -> None:
    labelled = "\n".join(f"[1,0]<stdout>:\x1b[1m{line}\x1b[0m" for line in MESH.splitlines())
    plain, found = import_topo(MESH), import_topo(labelled)
    assert found.links == plain.links
    assert found.numa == plain.numa


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MESH.replace("GPU1\tNV4\t X \tNV4\tPIX", "GPU1\tNV4"), r"^t:3: the row of GPU1 does not have 5 connections"),
        (MESH.replace("NV4\tNV4\tSYS\tPIX", "NV4\tblue\tSYS\tPIX"), r"^t:2: the row of GPU0"),
        ("no matrix here\n", r"^t: holds no matrix"),
        ("\tGPU0\tGPU1\tCPU Affinity\n", r"^t: holds no matrix"),
        ("\0\1\2", r"^t: is not a text file"),
        ("  \n", r"^t: is empty"),
    ],
)
def test_bad_matrices_are_refused_with_their_place(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        import_topo(text, "t")


def test_directions_that_disagree_are_told() -> None:
    assert said(import_topo("\tGPU0\tGPU1\nGPU0\tX\tNV4\nGPU1\tNV2\tX\n").warnings, "disagree", "GPU0-GPU1")


def near(practitioner: Practitioner, name: str) -> dict[str, list[int]]:
    matrix = import_topo(*practitioner(name))
    return {gpu: [int(nic.removeprefix("NIC")) for nic in nics] for gpu, nics in matrix.near_nics.items()}


def test_a100_with_ten_nics(practitioner: Practitioner) -> None:
    matrix = import_topo(*practitioner("topo/01"))
    assert near(practitioner, "topo/01") == {
        "GPU0": [2, 3], "GPU1": [2, 3], "GPU2": [0, 1], "GPU3": [0, 1],
        "GPU4": [8, 9], "GPU5": [8, 9], "GPU6": [4, 5], "GPU7": [4, 5],
    }  # fmt: skip
    assert (matrix.rails, set(matrix.nvlinks.values()), len(matrix.islands)) == (8, {12}, 1)
    assert [matrix.numa[f"GPU{gpu}"] for gpu in range(8)] == [(0,)] * 4 + [(1,)] * 4
    assert matrix.cpus["GPU7"] == "64-127,192-254"
    assert said(matrix.warnings, "NIC6, NIC7 near no GPU")
    assert said(matrix.warnings, "GPU0,GPU1 on NIC2,NIC3")


def test_rocm_with_xgmi_everywhere(practitioner: Practitioner) -> None:
    matrix = import_topo(*practitioner("topo/02"))
    assert (matrix.tool, matrix.link, [len(island) for island in matrix.islands]) == ("rocm-smi", "xgmi", [8])


def test_hgx_h100_without_nics_has_unknown_rails(practitioner: Practitioner) -> None:
    matrix = import_topo(*practitioner("topo/04"))
    assert (set(matrix.nvlinks.values()), matrix.switched, matrix.rails) == ({18}, True, None)
    assert {nodes[0] for nodes in matrix.numa.values()} == {0, 1}
    assert said(matrix.warnings, "rails unknown")


def test_gb200_tray_shows_no_locality(practitioner: Practitioner) -> None:
    matrix = import_topo(*practitioner("topo/05"))
    assert (len(matrix.gpus), set(matrix.nvlinks.values()), matrix.rails) == (4, {18}, None)
    assert matrix.nic_pairs == (("NIC2", "NIC3"), ("NIC6", "NIC7"))
    assert matrix.numa["GPU0"] == (0, *range(2, 18))
    assert matrix.numa["GPU3"] == (1, *range(18, 34))
    assert said(matrix.warnings, "every NIC is SYS")
    assert said(matrix.warnings, "NUMA affinity is a list")


def test_dgx_a100_with_twelve_nics(practitioner: Practitioner) -> None:
    matrix = import_topo(*practitioner("topo/07"))
    assert near(practitioner, "topo/07") == {
        "GPU0": [0, 1], "GPU1": [0, 1], "GPU2": [2, 3], "GPU3": [2, 3],
        "GPU4": [6, 7], "GPU5": [6, 7], "GPU6": [4, 5], "GPU7": [4, 5],
    }  # fmt: skip
    assert [matrix.numa[f"GPU{gpu}"][0] for gpu in (0, 2, 4, 6)] == [3, 1, 7, 5]
    assert said(matrix.warnings, "NIC8, NIC9, NIC10, NIC11 near no GPU")
    assert said(matrix.warnings, "only the odd NUMA nodes")
    assert matrix.nic_names["NIC11"] == "mlx5_11"


def test_four_a100_of_which_two_have_no_near_nic(practitioner: Practitioner) -> None:
    matrix = import_topo(*practitioner("topo/08"))
    assert matrix.near_nics == {"GPU0": (), "GPU1": ("mlx5_0",), "GPU2": ("mlx5_1",), "GPU3": ()}
    assert [matrix.numa[f"GPU{gpu}"][0] for gpu in range(4)] == [1, 0, 3, 2]
    assert (set(matrix.nvlinks.values()), matrix.switched) == ({12}, False)
    assert said(matrix.warnings, "GPU0, GPU3 have no near NIC")


def test_a800_whose_nics_do_not_follow_gpus(practitioner: Practitioner) -> None:
    matrix = import_topo(*practitioner("topo/10"))
    assert list(near(practitioner, "topo/10").values()) == [[2], [4], [6], [8], [1], [3], [5], [7]]
    assert (set(matrix.nvlinks.values()), matrix.rails) == ({8}, 8)
    assert said(matrix.warnings, "GPU order is not NIC order")
    assert said(matrix.warnings, "NIC0 near no GPU")


def test_topo_mp_hides_nvlink_and_lacks_rows(practitioner: Practitioner) -> None:
    matrix = import_topo(*practitioner("topo/11"))
    assert (len(matrix.gpus), matrix.link) == (8, "pcie")
    assert matrix.near_nics["GPU3"] == ("NIC7",)
    assert said(matrix.warnings, "incomplete", "GPU4, GPU5, GPU6, GPU7")
    assert said(matrix.warnings, "topo -mp")


def test_pcie_pairs(practitioner: Practitioner) -> None:
    matrix = import_topo(*practitioner("topo/13"))
    assert matrix.pcie_groups == (("GPU0", "GPU1"), ("GPU2", "GPU3"), ("GPU4", "GPU5"))
    assert {nodes[0] for nodes in matrix.numa.values()} == {0, 1}
    assert said(matrix.warnings, "TP 2 is natural")


def test_single_gpu_of_a_virtual_machine(practitioner: Practitioner) -> None:
    matrix = import_topo(*practitioner("topo/14"))
    assert (matrix.gpus, matrix.numa, matrix.cpus) == (("GPU0",), {"GPU0": ()}, {"GPU0": "0-7"})
    assert said(matrix.warnings, "no NUMA node")


def test_two_xgmi_islands_and_hops_that_are_no_links(practitioner: Practitioner) -> None:
    matrix = import_topo(*practitioner("topo/16"))
    assert [len(island) for island in matrix.islands] == [4, 4]
    assert matrix.hops["GPU0", "GPU7"] == 3
    assert matrix.weights["GPU0", "GPU7"] == 72
    assert matrix.numa["GPU7"] == (1,)
    assert said(matrix.warnings, "keep TP within one, at most 4")
    assert said(matrix.warnings, "not the number of links")


def test_p2p_that_is_not_there(practitioner: Practitioner) -> None:
    matrix = import_topo(*practitioner("topo/17"))
    assert matrix.tool == "nvidia-smi topo -p2p"
    assert matrix.no_p2p == (("GPU0", "GPU1"),)
    assert said(matrix.warnings, "CNS", "host memory")


def test_mig_slices_are_no_gpus(practitioner: Practitioner) -> None:
    found = import_gpu_list(*practitioner("topo/18"))
    assert (found.physical, found.whole) == (2, 1)
    assert found.gpus[0].mig_profiles == ("1g.10gb",) * 7
    assert said(found.warnings, "GPU 0 is split into 7 MIG slices")


def test_a_slice_without_its_gpu_is_refused() -> None:
    with pytest.raises(InputError, match=r"^t:1: a MIG slice before any GPU"):
        import_gpu_list("  MIG 1g.10gb     Device  0: (UUID: MIG-0)\n", "t")
