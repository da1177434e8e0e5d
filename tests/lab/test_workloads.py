import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.lab import text
from core.lab.arrivals import Load, offsets
from core.lab.errors import UsageError
from core.lab.workloads import WORKLOADS, Reply, workload

SYNTHETIC = ["chat", "document", "agents", "mixed"]


def texts(ask):
    return "".join(p for m in ask.messages for p in m.pieces if isinstance(p, str))


@pytest.mark.parametrize("name", SYNTHETIC)
def test_the_same_seed_gives_the_same_sessions(name):
    w = workload(name)
    assert w.sessions(3) == w.sessions(3) != w.sessions(4)
    assert len(w.sessions(0)) == w.n


@pytest.mark.parametrize("name", SYNTHETIC)
def test_replies_point_to_earlier_stages(name):
    for session in workload(name).sessions(0):
        for number, stage in enumerate(session.stages):
            for ask in stage:
                for piece in (p for m in ask.messages for p in m.pieces):
                    if isinstance(piece, Reply):
                        assert piece.stage < number and piece.index < len(session.stages[piece.stage])


def test_shapes_of_the_synthetic_workloads():
    chat = workload("chat", {"n": 50, "turns": 3}).sessions(0)
    document = workload("document", {"n": 50}).sessions(0)
    assert all(len(s.stages) == 3 for s in chat)
    first = [text.tokens_in(texts(s.stages[0][0])) for s in chat]
    assert max(first) < 60 < min(text.tokens_in(texts(s.stages[0][0])) for s in document)
    assert min(s.stages[0][0].max_tokens for s in chat) > max(s.stages[0][0].max_tokens for s in document) / 2


def test_agents_share_prefixes_and_branch():
    sessions = workload("agents", {"n": 2, "branches": 4, "rounds": 2}).sessions(0)
    rules = {s.stages[0][0].messages[0] for s in sessions}
    assert len(rules) == 1, "one system prompt for all"
    labels = [[ask.label for ask in stage] for stage in sessions[0].stages]
    assert labels == [["propose"] * 4, ["review"] * 4, ["score"]] * 2
    proposals = {ask.messages for ask in sessions[0].stages[0]}
    assert len(proposals) == 4
    task = {ask.messages[1].pieces[0] for ask in sessions[0].stages[0]}
    assert len(task) == 1, "branches share their task"


@given(st.integers(1, 5000), st.integers(0, 10))
@settings(max_examples=30)
def test_passages_have_the_asked_length(tokens, seed):
    import random

    assert len(text.passage(random.Random(seed), tokens)) == tokens * text.CHARS_PER_TOKEN
    assert text.tokens_in(text.passage(random.Random(seed), tokens, "code")) == tokens


def mooncake_file(tmp_path):
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 1000, "input_length": 1000, "output_length": 50, "hash_ids": [1, 2]},
        {"timestamp": 3500, "input_length": 1100, "output_length": 7, "hash_ids": [1, 2, 9]},
        {"timestamp": 3500, "input_length": 100, "output_length": 900, "hash_ids": [5]},
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def test_mooncake_ids_become_shared_prefixes_and_milliseconds_seconds(tmp_path):
    w = workload("mooncake", {"path": mooncake_file(tmp_path), "n": 3, "scale": 0.1, "time_scale": 2})
    sessions = w.sessions(0)
    assert [s.at for s in sessions] == [0.0, 5.0, 5.0]
    prompts = [texts(s.stages[0][0]) for s in sessions]
    assert [len(p) for p in prompts] == [400, 440, 40]
    assert prompts[1].startswith(prompts[0]), "pages 1 and 2 are the same text"
    assert not prompts[2].startswith(prompts[0][:40])
    assert [s.stages[0][0].max_tokens for s in sessions] == [5, 1, 90]
    assert w.load.process == "trace"


