"""The app of `ostler demo`: real work, no dependencies."""

from __future__ import annotations

from ostler import Job, Ostler

app = Ostler()
app.pool("primes", workers=2)


@app.job(queue="primes", attempts=3, timeout=120)
def count_primes(job: Job, below: int) -> dict[str, int]:
    """How many primes there are below a number, by a sieve in segments, with progress."""
    root = int(below**0.5) + 1
    small = [n for n, prime in enumerate(_sieve(root + 1)) if prime]
    found, step = 0, 200_000
    for start in range(0, below, step):
        end = min(start + step, below)
        segment = bytearray([1]) * (end - start)
        for p in small:
            first = max(p * p, (start + p - 1) // p * p)
            segment[first - start :: p] = bytes(len(range(first, end, p)))
        found += sum(segment) - sum(segment[: max(0, 2 - start)])
        job.progress(100 * end / below, f"up to {end:,}")
        job.check()
    return {"below": below, "primes": found}


def _sieve(size: int) -> bytearray:
    flags = bytearray([1]) * size
    flags[:2] = b"\0" * min(2, size)
    for n in range(2, int(size**0.5) + 1):
        if flags[n]:
            flags[n * n :: n] = bytes(len(range(n * n, size, n)))
    return flags
