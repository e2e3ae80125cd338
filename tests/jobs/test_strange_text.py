"""Characters that databases dislike (NUL, half of a surrogate pair): what holds JSON gives them back, nothing is lost, no job is stuck."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import Node
from tests.stores import store_of

STRANGE = 'ü \x00 \ud800 \udc00 " \\ \n 💥 \\u0000'
APP = """
from ostler import Fail, Job, Ostler

app = Ostler()

@app.job(queue="q")
def tells(job: Job, text: str) -> str:
    job.progress(50, text)
    job.event("said", {"text": text})
    print(text.encode("utf-8", "replace").decode())
    return text

@app.job(queue="q")
def names(job: Job, text: str) -> None:
    job.event(text)

@app.job(queue="q", attempts=1)
def fails(job: Job, text: str) -> None:
    raise ValueError(text)

@app.job(queue="q", attempts=1)
def gives_up(job: Job, text: str) -> None:
    raise Fail(text, text)

@app.job(queue="q", unique=["text"])
def once(job: Job, text: str) -> str:
    return text

@app.job(queue="q", at_once=1, per="text")
def limited(job: Job, text: str) -> str:
    return text
"""


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def node(request: pytest.FixtureRequest, tmp_path_factory):
    folder: Path = tmp_path_factory.mktemp("strange")
    (folder / "strange.py").write_text(APP)
    with store_of(request) as url:
        running = Node(folder / "data", folder / "strange.py", "--pool", "q=2", OSTLER_STORE=url).start()
        yield running
        running.kill()


def test_arguments_results_and_events_come_back_as_they_were(node: Node) -> None:
    job = node.wait_job(node.enqueue("tells", text=STRANGE))
    assert (job["status"], job["args"], job["result"]) == ("done", {"text": STRANGE}, STRANGE)
    assert next(e for e in job["events"] if e["name"] == "said")["data"] == {"text": STRANGE}
    assert job["stage"].startswith("ü ")  # a text, not JSON: what cannot be stored is replaced
    assert node.get("/api/v1/jobs")[1]["jobs"][0]["id"] == job["id"]


def test_whatever_a_job_says_when_it_ends_it_ends(node: Node) -> None:
    for task in ("names", "fails", "gives_up"):
        job = node.wait_job(node.enqueue(task, text=STRANGE))
        assert job["attempt"] == 1, job
        assert job["status"] == ("failed" if task != "names" else job["status"])
    assert node.wait_job(node.enqueue("tells", text="next"))["result"] == "next"
    assert "Traceback" not in node.log()


def test_keys_made_of_such_texts_tell_them_apart(node: Node) -> None:
    node.post("/api/v1/workers/pause")
    texts = ["a\x00", "a\ud800", "a\ufffd", "a"]
    first = [node.enqueue("once", text=text) for text in texts]
    assert len(set(first)) == len(texts)
    again = [node.post("/api/v1/jobs", {"task": "once", "args": {"text": text}})[1] for text in texts]
    assert [(job["id"], job["duplicate"]) for job in again] == [(job, True) for job in first]
    limited = [node.enqueue("limited", text=text) for text in texts * 2]
    node.post("/api/v1/workers/resume")
    assert [node.wait_job(job)["result"] for job in first + limited] == texts * 3


@pytest.mark.parametrize("option", ["unique_key", "limit_key"])
@pytest.mark.parametrize("key", ["a\x00", "a\ud800"])
def test_a_key_that_cannot_be_stored_is_refused_in_one_sentence(node: Node, option: str, key: str) -> None:
    before = node.get("/api/v1/jobs?limit=1")[1]
    status, answer = node.post("/api/v1/jobs", {"task": "tells", "args": {"text": "x"}, option: key, "limit_max": 1})
    assert (status, answer["error"]["code"]) == (422, "BAD_ARGUMENTS")
    assert f"{option} must be text of 1 to 500 bytes" in answer["error"]["message"]
    assert node.get("/api/v1/jobs?limit=1")[1] == before
