"""User code that a configuration names as ``module:name``.

User code is imported with the current directory on the path, unless an environment variable refuses
user code. A problem with user code becomes a one-line error that names the code. The key
``run.user_code``, which also can refuse user code, is checked where configurations are read
(:mod:`megapipe.cli`).
"""

import contextlib
import importlib
import inspect
import os
import re
import sys
import traceback
from _sitebuiltins import Quitter  # quit and exit
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from megapipe.errors import MegapipeError
from megapipe.util.paths import exists

FAILURES = (Exception, SystemExit)
"""Exceptions of user code that become errors. SystemExit is one: sys.exit() would otherwise end the
run as if it were done."""
ENVIRONMENT, OLD_ENVIRONMENT = "MEGAPIPE_USER_CODE", "MEGAPIPE_OWN_CODE"
"""Environment variable, and its name in version 0.1. With it a site or a user refuses all user
code, whatever configurations say."""
TRANSFORMERS = "hf:"
"""Beginning of a ``model.source`` that is a class of transformers, which is no user code."""
REMOTE_CODE = "trust_remote_code"
"""Entry of ``model.options`` that lets Python code of a class's folder run, which is user code."""
_SPEC = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*"


def is_user_code(text: str) -> bool:
    """Whether `text` has the form ``module:name``; the module may have dots."""
    return re.fullmatch(_SPEC, text) is not None and not is_class_name(text)


def is_class_name(text: str | None) -> TypeGuard[str]:
    """Whether `text` names a class of transformers, as ``hf:FOLDER``."""
    return text is not None and text.startswith(TRANSFORMERS)


def is_class_folder(text: str | None) -> bool:
    """Whether `text` names a class of transformers with weights: not a configuration alone."""
    return is_class_name(text) and not text.endswith(".json")


def is_source(text: str) -> bool:
    """Whether a data source is user code. A file with that name takes precedence."""
    return is_user_code(text) and not exists(Path(text))


def refusal() -> str | None:
    """Return why the environment does not let user code run; None if it does."""
    for name in (ENVIRONMENT, OLD_ENVIRONMENT):
        value = os.environ.get(name, "") or "allow"
        if value == "refuse":
            return f"it names code to run, which {name}=refuse does not allow"
        if value != "allow":
            return f"{name}={value} in the environment: expected allow or refuse"
    return None


def names_or_code(names: Iterable[str]) -> str:
    """Return a regular expression for `names` and all texts of the form ``module:name``."""
    return f"^({'|'.join([*names, _SPEC])})$"


class UserCode:
    """A user-defined function or class.

    Args:
        spec: ``module:name``.
        what: beginning of error lines, such as ``schedule`` or ``optimizer.rule=``.
        error: the class of the errors that are raised by this class and :meth:`call`.
        kind: noun for the error that the module has no such name, for example ``class``.

    Raises:
        MegapipeError: the environment refuses user code, or the code is missing, is not callable,
            or raises an exception at import.
    """

    def __init__(
        self, spec: str, *, what: str, error: type[MegapipeError], kind: str = "function"
    ) -> None:
        self.spec = spec
        self._error = error
        self._kind = kind
        self._label = f"{what}{spec}" if what.endswith("=") else f"{what} {spec}"
        self._check_allowed()
        with _current_directory_on_path():
            self.function = self._find()

    def _check_allowed(self) -> None:
        if (reason := refusal()) is not None:
            raise self.problem(reason)

    def _find(self) -> Callable[..., Any]:
        if not is_user_code(self.spec):  # imported code always has this form
            raise self.problem("write module:name, as in my_module:build")
        module, _, name = self.spec.partition(":")
        try:
            function = getattr(importlib.import_module(module), name, None)
        except FAILURES as error:
            absent = error.name if isinstance(error, ModuleNotFoundError) else None
            if absent is not None and f"{module}.".startswith(f"{absent}."):
                raise self.problem(
                    f"there is no module {absent!r} in {os.getcwd()} or among the "
                    "installed packages"
                ) from None
            raise self.failed(error) from error
        if not callable(function):
            raise self.problem(f"module {module!r} has no {self._kind} {name!r}")
        return function

    def call(self, given: Mapping[str, Any], able: Sequence[str]) -> Any:
        """Call the code with the arguments of `given` that its signature has; return its result.

        `able`: names of all arguments that the caller could pass. An error about a required
        argument that is not in `given` lists these names.
        """
        with _current_directory_on_path():
            arguments = self._arguments(given, able)
            try:
                return self.function(**arguments)
            except FAILURES as error:
                raise self.failed(error) from error

    def check(self, able: Sequence[str]) -> None:
        """Raise an error if the signature requires an argument whose name is not in `able`."""
        self._arguments(dict.fromkeys(able), able)

    def check_positional(self, names: Sequence[str]) -> None:
        """Raise an error if the code cannot be called with the positional arguments `names`."""
        try:
            inspect.signature(self.function).bind(*names)
        except TypeError as error:
            raise self.problem(f"it is called with ({', '.join(names)}): {error}") from None
        except ValueError:  # a signature that cannot be read
            return

    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """Return the parameters of the code's signature, by name."""
        try:
            return inspect.signature(self.function).parameters
        except (TypeError, ValueError):
            raise self.problem("its parameters cannot be read") from None

    @property
    def takes_all(self) -> bool:
        """Whether the code takes arbitrary keyword arguments."""
        return any(p.kind is p.VAR_KEYWORD for p in self.parameters().values())

    def _arguments(self, given: Mapping[str, Any], able: Sequence[str]) -> dict[str, Any]:
        if self.takes_all:
            return dict(given)
        parameters = self.parameters()
        for name, parameter in parameters.items():
            optional = parameter.default is not parameter.empty
            if name in given or optional or parameter.kind is parameter.VAR_POSITIONAL:
                continue
            if name in able:
                raise self.problem(f"{name} must be given")
            rest = f"; it can be given {', '.join(able)}" if able else ": it gets no arguments"
            raise self.problem(f"its parameter {name} needs a default{rest}")
        return {name: value for name, value in given.items() if name in parameters}

    def problem(self, text: str) -> MegapipeError:
        """Return an error that names the user code, followed by `text`."""
        return self._error(f"{self._label}: {text}")

    def failed(self, error: BaseException, during: str = "") -> MegapipeError:
        """Return a one-line error for an exception of user code, with the place where it was
        raised.

        `during`, such as ``sample 3: ``, is put before the text.
        """
        if isinstance(error, MegapipeError):
            return self.problem(f"{during}{error}")
        return self.problem(f"{during}{in_one_line(error)}")


def in_one_line(error: BaseException) -> str:
    """Return an exception's type and text, with the file and line that raised it, in one line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    if isinstance(error, SyntaxError):  # its text names the place
        return text
    frames = traceback.extract_tb(error.__traceback__)
    ends = getattr(sys.exit, "__code__", None), Quitter.__call__.__code__
    # a library may have replaced sys.exit, as wandb does
    files_of_exits = [code.co_filename for code in ends if code is not None]
    while frames[-1].filename in files_of_exits:
        frames.pop()
    frame = frames[-1]
    return f"{text} ({Path(frame.filename).name}, line {frame.lineno})"


@contextlib.contextmanager
def _current_directory_on_path() -> Iterator[None]:
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # user code may have removed it
            sys.path.remove(here)
