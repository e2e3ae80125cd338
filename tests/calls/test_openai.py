"""OpenAI's routes, with its own Python package against a real node, and byte for byte where that package would hide something."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading
import types
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from ostler.calls.openai import ROUTES, spoken
from ostler.calls.running import _SPOKEN
from ostler.calls.speech import error_object
from ostler.plane import openai as routes
from ostler.plane.plan import Refuse
from tests.harness import Node, call, until

SPEAKERS = Path(__file__).parent / "speakers.py"
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory):
    found = Node(tmp_path_factory.mktemp("openai") / "node", SPEAKERS).start()
    yield found
    found.kill()


@pytest.fixture(scope="module")
def client(node: Node):
    with OpenAI(base_url=f"{node.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def say(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


# ---- embeddings


def test_embeddings_come_in_the_packages_own_base64_and_as_numbers(client: OpenAI) -> None:
    found = client.embeddings.create(model="org/minilm:v1", input=["a", "bcd"])
    assert [one.embedding for one in found.data] == [[1.0, 0.5, -1.25], [3.0, 0.5, -1.25]]
    assert (found.model, found.usage.prompt_tokens) == ("org/minilm:v1", 0)  # nobody counted tokens
    found = client.embeddings.create(model="org/minilm:v1", input="abc", encoding_format="float", user="counts")
    assert (found.data[0].embedding, found.usage.total_tokens) == ([3.0, 0.5, -1.25], 3)


def test_base64_is_sent_only_where_it_is_asked_for(node: Node) -> None:
    ask = {"model": "org/minilm:v1", "input": "abc"}
    assert node.post("/v1/embeddings", ask, **JSON)[1]["data"][0]["embedding"] == [3.0, 0.5, -1.25]
    status, body = node.post("/v1/embeddings", {**ask, "encoding_format": "base64"}, **JSON)
    assert (status, body["data"][0]["embedding"]) == (200, "AABAQAAAAD8AAKC/")


def test_a_request_that_names_its_model_at_its_very_end_finds_it(client: OpenAI) -> None:
    texts = [f"{n} " + 'quo"te\\ "model": "x" ' * 40 for n in range(1000)]  # about a megabyte, and the name behind it
    found = client.embeddings.create(model="org/minilm:v1", input=texts)
    assert [one.embedding[0] for one in found.data] == [float(len(text)) for text in texts]


# ---- chat


def test_chat(client: OpenAI) -> None:
    found = client.chat.completions.create(model="smol", messages=say("hello you"))
    assert found.choices[0].message.content == "hello you"
    assert (found.choices[0].finish_reason, found.object, found.usage) == ("stop", "chat.completion", None)
    assert found.id.startswith("chatcmpl-") and found._request_id and found._request_id in found.id
    found = client.chat.completions.create(model="smol", messages=say("a b"), user="counts")
    assert found.usage is not None and (found.usage.completion_tokens, found.usage.total_tokens) == (2, 5)


def test_the_model_gets_messages_and_options_in_one_form(client: OpenAI) -> None:
    parts: Any = [{"type": "text", "text": "whole "}, {"type": "text", "text": "thing"}]
    found = client.chat.completions.create(
        model="smol", messages=[{"role": "user", "content": parts}], max_completion_tokens=7, stop="x", temperature=0.5
    )
    content = found.choices[0].message.content
    assert content == repr(
        [[{"role": "user", "content": "whole thing"}], {"temperature": 0.5, "max_tokens": 7, "stop": ["x"]}]
    )
    assert found.choices[0].finish_reason == "length"


def test_a_chat_streams(client: OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="smol", messages=say("one two three"), stream=True))
    assert [c.choices[0].delta.content for c in chunks] == ["", "one", " two", " three", None]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks[-2:]] == [None, "stop"]
    assert {(c.object, c.id) for c in chunks} == {("chat.completion.chunk", chunks[0].id)}
    told = client.chat.completions.create(
        model="smol", messages=say("a b"), user="counts", stream=True, stream_options={"include_usage": True}
    )
    last = list(told)[-1]
    assert last.choices == [] and last.usage is not None and last.usage.total_tokens == 5


def test_pieces_are_there_before_the_stream_ends_and_closing_it_cancels(client: OpenAI, tmp_path: Path) -> None:
    go = tmp_path / "go"
    stream = client.chat.completions.create(model="smol", messages=say(f"first wait={go} last"), stream=True)
    texts = (chunk.choices[0].delta.content for chunk in stream)
    assert next(text for text in texts if text) == "first"
    until(Path(f"{go}.begun").exists, "the model to wait")
    stream.close()
    until(Path(f"{go}.left").exists, "the model to notice")
    assert client.chat.completions.create(model="smol", messages=say("free")).choices[0].message.content == "free"


def test_an_async_model_and_the_async_client(node: Node) -> None:
    async def talk() -> list[str]:
        async with AsyncOpenAI(base_url=f"{node.url}/v1", api_key="none", max_retries=0) as client:

            async def one(text: str) -> str:
                if text.startswith("w"):
                    found = await client.chat.completions.create(model="atalk", messages=say(text))
                    return found.choices[0].message.content or ""
                stream = await client.chat.completions.create(model="atalk", messages=say(text), stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            said = await asyncio.gather(*map(one, ["whole", "streamed", "was", "both"]))
            vectors = await client.embeddings.create(model="atalk", input=["a", "b"])
            with pytest.raises(openai.InternalServerError, match="boom"):
                await client.chat.completions.create(model="atalk", messages=say("!"))
            return [*said, str(len(vectors.data))]

    assert asyncio.run(talk()) == ["whole", "streamed", "was", "both", "2"]


def test_an_error_in_the_middle_of_a_stream_is_raised_there(client: OpenAI) -> None:
    seen = []
    with pytest.raises(openai.APIError, match="RuntimeError: boom"):
        for chunk in client.chat.completions.create(model="smol", messages=say("one boom"), stream=True):
            seen.append(chunk.choices[0].delta.content)  # noqa: PERF401
    assert seen == ["", "one"]
    with pytest.raises(openai.BadRequestError, match="I do not say that"):  # nothing was sent: an ordinary error
        client.chat.completions.create(model="smol", messages=say("bad"), stream=True)


def test_what_has_run_is_not_repeated_by_the_client(node: Node, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    with (
        OpenAI(base_url=f"{node.url}/v1", api_key="none") as patient,  # by default it repeats what fails, twice
        pytest.raises(openai.InternalServerError, match="boom"),
    ):
        patient.chat.completions.create(model="smol", messages=say(f"mark={marks} boom"))
    assert marks.read_text() == "run\n"


def test_a_busy_model_is_a_rate_limit(client: OpenAI, node: Node, tmp_path: Path) -> None:
    go = tmp_path / "go"

    def ask() -> None:
        with OpenAI(base_url=f"{node.url}/v1", api_key="none", max_retries=0) as own:
            own.chat.completions.create(model="smol", messages=say(f"wait={go}"))

    threads = [threading.Thread(target=ask) for _ in range(2)]  # one runs, one waits
    threads[0].start()
    until(Path(f"{go}.begun").exists, "the first to run")
    threads[1].start()
    until(lambda: node.get("/api/v1/health")[1]["models"]["talk:smol"]["waiting"] == 1, "the second to wait")
    with pytest.raises(openai.RateLimitError, match="busy") as busy:
        client.chat.completions.create(model="smol", messages=say("me too"))
    go.touch()
    for thread in threads:
        thread.join(60)
    assert int(busy.value.response.headers["retry-after"]) >= 1


# ---- transcriptions


def test_transcriptions_in_all_forms(client: OpenAI) -> None:
    heard = "4 bytes of audio/x-wav in en"
    file = ("a.wav", b"RIFF", "audio/x-wav")
    found = client.audio.transcriptions.create(model="ears", file=file, language="en")
    assert found.text == heard
    text: Any = client.audio.transcriptions.create(model="ears", file=file, language="en", response_format="text")
    assert text == f"{heard}\n"
    told = client.audio.transcriptions.create(model="ears", file=file, language="en", response_format="verbose_json")
    assert (told.text, told.language, told.duration) == (heard, "english", 1.5)
    assert told.segments is not None and (told.segments[0].id, told.segments[0].end) == (0, 1.5)
    whole = client.audio.transcriptions.create(model="ears", file=file, language="en", prompt="plain")
    assert whole.text == heard
    whole = client.audio.transcriptions.create(model="ears", file=file, prompt="pieces")
    assert whole.text.startswith("4bytesof")
    events = list(client.audio.transcriptions.create(model="ears", file=file, prompt="pieces", stream=True))
    assert [e.type for e in events][-2:] == ["transcript.text.delta", "transcript.text.done"]
    assert events[-1].type == "transcript.text.done" and events[-1].text.startswith("4bytesof")


def test_audio_may_come_before_the_name_of_its_model(node: Node) -> None:
    """As `curl -F file=@a.wav -F model=ears` sends it."""
    audio = random.Random(1).randbytes(3_000_000)
    mark = b"----mark"
    body = b'--%b\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n\r\n%b\r\n' % (mark, audio)
    body += b'--%b\r\ncontent-disposition: form-data; name="model"\r\n\r\nears\r\n--%b--\r\n' % (mark, mark)
    kind = {"content-type": "multipart/form-data; boundary=----mark"}
    status, found = call(node.url, "POST", "/v1/audio/transcriptions", body, kind)
    assert (status, found["text"].split()[0]) == (200, "3000000")


# ---- models


def test_models_are_listed_and_found_by_their_ids(client: OpenAI) -> None:
    ids = [model.id for model in client.models.list()]
    assert ids == ["org/minilm:v1", "vectors:shared", "smol", "talk:shared", "atalk", "ears"]
    assert client.models.retrieve("org/minilm:v1").owned_by == "ostler"
    assert client.models.retrieve("talk:smol").id == "talk:smol"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("mute")


@pytest.mark.parametrize("name", ["talk:shared", "zoo:anything/at:all", "atalk", "atalk:atalk"])
def test_a_model_may_be_named_with_its_task(client: OpenAI, name: str) -> None:
    found = client.chat.completions.create(model=name, messages=say("x"))
    assert found.model == name
    assert found.choices[0].message.content == ("anything/at:all" if name.startswith("zoo") else "x")


# ---- what is refused


def test_an_unknown_model_is_not_found(client: OpenAI) -> None:
    for name in ("gpt-5", "mute", "org/minilm:v1", "zoo:../../etc"):  # unknown, or not one that chats
        with pytest.raises((openai.NotFoundError, openai.BadRequestError)) as refused:
            client.chat.completions.create(model=name, messages=say("x"))
        body = refused.value.body
        assert isinstance(body, dict) and set(body) == {"message", "type", "param", "code"}
        assert body["param"] == "model"
        assert refused.value.code == ("BAD_MODEL" if name.startswith("zoo") else "model_not_found")
        assert refused.value.status_code == (400 if name.startswith("zoo") else 404)


def test_an_id_that_could_mean_two_models_is_refused_with_both_names() -> None:
    def task(name: str) -> Any:
        return types.SimpleNamespace(name=name, models={"m": {}}, speaks=["chat"], default="m", any_model=False)

    one = routes.Routes(types.SimpleNamespace(max_body=100, tasks={"a": task("a"), "b": task("b")}))  # type: ignore[arg-type]
    refused = one.find("m", "/v1/chat/completions")
    assert isinstance(refused, Refuse) and "call it a:m or b:m" in refused.message
    assert [one.find(name, "/v1/chat/completions")[0].name for name in ("a", "a:m", "b:m")] == ["a", "a", "b"]  # type: ignore[index]


def test_an_id_that_two_tasks_have_is_told_apart_by_what_is_asked(client: OpenAI) -> None:
    assert client.embeddings.create(model="shared", input="abc").data[0].embedding[0] == 3.0
    assert client.chat.completions.create(model="shared", messages=say("x")).choices[0].message.content == "x"


@pytest.mark.parametrize(
    ("path", "ask", "param"),
    [
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": [1, 2]}, "input"),
        ("/v1/embeddings", {}, "input"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ("/v1/embeddings", {"input": "a", "dimensions": 2}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "dimensions": "2"}, "dimensions"),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "king", "content": "x"}]}, "messages[0]"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        ("/v1/chat/completions", {"messages": say("x"), "temperature": "hot"}, "temperature"),
        ("/v1/chat/completions", {"messages": say("x"), "max_tokens": 0}, "max_tokens"),
        ("/v1/chat/completions", {"messages": say("x"), "n": 2}, "n"),
        ("/v1/chat/completions", {"messages": say("x"), "stop": 7}, "stop"),
        ("/v1/chat/completions", {"messages": say("x"), "stream": "yes"}, "stream"),
        ("/v1/audio/transcriptions", {}, "file"),
    ],
)
def test_a_bad_request_says_which_part_of_it_is_bad(node: Node, path: str, ask: Any, param: str) -> None:
    model = {"/v1/embeddings": "org/minilm:v1", "/v1/chat/completions": "smol"}.get(path, "ears")
    status, body = node.post(path, {"model": model, **ask}, **JSON)
    error = body["error"]
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert len(error["message"]) > 10


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/v1/chat/completions", b"{", 400, "BAD_JSON"),
        ("/v1/chat/completions", b"[]", 400, "NO_MODEL"),
        ("/v1/chat/completions", b'{"messages": []}', 400, "NO_MODEL"),
        ("/v1/chat/completions", b'{"model": 7}', 400, "NO_MODEL"),
        ("/v1/chat/completions", b'{"model": "smol", "messages": [' + b"[" * 300 + b"]" * 300 + b"]}", 400, None),
        ("/v1/completions", b'{"model": "smol", "prompt": "x"}', 404, None),  # of servers alone
        ("/v1/nothing", b"{}", 404, None),
    ],
)
def test_what_is_no_request_is_refused(node: Node, path: str, body: bytes, status: int, code: str | None) -> None:
    found, told = node.post(path, body, **JSON)
    assert found == status, told
    assert code is None or told["error"]["code"] == code


def test_a_method_that_is_wrong_and_a_vector_too_few_are_told(client: OpenAI, node: Node) -> None:
    assert node.get("/v1/embeddings")[0] == 405
    assert node.post("/v1/models", {})[0] == 405
    with pytest.raises(openai.InternalServerError, match="2 texts, found 1 vectors"):
        client.embeddings.create(model="org/minilm:v1", input=["short", "long"])


def test_the_api_key_is_the_nodes_token(make_node) -> None:
    secret = "a-secret-token-of-some-length"
    node = make_node(app=SPEAKERS, OSTLER_TOKEN=secret, ready=False)
    with OpenAI(base_url=f"{node.url}/v1", api_key=secret, max_retries=0) as known:
        assert known.chat.completions.create(model="atalk", messages=say("in")).choices[0].message.content == "in"
    with OpenAI(base_url=f"{node.url}/v1", api_key="guessed", max_retries=0) as stranger:
        for ask in (stranger.models.list, lambda: stranger.embeddings.create(model="atalk", input="x")):
            with pytest.raises(openai.AuthenticationError, match="token"):
                ask()


# ---- the search for a name in a long body


def _look(body: bytes) -> Any:
    search = routes.look(body)
    with contextlib.suppress(StopIteration):
        while True:
            try:
                next(search)
            except StopIteration as found:
                return found.value


def _any_json(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(7 if depth < 4 else 5)
    if kind < 3:
        return "".join(rng.choice('ab"\\{}[],: model\n') for _ in range(rng.randrange(12)))
    if kind == 3:
        return rng.choice([1, -2.5, True, None])
    if kind == 4:
        return "model"
    if kind == 5:
        return [_any_json(rng, depth + 1) for _ in range(rng.randrange(4))]
    keys = ["model", "a", 'mo"del', "input"]
    return {rng.choice(keys): _any_json(rng, depth + 1) for _ in range(rng.randrange(4))}


def test_the_name_is_found_as_a_json_parser_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "_STRETCH", 7)
    monkeypatch.setattr(routes, "_AT_ONCE", 2)
    rng = random.Random(3)
    named = 0
    for _ in range(5000):
        value = _any_json(rng)
        found = value.get("model") if isinstance(value, dict) else None
        wanted = found if isinstance(found, str) else None
        body = json.dumps(value, indent=rng.choice([None, 2])).encode()
        assert _look(body) == wanted, body
        named += wanted is not None
    assert named > 100
    for cut in range(len(body)):
        _look(body[:cut])  # whatever it is, it ends


def test_an_app_whose_models_speak_nothing_keeps_these_paths_for_itself() -> None:
    def has(path: str, **about: Any) -> bool:
        task = types.SimpleNamespace(**{"speaks": [], "is_server": False, **about})
        return routes.Routes(types.SimpleNamespace(tasks={"a": task})).has(path)  # type: ignore[arg-type]

    assert not has("/v1/models") and not has("/v1/embeddings") and not has("/v1/completions", speaks=["chat"])
    assert has("/v1/models", speaks=["chat"]) and has("/v1/models/a/b", speaks=["chat"])
    assert has("/v1/completions", is_server=True) and not has("/v1/mine", is_server=True)


def test_bodies_that_wait_for_their_name_are_bounded() -> None:
    one = routes.Routes(types.SimpleNamespace(max_body=100, tasks={}))  # type: ignore[arg-type]

    class Long:
        length = routes._KEPT // 2

    first, second, third = Long(), Long(), Long()
    assert not isinstance(one._keep(first), Refuse)  # type: ignore[arg-type]
    assert not isinstance(one._keep(second), Refuse)  # type: ignore[arg-type]
    refused = one._keep(third)  # type: ignore[arg-type]
    assert isinstance(refused, Refuse) and refused.status == 503
    del first
    assert not isinstance(one._keep(third), Refuse)  # type: ignore[arg-type]


def test_the_methods_are_named_the_same_everywhere() -> None:
    assert tuple(ROUTES.values()) == _SPOKEN

    class Half:
        def embed(self, texts: Any) -> None: ...

        def chat(self, messages: Any, options: Any) -> None: ...

    assert spoken(Half) == ["chat"]
    assert error_object(400, "x", "y", "z")["error"] == {
        "message": "y",
        "type": "invalid_request_error",
        "param": "z",
        "code": "x",
    }
