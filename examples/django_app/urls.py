"""Sign-up: the user is stored, and a job that welcomes them is enqueued.

When Django and Ostler share one PostgreSQL, `welcome.enqueue(user=user.pk, connection=connection)` inside `atomic()` stores the job in
the transaction of the user: either both are stored, or neither is. With two databases, as here, enqueue after the commit.
"""

from django.contrib.auth.models import User
from django.db import transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import path

from jobs import app, welcome


def signup(request: HttpRequest) -> HttpResponse:
    with transaction.atomic():
        user = User.objects.create_user(request.POST["name"])
    job = welcome.enqueue(user=user.pk)
    return JsonResponse({"user": user.pk, "job": job}, status=201)


def job(request: HttpRequest, number: int) -> HttpResponse:
    """Waits up to 20 seconds for the result: fine in a thread of a WSGI server, not in an async view (use `result_async` there)."""
    return JsonResponse({"result": app.find(number).result(timeout=20)})


urlpatterns = [path("signup", signup), path("jobs/<int:number>", job)]
