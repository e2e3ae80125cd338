"""Two jobs: ostler up examples/quickstart.py"""

import time

from ostler import Job, Ostler

app = Ostler()


@app.job(queue="math")
def add(job: Job, a: int, b: int) -> int:
    return a + b


@app.job(queue="slow", attempts=3, timeout=60)
def count(job: Job, to: int = 10, pause: float = 0.2) -> dict[str, int]:
    for i in range(to):
        time.sleep(pause)
        job.progress(100 * (i + 1) / to, f"step {i + 1}")
    return {"counted": to}


if __name__ == "__main__":
    print("1 + 2 =", add.enqueue(a=1, b=2).result(timeout=30))
    print("enqueued job", count.enqueue(to=20))
