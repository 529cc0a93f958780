"""A declared software stack in a scenario."""

import pytest

from scenarios.scenario import load_scenario
from topologies.errors import InputError

SCENARIO = """\
name: test
model: llama3-8b
cluster: dgx-h100-superpod
job: {seq_length: 8192, global_batch_size: 1024}
stack:
  trainer: torchtitan
  date: 2025-07
  attention_kernel: flash2
  tp_overlap: true
"""


def test_the_stack_moves_into_the_job(tmp_path):
    path = tmp_path / "scenario.yaml"
    path.write_text(SCENARIO)
    stack = load_scenario(str(path), overrides=["stack.cuda_graph=full"]).job.stack
    assert (stack.trainer, stack.date, stack.attention_kernel, stack.tp_overlap) == (
        "torchtitan",
        "2025-07",
        "flash2",
        True,
    )
    assert stack.cuda_graph == "full"
    assert stack.dp_overlap is None


@pytest.mark.parametrize(
    ("before", "after", "complaint"),
    [
        ("torchtitan", "torchtitans", "trainer: input should be .*torchtitan"),
        ("2025-07", "July", "date: 'July' is not a year and a month"),
        ("tp_overlap", "tp_overlaps", "did you mean 'tp_overlap'"),
        ("batch_size: 1024}", "batch_size: 1024, stack: {}}", "given twice"),
    ],
)
def test_a_wrong_stack_is_refused(tmp_path, before, after, complaint):
    path = tmp_path / "scenario.yaml"
    path.write_text(SCENARIO.replace(before, after))
    with pytest.raises(InputError, match=complaint):
        load_scenario(str(path))
