"""Code of the user's that a configuration names as ``module:name``.

It is imported with the current directory on the path, unless the environment refuses that. Every
problem with it becomes an error of one line, which names the code. ``run.own_code``, by which a
command refuses it, is read where configurations are (:mod:`megapipe.cli`).
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
from typing import Any

from megapipe.errors import MegapipeError
from megapipe.util.paths import exists

FAILURES = (Exception, SystemExit)
"""Exceptions by which code of the user's fails: a sys.exit() in it would end the run as if it were
done."""
ENVIRONMENT = "MEGAPIPE_OWN_CODE"
"""Variable by which a site or a user refuses all code of this kind, whatever configurations say."""
_SPEC = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*"


def is_user_code(text: str) -> bool:
    """Whether `text` has the form ``module:name``, with dots in the module if need be."""
    return re.fullmatch(_SPEC, text) is not None


def is_source(text: str) -> bool:
    """Whether a source of data is code of the user's; a file of that name comes first."""
    return is_user_code(text) and not exists(Path(text))


def names_or_code(names: Iterable[str]) -> str:
    """A regular expression of these names, and of whatever has the form ``module:name``."""
    return f"^({'|'.join([*names, _SPEC])})$"


class UserCode:
    """A function or class of the user's.

    Args:
        spec: ``module:name``.
        what: begins the line of an error, such as ``schedule`` or ``optimizer.rule=``.
        error: the class of the errors that are raised here and by :meth:`call`.
        kind: the noun for what is wanted, in the error where there is no such name.

    Raises:
        MegapipeError: no such module or name, not callable, an exception at its import, or refused
            by the environment, before it is imported.
    """

    def __init__(
        self, spec: str, *, what: str, error: type[MegapipeError], kind: str = "function"
    ) -> None:
        self.spec = spec
        self._error = error
        self._kind = kind
        self._where = f"{what}{spec}" if what.endswith("=") else f"{what} {spec}"
        self._check_allowed()
        with _current_directory_on_path():
            self.function = self._find()

    def _check_allowed(self) -> None:
        value = os.environ.get(ENVIRONMENT, "") or "allow"
        if value == "refuse":
            raise self.problem(f"it names code to run, which {ENVIRONMENT}=refuse does not allow")
        if value != "allow":
            raise self.problem(
                f"{ENVIRONMENT}={value} in the environment: expected allow or refuse"
            )

    def _find(self) -> Callable[..., Any]:
        if not is_user_code(self.spec):  # all that is ever imported has the form that is looked for
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
        """Call it with those of the `given` arguments that its signature takes; returns its result.

        `able` names all arguments that could be given. It is an error if the signature requires one
        that is not `given`.
        """
        with _current_directory_on_path():
            arguments = self._arguments(given, able)
            try:
                return self.function(**arguments)
            except FAILURES as error:
                raise self.failed(error) from error

    def check(self, able: Sequence[str]) -> None:
        """Raise an error if its signature requires an argument that is none of `able`."""
        self._arguments(dict.fromkeys(able), able)

    def check_positional(self, names: Sequence[str]) -> None:
        """Raise an error if it cannot be called with these arguments in this order."""
        try:
            inspect.signature(self.function).bind(*names)
        except TypeError as error:
            raise self.problem(f"it is called with ({', '.join(names)}): {error}") from None
        except ValueError:  # a signature that cannot be read
            return

    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """The parameters of its signature, by name."""
        try:
            return inspect.signature(self.function).parameters
        except (TypeError, ValueError):
            raise self.problem("what it takes cannot be read") from None

    @property
    def takes_all(self) -> bool:
        """Whether it takes keyword arguments of any name."""
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
        """An error that says which code it is about."""
        return self._error(f"{self._where}: {text}")

    def failed(self, error: BaseException, during: str = "") -> MegapipeError:
        """An error of one line for an exception of the user's code, with the place where it arose.

        `during`, such as ``sample 3: ``, stands before it.
        """
        if isinstance(error, MegapipeError):
            return self.problem(f"{during}{error}")
        return self.problem(f"{during}{in_one_line(error)}")


def in_one_line(error: BaseException) -> str:
    """An exception that was raised, and the place where it was."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    if isinstance(error, SyntaxError):  # whose text has the place
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
        with contextlib.suppress(ValueError):  # the user's code may have taken it away
            sys.path.remove(here)
