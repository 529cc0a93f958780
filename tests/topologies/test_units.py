"""Units: one spelling each, no bare numbers, and the same values as pint where pint reads them sanely."""

import math

import pint
import pytest
from hypothesis import given
from hypothesis import strategies as st

from topologies.document import Document, LoadContext, check
from topologies.errors import InputError
from topologies.units import (
    UNITS,
    Bytes,
    Ratio,
    Seconds,
    document_key,
    format_quantity,
    parse_quantity,
)

EVERY_UNIT = [(dimension, unit, factor) for dimension, units in UNITS.items() for unit, factor in units.items()]
PINT_BASE = {"bytes": "byte", "bytes_per_second": "byte / second", "seconds": "second", "watts": "watt"}


@pytest.fixture(scope="module")
def registry():
    return pint.UnitRegistry()


@pytest.mark.parametrize(("dimension", "unit", "factor"), EVERY_UNIT)
def test_every_unit_of_the_table_is_read(dimension, unit, factor):
    assert parse_quantity(f"2.5 {unit}", dimension) == pytest.approx(2.5 * factor)
    assert parse_quantity(f" 1_000{unit} ", dimension) == pytest.approx(1000 * factor)
    assert parse_quantity(f"1.5e3 {unit}", dimension) == pytest.approx(1500 * factor)


@pytest.mark.parametrize(("dimension", "unit", "factor"), [row for row in EVERY_UNIT if row[0] in PINT_BASE])
def test_factors_equal_pint(registry, dimension, unit, factor):
    spelled = unit.replace("/s", " / second")
    assert registry.Quantity(1.0, spelled).to(PINT_BASE[dimension]).magnitude == pytest.approx(factor, rel=1e-12)


def test_rates_by_hand():
    assert parse_quantity("400 Gbit/s", "bytes_per_second") == 50e9
    assert parse_quantity("6.11 %/year", "per_second") == pytest.approx(0.0611 / (365.25 * 24 * 3600))
    assert parse_quantity("0.08 USD/kWh", "usd_per_joule") == pytest.approx(0.08 / 3.6e6)
    assert parse_quantity("2.5 USD/h", "usd_per_second") == pytest.approx(2.5 / 3600)
    assert parse_quantity("15.6 T tokens", "tokens") == 15.6e12


@pytest.mark.parametrize(
    "text",
    [
        "80",
        "",
        "GB",
        "80 gb",
        "80 Gb",
        "80 GBs",
        "80 GB/s",
        "-1 GB",
        "1e999 GB",
        "nan GB",
        "inf GB",
        "8 0 GB",
        "0x8 GB",
    ],
)
def test_what_is_not_a_quantity_of_bytes_is_refused(text):
    with pytest.raises(ValueError, match=r"\bGB|finite"):
        parse_quantity(text, "bytes")


def test_the_error_lists_the_accepted_units():
    with pytest.raises(ValueError, match="has no unit; accepted units: ns, us, ms, s, min, h, d, years"):
        parse_quantity("10", "seconds")
    with pytest.raises(ValueError, match="the unit 'minutes' is not known here"):
        parse_quantity("10 minutes", "seconds")


@given(
    dimension=st.sampled_from(sorted(UNITS)),
    value=st.floats(min_value=1e-9, max_value=1e21, allow_nan=False),
    digits=st.integers(3, 9),
)
def test_format_then_parse_returns_the_value_to_its_digits(dimension, value, digits):
    text = format_quantity(value, dimension, digits)
    assert parse_quantity(text, dimension) == pytest.approx(value, rel=0.51 * 10 ** (1 - digits))


@pytest.mark.parametrize(
    ("value", "dimension", "text"),
    [
        (50e9, "bytes_per_second", "50 GB/s"),
        (999.7e9, "bytes_per_second", "1 TB/s"),
        (999.4e9, "bytes_per_second", "999 GB/s"),
        (0.0, "bytes", "0 B"),
        (3e20, "bytes", "300000 PB"),
        (0.85, "ratio", "85 %"),
        (math.inf, "seconds", "inf"),
        (7200.0, "seconds", "2 h"),
    ],
)
def test_format_picks_a_readable_unit(value, dimension, text):
    assert format_quantity(value, dimension) == text


class Sample(Document):
    memory_bytes: Bytes = 1.0
    wait_seconds: Seconds = 0.0
    share: Ratio = 0.5


def sample(tmp_path, **content):
    return check(content, Sample, LoadContext(tmp_path / "sample.yaml"))


def test_documents_say_the_unit_in_the_value_and_not_in_the_key(tmp_path):
    found = sample(tmp_path, memory="80 GiB", wait="10 min", share="85 %")
    assert (found.memory_bytes, found.wait_seconds, found.share) == (80 * 2**30, 600.0, 0.85)
    with pytest.raises(InputError, match="memory_bytes: is not a known key here; did you mean 'memory'"):
        sample(tmp_path, memory_bytes="80 GB")


@pytest.mark.parametrize("bare", [80, 80.0, True, None, [1], float("nan")])
def test_bare_values_are_refused_in_documents_where_a_quantity_is_due(tmp_path, bare):
    with pytest.raises(InputError, match=r"memory: .* is a bare .*; add one of the units: B, kB"):
        sample(tmp_path, memory=bare)


def test_a_ratio_may_be_bare_but_must_be_a_finite_number(tmp_path):
    assert sample(tmp_path, share=0.25).share == 0.25
    for wrong in (-0.1, math.inf, True):
        with pytest.raises(InputError, match="share"):
            sample(tmp_path, share=wrong)


def test_code_holds_si_numbers_and_refuses_negative_and_infinite_ones():
    assert Sample(memory_bytes=3.0).memory_bytes == 3.0
    for wrong in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="finite"):
            Sample(memory_bytes=wrong)


@pytest.mark.parametrize(
    ("field", "key"),
    [
        ("peak_flop_per_second", "peak"),
        ("bandwidth_bytes_per_second", "bandwidth"),
        ("gpu_usd_per_second", "gpu"),
        ("rate_per_second", "rate"),
        ("power_watts", "power"),
        ("target_tokens", "target_tokens"),
        ("num_nodes", "num_nodes"),
    ],
)
def test_document_key_drops_exactly_the_unit(field, key):
    assert document_key(field) == key
