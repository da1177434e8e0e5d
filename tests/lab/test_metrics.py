"""Every metric against numbers worked out by hand from one small trace."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.lab.errors import UsageError
from core.lab.metrics import METRICS, RequestRecord, max_concurrency, metric, summarize


def record(sent, times, *, ended=None, tokens=None, prompt=10, due=None, cached=None, error=None):
    return RequestRecord(
        session=0,
        stage=0,
        label="x",
        due=sent if due is None else due,
        sent=sent,
        ended=ended if ended is not None else (times[-1] if times else sent),
        token_times=tuple(times),
        prompt_tokens=prompt,
        output_tokens=len(times) if tokens is None else tokens,
        cached_tokens=cached,
        error=error,
    )


# Four requests: A of four tokens; B of one token; C whose second piece carries three tokens; D fails.
A = record(0.0, [0.2, 0.3, 0.5, 0.6], due=0.0, prompt=10)
B = record(1.0, [1.4], due=0.99, prompt=20)
C = record(1.0, [1.1, 1.5], tokens=4, due=0.98, prompt=30)
D = record(1.5, [1.6], ended=4.0, due=1.5, prompt=40, error="HTTP 500")
TRACE = [A, B, C, D]


def test_one_request():
    assert A.ttft == pytest.approx(0.2)
    assert A.e2e == pytest.approx(0.6)
    assert A.itl == pytest.approx([0.1, 0.2, 0.1])
    assert A.tpot == pytest.approx((0.6 - 0.2) / 3)
    assert B.tpot is None and B.itl == []
    assert C.tpot == pytest.approx((0.5 - 0.1) / 3), "tokens count, not pieces"
    assert C.itl == pytest.approx([0.4]), "gaps between pieces, as vLLM takes them"
    assert C.lag == pytest.approx(0.02)


def test_throughput_counts_finished_requests_only():
    s = summarize(TRACE, 4.0, {})
    assert (s.requests, s.completed) == (4, 3)
    assert s.values["requests_per_s"] == pytest.approx(3 / 4)
    assert s.values["output_tokens_per_s"] == pytest.approx((4 + 1 + 4) / 4)
    assert s.values["total_tokens_per_s"] == pytest.approx((60 + 9) / 4)
    assert s.errors == {"HTTP 500": 1}


def test_latencies_pool_as_vllm_does():
    v = summarize(TRACE, 4.0, {}).values
    assert v["ttft_p50_ms"] == pytest.approx(200)  # of 100, 200, 400
    assert v["ttft_p90_ms"] == pytest.approx(200 + 0.8 * 200)
    assert v["itl_p50_ms"] == pytest.approx(150)  # of 100, 100, 200, 400
    assert v["itl_mean_ms"] == pytest.approx(200)
    assert v["tpot_mean_ms"] == pytest.approx(400 / 3), "the request of one token has no TPOT"
    assert v["e2e_p50_ms"] == pytest.approx(500)  # of 400, 500, 600
    assert v["e2e_p99_ms"] == pytest.approx(500 + 0.98 * 100)


def test_goodput_takes_all_targets_and_zero_tpot_for_one_token():
    assert summarize(TRACE, 4.0, {"ttft": 250}).values["goodput_per_s"] == pytest.approx(2 / 4)
    assert summarize(TRACE, 4.0, {"ttft": 450, "tpot": 100}).values["goodput_per_s"] == pytest.approx(1 / 4)
    assert summarize(TRACE, 4.0, {"e2e": 600.001}).values["goodput_per_s"] == pytest.approx(3 / 4)
    assert "goodput_per_s" not in summarize(TRACE, 4.0, {}).values
    with pytest.raises(UsageError, match="ttft"):
        summarize(TRACE, 4.0, {"tftt": 1})


def test_lag_and_concurrency_and_cache():
    s = summarize(TRACE, 4.0, {})
    assert s.lag_p50_ms == pytest.approx(5)  # of 0, 0, 10, 20
    assert s.lag_p99_ms == pytest.approx(10 + 0.97 * 10)
    assert s.max_concurrency == 2  # B and C; D starts as C ends
    hit = [record(0, [1.0], prompt=10, cached=5), record(0, [1.0], prompt=30, cached=5)]
    assert summarize(hit, 1.0, {}).values["prefix_hit_rate"] == pytest.approx(10 / 40)
    assert "prefix_hit_rate" not in s.values


def test_nothing_finished_is_counted_and_has_no_latencies():
    s = summarize([D], 1.0, {"ttft": 1})
    assert s.values == {"requests_per_s": 0, "output_tokens_per_s": 0, "total_tokens_per_s": 0, "goodput_per_s": 0}
    assert s.errors == {"HTTP 500": 1}


gaps = st.lists(st.floats(0.001, 2.0), min_size=1, max_size=20)


@given(st.lists(st.tuples(st.floats(0, 5), gaps), min_size=1, max_size=12))
def test_summary_against_plain_numpy(requests):
    records = [record(sent, list(sent + np.cumsum(g))) for sent, g in requests]
    s = summarize(records, 10.0, {})
    ttft = [g[0] for _, g in requests]
    itl = [b - a for r in records for a, b in pairwise(r.token_times)]
    assert s.values["ttft_p95_ms"] == pytest.approx(float(np.percentile(ttft, 95)) * 1e3)
    if itl:
        assert s.values["itl_p90_ms"] == pytest.approx(float(np.percentile(itl, 90)) * 1e3)
    assert s.values["output_tokens_per_s"] == pytest.approx(sum(len(g) for _, g in requests) / 10)
    brute = max(sum(o.sent <= r.sent < o.ended for o in records) for r in records)
    assert max_concurrency(records) == brute


def test_every_metric_of_a_summary_is_described():
    assert set(summarize(TRACE, 4.0, {"ttft": 1}).values) <= set(METRICS)
    assert all(m.label and isinstance(m.higher_is_better, bool) for m in METRICS.values())
    with pytest.raises(UsageError, match="did you mean 'requests_per_s'"):
        metric("request_per_s")
    assert not math.isnan(summarize(TRACE, 4.0, {}).values["tpot_p99_ms"])
