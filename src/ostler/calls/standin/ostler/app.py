"""The stand-in's app: it keeps models, and accepts everything else that a file may declare. Standard library, Python 3.9."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Nothing:
    """Takes whatever it is asked, and does nothing: what a file declares beside its models is not used here."""

    def __init__(self, *_args: Any, **_keywords: Any) -> None: ...

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """As a decorator it leaves the function as it is."""
        return args[0] if len(args) == 1 and callable(args[0]) and not keywords else Nothing()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()

    def __class_getitem__(cls, _item: Any) -> Any:
        return cls


class Task(Nothing):
    """A declared job: it can be called, and nothing else of it can be used in a model's process."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__name__ = getattr(function, "__name__", "job")
        self.__doc__ = function.__doc__

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return self.function(*args, **keywords)

    def _refuse(self, *_args: Any, **_keywords: Any) -> Any:
        raise RuntimeError(
            f"job {self.__name__} cannot be stored from a model that runs in another environment: "
            "store it from the code that calls the model"
        )

    enqueue = enqueue_async = enqueue_many = enqueue_many_async = _refuse


class Model:
    """A declared model."""

    def __init__(self, name: str, target: Any) -> None:
        self.name, self.target = name, target


class Ostler(Nothing):
    """The declarations of one file."""

    def __init__(self, *_args: Any, **_keywords: Any) -> None:
        self.models: dict[str, Model] = {}

    def model(self, name: str, **_options: Any) -> Callable[[Any], Any]:
        def declare(target: Any) -> Any:
            self.models[name] = Model(name, target)
            return target

        return declare

    def server(self, name: str, *_args: Any, **_options: Any) -> None:
        self.models[name] = Model(name, None)

    def job(self, *_args: Any, **_options: Any) -> Callable[[Callable[..., Any]], Task]:
        return Task

    def _refuse(self, *_args: Any, **_keywords: Any) -> Any:
        raise RuntimeError(
            "a model that runs in another environment cannot call models: call both from the job or program that needs them"
        )

    call = call_sync = stream = stream_sync = answer = answer_sync = _refuse
