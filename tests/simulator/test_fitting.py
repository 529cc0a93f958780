"""The fit finds parameters that made the data, keeps them in their ranges, and is the same each time."""

import numpy as np
import pytest

from simulator.fitting import (
    Priors,
    fit_cases,
    fit_published,
    fit_without_each_source,
    parameters_text,
    shipped_priors,
)
from simulator.parameters import SHIPPED, Parameters, shipped_parameters
from simulator.published import read_runs
from simulator.published_cases import Case, cases
from simulator.step import predict_step
from simulator.trials import predicted, prepare
from topologies.document import load
from topologies.errors import InputError

A100 = "gemm_efficiency.ampere.bf16"


@pytest.fixture(scope="module")
def some():
    runs = [run for run in read_runs() if run.counted and run.hardware["gpu"] == "A100"][::12]
    return cases(runs)[0]


def only(*names):
    priors = shipped_priors()
    return Priors(name="some", free={name: priors.free[name] for name in names})


def measured_as(case, seconds):
    return Case(
        run=case.run,
        cluster=case.cluster,
        job=case.job,
        layout=case.layout,
        assumptions=case.assumptions,
        measured_seconds=seconds,
    )


def test_arrays_of_parameters_are_the_scalar_form(some):
    base = shipped_parameters()
    values = {A100: np.array([0.72, 0.80]), "jitter": np.array([0.003, 0.005])}
    times = predicted(prepare(some), base, values)
    for column in range(2):
        parameters = base.with_values({name: float(array[column]) for name, array in values.items()})
        for case, seconds in zip(some, times[:, column], strict=True):
            step = predict_step(case.cluster, case.job, case.layout, parameters=parameters)
            assert seconds == pytest.approx(step.total_seconds, rel=1e-9)


def test_every_free_parameter_can_be_an_array(some):
    base = shipped_parameters()
    known = dict(base.items())
    names = list(shipped_priors().free)
    values = {name: known[name].value * np.ones(3) for name in names}
    times = predicted(prepare(some[:5]), base, values)
    assert np.allclose(times, times[:, :1])


def test_the_fit_finds_what_made_the_data(some):
    truth = shipped_parameters().with_values({A100: 0.81, "kernel_factor.early-flash": 0.5})
    made = [
        measured_as(case, predict_step(case.cluster, case.job, case.layout, parameters=truth).total_seconds)
        for case in some
    ]
    found = fit_cases(made, priors=only(A100, "kernel_factor.early-flash"))
    assert found.values[A100] == pytest.approx(0.81, rel=0.01)
    assert found.values["kernel_factor.early-flash"] == pytest.approx(0.5, rel=0.05)


def test_an_outlier_hardly_moves_the_fit(some):
    made = [measured_as(case, predict_step(case.cluster, case.job, case.layout).total_seconds) for case in some]
    value = dict(shipped_parameters().items())[A100].value
    spoilt = [measured_as(made[0], 5 * made[0].measured_seconds), *made[1:]]
    assert fit_cases(spoilt, priors=only(A100)).values[A100] == pytest.approx(value, rel=0.02)


def test_a_fit_stays_in_its_ranges(some):
    slow = [measured_as(case, 10 * case.measured_seconds) for case in some]
    found = fit_cases(slow, priors=only(A100))
    assert found.values[A100] == pytest.approx(dict(shipped_parameters().items())[A100].low)


@pytest.mark.slow
def test_the_shipped_values_are_the_fit_to_the_shipped_runs():
    found = fit_published(read_runs())
    known = dict(shipped_parameters().items())
    for name, value in found.values.items():
        assert value == pytest.approx(known[name].value, rel=0.02), name


def test_a_subset_gives_the_same_twice(some):
    first, again = (fit_cases(some, priors=only(A100)).values for _ in range(2))
    assert first == again


def test_each_source_is_left_out_once(some):
    fits = fit_without_each_source(some, priors=only(A100))
    assert set(fits) == {case.run.source_group for case in some}
    for source, fit in fits.items():
        assert fit.rows == sum(case.run.source_group != source for case in some)


def test_priors_and_shipped_values_lie_in_their_ranges():
    known = dict(shipped_parameters().items())
    for name, prior in shipped_priors().free.items():
        assert known[name].low <= prior.value <= known[name].high, name
    generations = ("ampere", "hopper", "blackwell", "cdna3", "cdna4")
    for generation in generations:
        assert sum(generation in name for name in shipped_priors().free) <= 6


def test_fitted_parameters_can_be_written_and_read(tmp_path, some):
    found = fit_cases(some, priors=only(A100, "host_moe_layer"))
    file = tmp_path / "parameters.yaml"
    file.write_text(parameters_text(found))
    read = dict(load(file, Parameters).items())
    for name, value in found.values.items():
        assert read[name].value == pytest.approx(value, rel=1e-3)
    lines = file.read_text().split("evidence:")[0].splitlines()
    shipped = SHIPPED.read_text().split("evidence:")[0].splitlines()
    assert sum(one != other for one, other in zip(lines, shipped, strict=True)) <= 2


def test_without_rows_there_is_no_fit():
    with pytest.raises(InputError, match="no row can be used"):
        fit_cases([])
