"""The columns that the figures are drawn from, against the definitions of `measure.metrics`."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import report_run as made

from harness.measure import metrics
from harness.measure.store import write_requests
from harness.report.samples import read_samples


@pytest.mark.parametrize("lists_as_json", [False, True])
def test_samples_follow_the_definitions(tmp_path: Path, lists_as_json: bool) -> None:
    records = made.requests(made.cell("speculative", status="partial"))
    path = tmp_path / "requests.parquet"
    if lists_as_json:
        made.write_requests(path, records, lists_as_json=True)
    else:
        write_requests(path, records)
    samples = read_samples(path)
    whole = [r for r in records if r.status == "ok"]
    ttft = [metrics.ttft_s(r) for r in whole]
    tpot = [metrics.tpot_s(r) for r in whole]
    e2el = [metrics.e2el_s(r) for r in whole]
    gaps = [gap for r in whole for gap in metrics.icl_s(r)]
    for found, expected in (
        (samples.ttft_s, ttft),
        (samples.tpot_s, tpot),
        (samples.e2el_s, e2el),
        (samples.gaps_s, gaps),
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-9)
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
    known = [r for r in records if metrics.ttft_s(r) is not None]
    assert known == [one_chunk] and metrics.tpot_s(one_chunk) is None
    assert len(samples.ttft_s) == len(samples.e2el_s) == 1
    assert len(samples.tpot_s) == 0
    assert samples.ttft_s[0] == samples.e2el_s[0]
    assert len(samples.gaps_s) == len(record.chunk_ns) - 1


@pytest.mark.full
def test_two_hundred_thousand_requests_are_read_in_columns(tmp_path: Path) -> None:
    path = tmp_path / "requests.parquet"
    made.write_requests(path, made.requests(made.cell("baseline"), n=200_000, tokens=8))
    samples = read_samples(path)
    assert samples.ok == 200_000
    assert len(samples.gaps_s) == 200_000 * 7
