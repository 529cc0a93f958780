"""Benchmark tables in Markdown as llm-foundry publishes them: one run a row, with batch, GPUs and tokens per second."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from simulator.logs.lines import number, positive, whole
from simulator.logs.trainer_log import StepRecord, TrainerLog

NEEDED = ("# GPUs", "Throughput (T/s)", "SeqLen (T)")


def recognise(lines: Sequence[str]) -> bool:
    """Tell whether there is a row of names with GPUs, sequence length and tokens per second."""
    return any(all(name in line for name in NEEDED) and "|" in line for line in lines)


def read(lines: Sequence[str]) -> list[TrainerLog]:
    """Read one run from each row that is complete."""
    return [log for row in _rows(lines) if (log := _run(row)) is not None]


def _rows(lines: Sequence[str]) -> Iterator[dict[str, str]]:
    names: list[str] = []
    for line in lines:
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if all(name in cells for name in NEEDED):
            names = cells
        elif names and len(cells) == len(names) and not set(cells[0]) <= set("-: "):
            yield dict(zip(names, cells, strict=True))


def _run(row: dict[str, str]) -> TrainerLog | None:
    gpus, tokens_per_second, sequence = (positive(row[name]) for name in NEEDED)
    batch = positive(row.get("GlobalBatchSize"))
    if not (gpus and tokens_per_second and sequence and batch):
        return None
    mfu, hfu = positive(row.get("MFU")), positive(row.get("HFU"))
    record = StepRecord(
        step=1,
        seconds=batch * sequence / tokens_per_second,
        samples=batch,
        tokens=batch * sequence,
        tflops_per_gpu=positive(row.get("Model TFLOP")),
        mfu=mfu / 100 if mfu else None,
        tokens_per_second_per_gpu=tokens_per_second / gpus,
        samples_per_second=positive(row.get("Throughput (S/s)")),
    )
    warnings = []
    if mfu and hfu and hfu > mfu:
        warnings.append(
            f"HFU {hfu:g} % counts recomputed FLOPs; MFU {mfu:g} % does not, and counts the whole attention"
        )
    return TrainerLog(
        format="llm-foundry table",
        steps=(record,),
        run=f"{row.get('Model', '').strip()} on {gpus:.0f} GPUs, {sequence:.0f} tokens".strip(),
        averaged=True,
        global_batch_size=whole(batch),
        seq_length=whole(sequence),
        micro_batch_size=whole(positive(row.get("MicroBatchSize"))),
        gpus=whole(gpus),
        num_params=number(row.get("NumParams")),
        device=row.get("GPU") or None,
        flops="model",
        warnings=tuple(warnings),
    )
