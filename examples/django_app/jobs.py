"""The jobs of a Django project: ostler up examples/django_app/jobs.py"""

import os

import django

from ostler import Job, Ostler

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "settings")

app = Ostler()


@app.on_start()
def start_django() -> None:
    """Once in each worker. Django's models are imported in the jobs, after this."""
    django.setup()


@app.job(queue="mail")
def welcome(job: Job, user: int) -> str:
    from django.contrib.auth.models import User
    from django.db import close_old_connections

    close_old_connections()  # as Django does between requests
    found = User.objects.get(pk=user)
    return f"Welcome, {found.username}!"  # send the mail here
