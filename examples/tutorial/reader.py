"""Reads a text and writes a report about it."""

import re
from collections import Counter
from pathlib import Path

from ostler import Fail, Job, Ostler

app = Ostler()


@app.job(queue="reader", attempts=3, timeout=300)
def report(job: Job, path: str, title: str = "Untitled") -> dict[str, int | str]:
    source = Path(path)
    if not source.exists():
        raise Fail("NO_FILE", f"{path} does not exist")  # trying again would not help
    lines = source.read_text(errors="replace").splitlines()

    words: Counter[str] = Counter()
    for number, line in enumerate(lines, 1):
        words.update(re.findall(r"[a-z']+", line.lower()))
        job.progress(100 * number / len(lines), "counting words")
        job.check()  # stops here if somebody cancelled the job
    job.event("counted", {"words": words.total()})

    page = job.scratch / "report.txt"
    common = "\n".join(f"{count:8} {word}" for word, count in words.most_common(20))
    page.write_text(f"{title}\n\n{words.total():8} words\n\n{common}\n")
    job.publish(page, f"{job.id}/report.txt")
    return {"words": words.total(), "report": f"{job.id}/report.txt"}
