"""What type checkers must refuse: each line that says `wrong`, and no other."""

from datetime import timedelta

from ostler import Job, Ostler
from ostler.testing import Bench

app = Ostler()


@app.job(queue="work")
def add(job: Job, a: int, b: int = 1) -> int:
    return a + b


@app.job(queue="work")
async def fetch(job: Job, url: str) -> dict[str, str]:
    return {"url": url}


add.enqueue()  # wrong: an argument is missing
add.enqueue(a="1")  # wrong: a text is no number
add.enqueue(a=1, c=2)  # wrong: no such argument
fetch.enqueue(url=1)  # wrong
add.options(prio=1)  # wrong: no such option
add.options(priority="high")  # wrong
add.options(run_at=timedelta(1))  # wrong: a time is not a duration
text: str = add.enqueue(a=1).result()  # wrong: it is an int
number: int = fetch.enqueue(url="x").result()  # wrong: it is a dict
later: str = add.s(a=1).then(fetch.s(), into="url").enqueue().result()  # wrong: it is the last step's
add.enqueue(a=1).result(timeout="soon")  # wrong
add.s(1, 2, 3)  # wrong: too many
app.find(7).artifacts()[0].path()  # wrong: only a job has a place to put it
app.batch([add])  # wrong: a task is no step
app.job(retries=3)  # wrong: attempts=4
app.task  # wrong: app.job
add.delay(a=1)  # wrong: enqueue
add.enqueue(a=1).get()  # wrong: result
add(a=1)  # wrong: a job handle is missing
add(1)  # wrong: so it is here
with Bench(app) as bench:
    bench.enqueue(add)  # wrong: an argument is missing
    bench.enqueue(add, a=1).result().upper()  # wrong: it is an int
