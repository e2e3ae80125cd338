"""A chain and a batch: ostler up examples/flows.py, then python examples/flows.py"""

from ostler import Job, Ostler

app = Ostler()


@app.job(queue="pages")
def fetch(job: Job, name: str) -> str:
    return f"the text of {name}"


@app.job(queue="pages")
def count(job: Job, text: str) -> int:
    return len(text.split())


@app.job(queue="reports")
def report(job: Job, summary: dict[str, int]) -> str:
    """The callback of the batch. The summary has its number and counts; the results are read one by one."""
    counts = app.find_batch(summary["batch"]).results()
    return f"{summary['total']} pages, {summary['failed']} failed, {sum(counts)} words"


if __name__ == "__main__":
    # A chain: count gets what fetch returned, and the id of the chain waits for its last step.
    chain = fetch.s(name="index.html").then(count.s(), into="text").enqueue()
    print("words:", chain.result(timeout=30))

    # A batch of chains: report is enqueued once, when all of them have ended.
    pages = [fetch.s(name=f"{n}.html").then(count.s(), into="text") for n in range(5)]
    batch = app.batch(pages, then=report.s(), into="summary")
    print("each:", list(batch.results(timeout=30)))
    print("report:", batch.callback(timeout=30).result(timeout=30))
