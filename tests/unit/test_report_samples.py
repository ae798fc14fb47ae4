"""The columns that the figures are drawn from, against the definitions of `measure.metrics`."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import report_run as made

from harness.measure import metrics
from harness.measure.parquet import write_requests
from harness.report.samples import read_samples


def test_samples_follow_the_definitions(tmp_path: Path) -> None:
    records = made.requests(made.cell("speculative", status="partial"))
    path = tmp_path / "requests.parquet"
    write_requests(path, records)
    samples = read_samples(path)
    whole = [r for r in records if r.status == "ok"]
    for found, expected in (
        (samples.ttft_s, metrics.ttft_s(whole)),
        (samples.tpot_s, metrics.tpot_s(whole)),
        (samples.e2el_s, metrics.e2el_s(whole)),
        (samples.gaps_s, metrics.icl_s(whole)),
    ):
        assert found.tolist() == expected.tolist()
    assert (samples.requests, samples.ok) == (24, 19)
    assert samples.errors == {"connection closed": 5}


def test_samples_leave_out_what_is_undefined(tmp_path: Path) -> None:
    record = made.requests(made.cell("baseline"), n=1)[0]
    one_chunk = msgspec.structs.replace(
        record, chunk_ns=record.chunk_ns[:1], chunk_tokens=(1,), output_tokens=1
    )
    no_chunk = msgspec.structs.replace(record, chunk_ns=(), chunk_tokens=None)
    unsent = msgspec.structs.replace(record, sent_ns=None)
    path = tmp_path / "requests.parquet"
    records = [no_chunk, one_chunk, unsent]
    write_requests(path, records)
    samples = read_samples(path)
    assert metrics.ttft_s([one_chunk])[0] > 0 and np.isnan(metrics.tpot_s([one_chunk])).all()
    assert len(samples.ttft_s) == len(samples.e2el_s) == 1
    assert len(samples.tpot_s) == 0
    assert samples.ttft_s[0] == samples.e2el_s[0]
    assert len(samples.gaps_s) == len(record.chunk_ns) - 1
