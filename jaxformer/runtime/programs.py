"""Compiled programs that are kept ready to run: a second start neither traces, lowers nor compiles their functions.

JAX's own cache saves the compilation alone: to name a program, JAX traces and lowers the function again, which takes
seconds of Python. `jit` keeps two kinds of files beside that cache, for the commands that `compilation.enable_cache`
names, on one CPU device:

    ready/<hash>.name      the program of a call: a hash of the function, its static values, the structure, shapes and
                           dtypes of its arguments, the project's source files, versions, settings and the processor
    ready/<hash>.program   a program: a hash of its module in StableHLO, of the same versions and settings

So a changed source file asks for the module again, and the program is found if the module is the same. What cannot be
described (an object whose text is its address, a module of the user's) or warns while it is traced is not kept.
Programs are executed, so files that other users may have written are not read.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
import os
import pickle
import platform
import re
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from jax import core
from jax.experimental import serialize_executable

from jaxformer import registry
from jaxformer.runtime import code_version, compilation, directories, files

LIBRARIES = ("flax", "jax", "jaxlib", "ml_dtypes", "numpy", "optax")
"""Libraries that decide a module or its program."""
SETTINGS = ("JAX_", "LIBTPU_", "XLA_")
"""Beginnings of the names of environment variables that may change a program."""
MAX_BYTES = 2**30
"""Size of all kept programs; those that were not used for the longest time are deleted first."""

LEFT_TO_JAX = "left to jax"
"""In place of a program's hash: it cannot be written, as one that calls Python, so JAX's own cache serves it."""

logger = logging.getLogger(__name__)


def jit(function: Callable[..., Any], *, depends_on: Any = None, **options: Any) -> KeptFunction:
    """`jax.jit(function, **options)`, whose programs are kept.

    Args:
      depends_on: all that the function reads besides its arguments and the project's code; its `repr` says it whole.
      options: those of `jax.jit`. `out_shardings` may be a function that returns them, called if there is no program.
    """
    return KeptFunction(function, depends_on, options)


class KeptFunction:
    """A compiled function; a method, too, where it is an attribute of a class. See `jit`."""

    def __init__(self, function: Callable[..., Any], depends_on: Any, options: dict[str, Any]) -> None:
        self.function, self._depends_on, self._options = function, depends_on, options
        is_local = isinstance(function, functools.partial) or "<locals>" in getattr(function, "__qualname__", "")
        if depends_on is None and is_local:
            raise TypeError(f"jit: got {function}, which has values of its own, expected them as depends_on")
        self._signature = inspect.signature(function)
        names = list(self._signature.parameters)
        static = {names[index] for index in options.pop("static_argnums", ())} | set(options.pop("static_argnames", ()))
        if static:  # jax does not find the numbers of names beside other numbers
            options["static_argnums"] = tuple(sorted(map(names.index, static)))
        self._static = static
        self._programs: dict[tuple, Callable[..., Any] | None] = {}

    @functools.cached_property
    def jitted(self) -> Any:
        """The function as `jax.jit` compiles it."""
        options = dict(self._options)
        if callable(options.get("out_shardings")):
            options["out_shardings"] = options["out_shardings"]()
        return jax.jit(self.function, **options)

    def __get__(self, instance: Any, owner: type | None = None) -> Callable[..., Any]:
        """The function with its first argument, as a method."""
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the program for these arguments."""
        folder = None if registry.has_external_members() else trusted_folder()
        if folder is None:
            return self.jitted(*args, **kwargs)
        bound = self._signature.bind(*args, **kwargs)
        if bound.kwargs:  # a program takes its arguments by their positions
            return self.jitted(*args, **kwargs)
        static = tuple((name, value) for name, value in bound.arguments.items() if name in self._static)
        dynamic = [value for name, value in bound.arguments.items() if name not in self._static]
        leaves, structure = jax.tree.flatten(dynamic)
        key = (static, structure, tuple(map(_kind, leaves)), jax.sharding.get_abstract_mesh())
        if key not in self._programs:
            self._programs[key] = self._program(folder, key, bound.args, dynamic)
        program = self._programs[key]
        return self.jitted(*bound.args) if program is None else program(*dynamic)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """`jax.jit(...).lower`."""
        return self.jitted.lower(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """`jax.jit(...).trace`."""
        return self.jitted.trace(*args, **kwargs)

    def _program(self, folder: Path, key: tuple, args: tuple, dynamic: list) -> Callable[..., Any] | None:
        """The program of a call, read or compiled; None: it cannot be described, so `jitted` compiles it."""
        described = f"{self._described()} {key!r}"
        if " at 0x" in described or None in key[2]:
            return None
        structure = jax.tree.structure((tuple(dynamic), {}))
        name = folder / f"{_digest(described, code_version.source_digest(code_version.PACKAGE), _environment())}.name"
        known = _read_name(name)
        if known == LEFT_TO_JAX:
            return None
        load = functools.partial(_load, structure)
        program = _read(folder / f"{known}.program", load)
        if program is not None:
            return program
        with _warned() as warned:
            lowered = self.jitted.lower(*args)
        if warned:
            return lowered.compile()
        options = {option: value for option, value in self._options.items() if option != "out_shardings"}
        module = _digest(lowered.as_text(), f"{options} {structure} {lowered.out_tree}", _environment())
        path = folder / f"{module}.program"
        program = _read(path, load)
        if program is None:
            hits = _cache_hits.count
            with _compiled_anew():
                program = lowered.compile()
            if hits != _cache_hits.count:  # XLA does not run what it loaded and wrote again (jax 0.10.2 and 0.12.0)
                return program
            content = _dump(program)
            if content is None:
                module = LEFT_TO_JAX
            elif not _write(path, content):
                return program
        with suppress(OSError):
            files.write_atomic(name, module)
        return program

    def _described(self) -> str:
        """The function and what it depends on, as text."""
        inner: Any = getattr(self.function, "func", self.function)
        code = getattr(inner, "__code__", None)
        line = None if code is None else code.co_firstlineno
        options = {option: value for option, value in self._options.items() if option != "out_shardings"}
        return f"{inner.__module__}.{inner.__qualname__}:{line} {options} {self._depends_on!r}"


_LEAST_SECONDS = "jax_persistent_cache_min_compile_time_secs"


@functools.cache
def trusted_folder() -> Path | None:
    """The folder of kept programs; None: this process keeps none."""
    parent = compilation.ready_directory
    if parent is None or jax.default_backend() != "cpu" or jax.device_count() > 1:
        return None
    folder = parent / "ready"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        if not folder.is_dir():
            return None
    reason = directories.untrusted_reason(folder)
    if reason:
        logger.warning("compiled programs are traced anew: %s; remove that permission (chmod go-w)", reason)
        return None
    jax.monitoring.register_event_listener(_cache_hits)
    return folder


class _CacheHits:
    """The number of programs that JAX's own cache has given to this process."""

    count = 0

    def __call__(self, event: str, **_: Any) -> None:
        self.count += event == "/jax/compilation_cache/cache_hits"


_cache_hits = _CacheHits()


@functools.cache
def _environment() -> str:
    """All that decides a program besides its module: versions, settings, the device."""
    device = jax.devices()[0]
    variables = sorted((name, value) for name, value in os.environ.items() if name.startswith(SETTINGS))
    values = sorted(jax.config.values.items())
    versions = [platform.python_version(), *map(metadata.version, LIBRARIES)]
    return repr([versions, device.device_kind, device.client.platform_version, variables, values])


def _kind(leaf: Any) -> tuple | None:
    """Shape and dtype of an argument; None for a value that is being traced."""
    if isinstance(leaf, core.Tracer):
        return None
    if hasattr(leaf, "dtype"):
        return leaf.shape, str(leaf.dtype), getattr(leaf, "weak_type", False)
    return (type(leaf).__name__,)


def _digest(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def keep(make: Callable[[], Any], kind: str, depends_on: Any) -> Any:
    """`make()`, or what an earlier start with the same source files, versions and settings has kept of it.

    Args:
      make: returns an object that can be pickled, such as a tree of shapes.
      kind: name of what is made.
      depends_on: as for `jit`.
    """
    folder = None if registry.has_external_members() else trusted_folder()
    described = f"{kind} {depends_on!r}"
    if folder is None or " at 0x" in described:
        return make()
    name = _digest(described, code_version.source_digest(code_version.PACKAGE), _environment())
    kept = _read(folder / f"{name}.{kind}", pickle.loads)
    if kept is not None:
        return kept
    with _warned() as warned:
        made = make()
    if not warned:
        _write(folder / f"{name}.{kind}", pickle.dumps(made))
    return made


def _read_name(path: Path) -> str:
    """The hash of a program that a file names, or `LEFT_TO_JAX`; "" if it names none."""
    try:
        text = path.read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""
    return text if text == LEFT_TO_JAX or re.fullmatch("[0-9a-f]{64}", text) else ""


def _load(structure: Any, content: bytes) -> Callable[..., Any]:
    """The program that `_dump` wrote, whose arguments have this structure."""
    payload, results = pickle.loads(content)
    return serialize_executable.deserialize_and_load(payload, structure, results)


def _dump(program: jax.stages.Compiled) -> bytes | None:
    """A program as bytes; None if it cannot be written."""
    try:
        payload, _, results = serialize_executable.serialize(program)
        return pickle.dumps((payload, results))
    except Exception as error:  # serialization raises errors of many kinds
        logger.info("a program is not kept: %s", error)
        return None


def _read(path: Path, load: Callable[[bytes], Any]) -> Any:
    """The content of a kept file, as `load` makes it; None if there is none that is whole."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    try:
        if _checksum(path, content[32:]) != content[:32]:
            raise ValueError("it differs from its checksum")
        kept = load(content[32:])
    except Exception as error:  # whatever XLA finds in it: it is made again
        logger.warning("%s is damaged (%s): made again", path, error)
        return None
    with suppress(OSError):  # a cache that is only read
        os.utime(path)
    return kept


def _write(path: Path, content: bytes) -> bool:
    """Keeps `content` in a file. False if it cannot be written."""
    try:
        files.write_atomic(path, _checksum(path, content) + content)
        _delete_oldest(path.parent)
    except OSError as error:
        logger.info("%s: %s; it is made anew at the next start", path, error.strerror or error)
        return False
    return True


def _checksum(path: Path, content: bytes) -> bytes:
    """A hash of a file's content and name: a file under the name of another is not read."""
    return hashlib.sha256(path.name.encode() + content).digest()


def _delete_oldest(folder: Path) -> None:
    """Deletes the files that were not used for the longest time until at most `MAX_BYTES` are left."""
    status = sorted(((file.stat().st_mtime, file.stat().st_size, file) for file in folder.iterdir()), reverse=True)
    total = 0
    for _, size, file in status:
        total += size
        if total > MAX_BYTES:
            file.unlink(missing_ok=True)


class _Recorder(logging.Handler):
    """Adds what is logged from "warning" on to a list."""

    def __init__(self, seen: list[Any]) -> None:
        super().__init__(logging.WARNING)
        self.seen = seen

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record)


@contextmanager
def _warned() -> Generator[list[Any]]:
    """The warnings, and the records of the project's loggers from "warning" on, of the block; all go on as ever."""
    seen: list[Any] = []
    handler = _Recorder(seen)
    project = logging.getLogger("jaxformer")
    project.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            try:
                yield seen
            finally:
                seen += caught
    finally:
        project.removeHandler(handler)
        for each in caught:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)


@contextmanager
def _compiled_anew() -> Generator[None]:
    """JAX's own cache neither gives a program, since its name has the source lines too, nor keeps one."""
    settings = {"jax_compilation_cache_include_metadata_in_key": True, _LEAST_SECONDS: 1e9}
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
