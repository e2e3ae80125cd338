"""The clip service, whose worker is killed in the moment between publishing and being done, the first time."""

import os
import signal

from ostler import Job
from ostler.apps.clips import app

_publish = Job.publish


def publish(job, path, key):
    published = _publish(job, path, key)
    if job.crashes == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return published


Job.publish = publish
__all__ = ["app"]
