from ostler.testing import Bench
from web import app


def test_an_uploaded_text_gets_a_report_and_highlights() -> None:
    with Bench(app) as bench:
        client = bench.client()
        job = client.post("/reader/texts?title=Moby", content="Whales swim. It rained. Whales sing.").json()["job"]
        assert app.find(job).result()["words"] == 6  # runs the job
        bench.model("highlights", lambda payload: [payload["text"][:12]])
        assert client.get(f"/reader/texts/{job}/highlights").json() == ["Whales swim."]
        assert client.get("/reader/texts/999/highlights").status_code == 404