def test_sharegpt_keeps_what_vllm_keeps(tmp_path):
    def conversation(*values):
        turns = [{"from": "human", "value": v} for v in values]
        return {"id": "x", "conversations": turns}

    fits = conversation("p" * 400, "a" * 80)
    dropped = [
        conversation("p" * 400),
        conversation("p" * 8, "a" * 80),
        conversation("p" * 400, "a"),
        conversation("p" * 4400, "a" * 80),
        conversation("p" * 4000, "a" * 5000),
    ]
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([*dropped, fits]))
    sessions = workload("sharegpt", {"path": path, "n": 1}).sessions(0)
    assert texts(sessions[0].stages[0][0]) == "p" * 400
    assert sessions[0].stages[0][0].max_tokens == 20
    path.write_text(json.dumps(dropped))
    with pytest.raises(UsageError, match="holds no request"):
        workload("sharegpt", {"path": path, "n": 1}).sessions(0)


def test_prompts_become_turns(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"turns": ["one", "two"], "category": "x"}\n\n{"prompt": "three"}\n')
    first, second = workload("prompts", {"path": path, "n": 2, "output_tokens": 9}).sessions(0)
    assert len(first.stages) == 2 and first.stages[1][0].messages[1].pieces == (Reply(0, 0),)
    assert texts(second.stages[0][0]) == "three" and second.stages[0][0].max_tokens == 9


@pytest.mark.parametrize(
    "name,content,says",
    [
        ("mooncake", '{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": [1]}\n{"t', ":2 is broken"),
        ("mooncake", '{"timestamp": 1, "input_length": 5, "output_length": 1}', ":1 is broken.*hash_ids"),
        ("mooncake", '{"timestamp": 1, "input_length": 600, "output_length": 1, "hash_ids": [1]}', "need 2 hash ids"),
        ("prompts", '{"turns": []}', ":1: neither"),
        ("prompts", '{"prompt": "x"}\nnot json', ":2 is broken"),
        ("sharegpt", '{"no": "list"}', "not ShareGPT's JSON"),
    ],
)
def test_broken_traces_name_the_line(tmp_path, name, content, says):
    path = tmp_path / "trace"
    path.write_text(content)
    with pytest.raises(UsageError, match=says):
        workload(name, {"path": path}).sessions(0)


@pytest.mark.parametrize(
    "name,options,says",
    [
        ("chta", {}, "did you mean 'chat'"),
        ("chat", {"turn": 1}, "did you mean 'turns'"),
        ("chat", {"turns": 0}, "turns"),
        ("chat", {"load": {"process": "posson"}}, "load.process"),
        ("chat", {"load": {"process": "trace"}}, "no times of its own"),
        ("mooncake", {}, "path"),
        ("mooncake", {"path": "/nowhere"}, "No such file"),
    ],
)
def test_bad_workloads_are_refused(name, options, says):
    with pytest.raises(UsageError, match=says):
        workload(name, options).sessions(0)


def test_all_workloads_are_known():
    assert set(WORKLOADS) == {"chat", "document", "agents", "mixed", "sharegpt", "mooncake", "prompts"}


@given(
    st.sampled_from(["constant", "poisson", "gamma", "ramp"]),
    st.floats(0.5, 500),
    st.floats(0.1, 4),
    st.integers(1, 200),
    st.integers(0, 5),
)
@settings(max_examples=60)
def test_arrivals_ascend_and_keep_their_rate(process, rate, burstiness, n, seed):
    due = offsets(Load(process=process, rate=rate, rate_end=2 * rate, burstiness=burstiness), n, seed)
    assert len(due) == n and (due[1:] >= due[:-1]).all() and due[0] >= 0
    if process != "ramp":
        assert due[-1] == pytest.approx(n / rate), "n sessions take n/rate seconds"


def test_burstiness_is_the_gammas_shape():
    import numpy as np

    for burstiness in (0.25, 1.0, 4.0):
        gaps = np.diff(offsets(Load(process="gamma", rate=10, burstiness=burstiness), 20000, 1))
        assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.06)
    ramp = np.diff(offsets(Load(process="ramp", rate=1, rate_end=10), 20000, 1))
    assert ramp[:2000].mean() / ramp[-2000:].mean() == pytest.approx(9.55 / 1.45, rel=0.15)
