"""The jobs: ostler up examples/fastapi_app/jobs.py"""

from ostler import Fail, Job, Ostler

app = Ostler()


@app.job(queue="text", attempts=3, timeout=60)
def count_words(job: Job, text: str) -> dict[str, int]:
    words = text.split()
    if not words:
        raise Fail("EMPTY", "there are no words in this text")
    job.progress(50, "counting")
    return {word: words.count(word) for word in sorted(set(words))}
