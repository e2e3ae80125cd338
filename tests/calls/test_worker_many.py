"""Several calls at once: threads, an event loop, batches; and cancelling one of them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.calls.bench import Bench, until, worker

SLOW = [("slow", {}), ("slow", {"concurrency": 2}), ("aslow", {"concurrency": 2})]
NAMES = ["alone", "threads", "loop"]


@pytest.mark.parametrize(("task", "options"), SLOW, ids=NAMES)
def test_hanging_up_cancels_the_call_and_the_model_sees_it(tmp_path: Path, task: str, options: dict) -> None:
    with worker(tmp_path, task, **options) as bench:
        for number in range(5):
            client = bench.client()
            client.start({"begun": f"begun{number}", "seen": f"seen{number}"})
            bench.noted(f"begun{number}")
            assert bench.get("/info").json["in_flight"] == 1
            client.close()
            assert bench.noted(f"seen{number}") in ("", "True")
            until(lambda: bench.get("/info").json["in_flight"] == 0, "the call to end")
        assert bench.call({"quick": True}).result == "quick"


@pytest.mark.parametrize(("task", "options"), SLOW[:2], ids=NAMES[:2])
def test_a_model_that_does_not_look_is_left_to_finish_and_costs_no_time_of_the_processor(
    tmp_path: Path, task: str, options: dict
) -> None:
    with worker(tmp_path, task, **options) as bench:
        client = bench.client()
        client.start({"begun": "b", "seen": "s", "go": "go", "deaf": True})
        bench.noted("b")
        client.close()
        before, beats = bench.cpu_seconds(), len(bench.heard("beat"))
        until(lambda: len(bench.heard("beat")) > beats + 30, "a second and a half")
        assert bench.cpu_seconds() - before < 0.7
        bench.note("go")
        until(lambda: bench.get("/info").json["in_flight"] == 0, "the call to end")
        assert bench.call({"quick": True}).result == "quick"


@pytest.mark.parametrize(("task", "options"), SLOW[1:], ids=NAMES[1:])
def test_a_cancelled_call_does_not_touch_its_neighbour(tmp_path: Path, task: str, options: dict) -> None:
    with worker(tmp_path, task, **options) as bench:
        neighbour = bench.client()
        neighbour.start({"begun": "n", "seen": "cancelled neighbour", "go": "go"})
        bench.noted("n")
        for number in range(20):
            client = bench.client()
            client.start({"begun": f"b{number}", "seen": f"s{number}"})
            bench.noted(f"b{number}")
            client.close()
            bench.noted(f"s{number}")
        bench.note("go")
        assert neighbour.answer().result == "finished"
        assert not (tmp_path / "cancelled neighbour").exists()


@pytest.mark.parametrize(("task", "options"), SLOW[1:], ids=NAMES[1:])
def test_no_more_calls_than_concurrency_are_in_the_model(tmp_path: Path, task: str, options: dict) -> None:
    with worker(tmp_path, task, **options) as bench:
        clients = [bench.client() for _ in range(3)]
        for number, client in enumerate(clients):
            client.start({"begun": f"b{number}", "seen": "s", "go": f"go{number}"})
            if number < 2:
                bench.noted(f"b{number}")
        until(lambda: bench.get("/info").json["in_flight"] == 3, "three calls")
        assert not (tmp_path / "b2").exists()
        bench.note("go0")
        assert clients[0].answer().result == "finished"
        bench.noted("b2")
        for number in (1, 2):
            bench.note(f"go{number}")
            assert clients[number].answer().result == "finished"


def test_a_call_that_waits_for_its_turn_and_is_given_up_never_runs(tmp_path: Path) -> None:
    with worker(tmp_path, "slow", concurrency=2) as bench:
        busy = [bench.client(), bench.client()]
        for number, client in enumerate(busy):
            client.start({"begun": f"b{number}", "seen": "s", "go": "go"})
            bench.noted(f"b{number}")
        waiting = bench.client()
        waiting.start({"begun": "never", "seen": "s"})
        until(lambda: bench.get("/info").json["in_flight"] == 3, "the third")
        waiting.close()
        bench.note("go")
        assert [client.answer().result for client in busy] == ["finished"] * 2
        until(lambda: bench.get("/info").json["in_flight"] == 0, "all to end")
        assert not (tmp_path / "never").exists()


def test_control_routes_answer_while_the_model_computes(tmp_path: Path) -> None:
    with worker(tmp_path, "slow") as bench:
        client = bench.client()
        client.start({"begun": "b", "seen": "s", "go": "go"})
        bench.noted("b")
        assert bench.get("/healthz").json["ready"] is True
        until(lambda: bench.heard("beat")[-1][3] == {"in_flight": 1, "gpu_mb": None}, "a beat with the call")
        bench.note("go")
        assert client.answer().result == "finished"
        until(lambda: bench.heard("beat")[-1][3]["in_flight"] == 0, "a beat without it")


def test_an_async_model_that_raises_serves_on(tmp_path: Path) -> None:
    with worker(tmp_path, "aslow", concurrency=2) as bench:
        client = bench.client()
        assert client.call({"raise": True}).error == (500, "MODEL_ERROR", "RuntimeError: broken")
        assert client.call({"quick": True}).result == "quick"
        two = b'POST /infer HTTP/1.1\r\ncontent-length: 15\r\n\r\n{"quick": true}' * 2
        client.socket.sendall(two)
        assert (client.answer().result, client.answer().result) == ("quick", "quick")
        client.socket.sendall(b"POST /infer HTTP/1.1\r\ncontent-length: x\r\n\r\n")
        assert client.answer().error[0] == 400
        assert client.ended()


# ---- batches


@pytest.fixture(params=["batch", "abatch"])
def batched(request, tmp_path: Path):
    with worker(tmp_path, request.param, batch=8) as bench:
        yield bench


def hold(bench: Bench) -> object:
    """A call that keeps the model busy until `let go` is noted."""
    client = bench.client()
    client.start("hold")
    bench.noted("held")
    return client


def together(bench: Bench, payloads: list[object]) -> list[object]:
    """Calls that wait while the model is busy, and so come in one batch."""
    first = hold(bench)
    clients = [bench.client() for _ in payloads]
    for client, payload in zip(clients, payloads, strict=True):
        client.start(payload)
    until(lambda: bench.get("/info").json["in_flight"] == len(payloads) + 1, "all of them to wait")
    bench.note("let go")
    first.answer()
    return [client.answer() for client in clients]


def sizes(bench: Bench) -> list[int]:
    return bench.call("sizes").result


def test_calls_that_wait_are_taken_together_and_one_alone_does_not_wait(batched: Bench) -> None:
    assert batched.wait("ready")[1]["concurrency"] == 8
    client = batched.client()
    for number in range(20):
        assert client.call(number).result == number
    assert sizes(batched) == [1] * 21
    assert [a.result for a in together(batched, list(range(5)))] == list(range(5))
    assert sizes(batched)[21:-1] == [1, 5]


def test_a_batch_is_never_larger_than_the_limit(tmp_path: Path) -> None:
    with worker(tmp_path, "batch", batch=3) as bench:
        assert [a.result for a in together(bench, list(range(10)))] == list(range(10))
        assert max(sizes(bench)) <= 3


def test_the_error_of_one_is_not_that_of_the_others(batched: Bench) -> None:
    one, two, three, four = together(batched, ["a", "one", "bad", "b"])
    assert (one.result, four.result) == ("a", "b")
    assert two.error == (500, "MODEL_ERROR", "ValueError: one")
    assert three.error == (400, "BAD_PAYLOAD", "bad")


def test_a_batch_that_raises_is_run_again_one_by_one_once(batched: Bench) -> None:
    answers = together(batched, ["a", "all", "b"])
    assert (answers[0].result, answers[2].result) == ("a", "b")
    assert answers[1].error == (500, "MODEL_ERROR", "RuntimeError: the whole batch")


def test_a_batch_with_a_wrong_number_of_results_is_an_error(batched: Bench) -> None:
    assert "1 payloads, found 0 results" in batched.call("few").error[2]


def test_a_payload_that_is_not_json_leaves_its_batch_alone(batched: Bench) -> None:
    first = hold(batched)
    good, bad = batched.client(), batched.client()
    good.start("fine")
    bad.send("/infer", b"{", content_type="application/json")
    batched.note("let go")
    first.answer()
    assert good.answer().result == "fine"
    assert bad.answer().error[:2] == (400, "BAD_PAYLOAD")


def test_a_call_of_a_batch_whose_client_hung_up_is_left_out(batched: Bench) -> None:
    first = hold(batched)
    gone, there = batched.client(), batched.client()
    gone.start("gone")
    there.start("there")
    until(lambda: batched.get("/info").json["in_flight"] == 3, "both to wait")
    gone.close()
    batched.note("let go")
    first.answer()
    assert there.answer().result == "there"
    until(lambda: batched.get("/info").json["in_flight"] == 0, "all to end")


def test_calls_that_wait_for_the_batch_after_next_may_be_given_up_or_followed(tmp_path: Path) -> None:
    with worker(tmp_path, "batch", batch=2) as bench:
        first, one, two, followed, given_up = (bench.client() for _ in range(5))
        for client in (one, two, followed, given_up):
            assert client.call("warm").result == "warm"
        first.start("gate 1")
        bench.noted("gate 1")
        one.start("gate 2")
        two.start("two")
        followed.start("before")
        given_up.start("nobody")
        bench.note("open gate 1")
        bench.noted("gate 2")
        followed.start("after")
        given_up.close()
        bench.note("open gate 2")
        assert [c.answer().result for c in (first, one, two)] == ["gate 1", "gate 2", "two"]
        assert [followed.answer().result, followed.answer().result] == ["before", "after"]
        assert followed.call("again").result == "again"
        assert bench.get("/info").json["in_flight"] == 0


def test_many_clients_get_their_own_answers(batched: Bench) -> None:
    wrong: list[object] = []

    def run(name: int) -> None:
        client = batched.client()
        for number in range(200):
            if (found := client.call([name, number]).json.get("result")) != [name, number]:
                wrong.append((name, number, found))

    threads = [threading.Thread(target=run, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_model_with_infer_batch_alone_serves_single_calls(tmp_path: Path) -> None:
    with worker(tmp_path, "only_batch") as bench:
        assert bench.call(4).result == 8
        assert bench.call(None).error[0] == 500


def test_a_batch_waits_for_more_only_under_load(tmp_path: Path) -> None:
    with worker(tmp_path, "batch", batch=4, batch_wait=10.0) as bench:
        assert bench.call("alone").result == "alone"  # at once: nothing else was there
        first = hold(bench)
        clients = [bench.client() for _ in range(6)]
        for number, client in enumerate(clients):
            client.start(number)
        until(lambda: bench.get("/info").json["in_flight"] == 7, "all of them to wait")
        bench.note("let go")
        first.answer()
        # Of the six, some are taken together; the rest waits for a full batch, which these complete.
        more = [bench.client() for _ in range(4)]
        for number, client in enumerate(more):
            client.start(number)
        assert [c.answer().result for c in clients] == list(range(6))
