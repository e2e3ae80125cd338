"""The settings of a Django project that has users and nothing else."""

from pathlib import Path

SECRET_KEY = "only for this example"
DEBUG = True
ROOT_URLCONF = "urls"
INSTALLED_APPS = ["django.contrib.auth", "django.contrib.contenttypes"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": Path.cwd() / "django.sqlite3"}}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
