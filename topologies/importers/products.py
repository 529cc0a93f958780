"""Names that tools give to GPUs, and the file of the catalog that describes the same product."""

from __future__ import annotations

import re

_NAMES: tuple[tuple[str, str], ...] = (
    (r"A100-SXM.*40GB", "a100-40gb"),
    (r"A100-SXM.*80GB", "a100-80gb"),
    (r"A100.*PCIe.*80GB|A100-80GB-PCIe", "a100-pcie-80gb"),
    (r"A800-SXM", "a800-sxm"),
    (r"\bGH200\b", "gh200"),
    (r"H800(?!.*PCIe)", "h800-sxm"),
    (r"H200(?!.*(PCIe|NVL))", "h200-sxm"),
    (r"H100(?!.*(PCIe|NVL))", "h100-sxm"),
    (r"H100.*PCIe", "h100-pcie"),
    (r"\bH20\b", "h20"),
    (r"\bGB300\b", "gb300"),
    (r"\bGB200\b", "gb200"),
    (r"\bB300\b", "b300"),
    (r"\bB200\b", "b200"),
    (r"MI300X", "mi300x"),
    (r"MI325X", "mi325x"),
    (r"MI350X", "mi350x"),
    (r"MI355X", "mi355x"),
)

_DEVICES = {
    "0x10de": {
        "0x20b0": "a100-40gb",
        "0x20b2": "a100-80gb",
        "0x20b5": "a100-pcie-80gb",
        "0x20f3": "a800-sxm",
        "0x2329": "h20",
        "0x2330": "h100-sxm",
        "0x2331": "h100-pcie",
        "0x2335": "h200-sxm",
        "0x2901": "b200",
    },
    "0x1002": {"0x74a1": "mi300x", "0x74a5": "mi325x", "0x75a0": "mi350x", "0x75a3": "mi355x"},
}
"""The PCI ID repository (pci-ids.ucw.cz) and ROCm's documentation of ``lspci -d``."""


def gpu_of_product(product: str) -> str | None:
    """Return the catalog's name of a GPU that a tool names, or None where it is not one of the catalog.

    >>> gpu_of_product("NVIDIA H100 80GB HBM3"), gpu_of_product("Tesla-V100-SXM2-32GB")
    ('h100-sxm', None)
    """
    plain = re.sub(r"[\s_]+", "-", product)
    return next((name for pattern, name in _NAMES if re.search(pattern, plain, re.IGNORECASE)), None)


def gpu_of_device(vendor: str, device: str) -> str | None:
    """Return the catalog's name of a GPU by PCI vendor and device (``0x10de``, ``0x2330``), or None."""
    return _DEVICES.get(vendor.lower(), {}).get(device.lower())
