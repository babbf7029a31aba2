"""One request can be followed through the logs of all that work for it."""

from __future__ import annotations

import json
import logging

import pytest

from cluster.processes.logs import RecordFormatter
from router.generation import Generation
from speculation.messages import Sampling, SessionId
from tests.stack import dispatcher, draft_worker, held_out_prompts, target_worker
from transport.tracing import SessionLog


async def test_lines_about_a_session_name_its_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with target_worker() as target, draft_worker() as draft:
        async with dispatcher([target.worker.address], [draft.worker.address]) as serving:
            for request in ("req-1", "req-2"):
                generation = Generation(held_out_prompts()[0], Sampling(temperature=0.0), 20, request_id=request)
                assert [item async for item in serving.generate(generation)]
    records = [json.loads(RecordFormatter(json=True).format(record)) for record in caplog.records]
    for name in ("router.dispatch", "target_service.verify_loop", "draft_service.lookahead"):
        told = [record for record in records if record["logger"] == name]
        assert {record["request"] for record in told} == {"req-1", "req-2"}, name
        assert all("session" in record for record in told)
        assert any(record["message"].startswith("opened ") for record in told)
    ends = [r["message"] for r in records if r["logger"] == "target_service.verify_loop" and "ended" in r["message"]]
    assert len(ends) == 2
    assert all("(length) after 20 tokens" in end or "(stop) after" in end for end in ends)


def test_an_id_cannot_begin_a_line_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    SessionLog(logging.getLogger("x"), SessionId(1), "a\nb").warning("hello")
    (record,) = caplog.records
    assert "\n" not in RecordFormatter(json=False).format(record)
