"""What tests need of their process before anything imports jax: eight simulated devices, caches of their own."""

import atexit
import hashlib
import itertools
import os
import shutil
import sys
import tempfile
import threading
from importlib import metadata
from pathlib import Path
from typing import Any

CACHES = "JAXFORMER_TEST_CACHES"
"""Names the folder that the test processes of one session share."""
KEPT = Path(__file__).parents[1] / "build" / "test-programs"
"""Programs that earlier sessions compiled: half of a first session's work. JAX names them by their source."""
KEPT_BYTES = 4 * 2**30


def prepare() -> None:
    """Sets the environment, of this process and of those that it starts. Once is enough, twice is the same."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    # A program is compiled as a whole: in 32 parts, for many cores, it takes a tenth more processor time.
    flags = ["--xla_force_host_platform_device_count=8", "--xla_cpu_parallel_codegen_split_count=1"]
    # Compiling is nearly all that small tests do: leave out the passes that only make large programs faster.
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    if metadata.version("jaxlib").startswith("0.10."):
        # The older code generator compiles in half the time. Later versions no longer have it, and refuse unknown
        # flags: two fifths of their compilation are the MLIR passes of the newer one, a quarter is LLVM's.
        flags.append("--xla_cpu_use_fusion_emitters=false")
    # A lower instruction set than the processor's is the user's to choose: its committed losses are then compared with.
    flags += [flag for flag in os.environ.get("XLA_FLAGS", "").split() if flag.startswith("--xla_cpu_max_isa=")]
    os.environ["XLA_FLAGS"] = " ".join(flags)
    if CACHES not in os.environ:
        os.environ[CACHES] = tempfile.mkdtemp(prefix="jaxformer-tests-")
        atexit.register(shutil.rmtree, os.environ[CACHES], ignore_errors=True)
        _bring_programs(Path(os.environ[CACHES]) / "programs")
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
        # Images of containers often say so. Every process that a test starts then compiles the sources of all libraries
        # again, which is two thirds of its start: what was compiled is kept outside of the sources.
        os.environ["PYTHONPYCACHEPREFIX"] = str(KEPT.with_name("test-bytecode"))
        sys.dont_write_bytecode, sys.pycache_prefix = False, os.environ["PYTHONPYCACHEPREFIX"]
    os.environ["HF_HUB_OFFLINE"] = "1"  # a name that is no directory is then looked up in the cache alone
    os.environ.setdefault("JAXFORMER_CACHE", f"{os.environ[CACHES]}/data")
    # A run that is stopped and resumed compiles the same programs again: once is enough, for all test processes.
    os.environ["JAX_COMPILATION_CACHE_DIR"] = f"{os.environ[CACHES]}/programs"
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.02"
    # The folder would otherwise be among the options of every program, and no other session would find it.
    os.environ["JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES"] = "none"
    # Which line of Python an operation comes from is told to the compiler at every operation, and read by nobody here.
    os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"


CONTEXT_PROGRAMS = 100
"""Programs that are lowered in one MLIR context. A context holds all constants of its programs as long as it lives."""


def share_contexts() -> None:
    """Programs share MLIR contexts. jax 0.10 makes one for each program in 3 ms, which a small program takes itself."""
    from jax._src.interpreters import mlir

    make, programs, lock = mlir.make_ir_context, itertools.count(), threading.Lock()
    shared: Any = None

    def make_ir_context():
        nonlocal shared
        with lock:
            if next(programs) % CONTEXT_PROGRAMS == 0:
                shared = make()
            return shared

    mlir.make_ir_context = make_ir_context


def trace_lightly() -> None:
    """Traces hold neither stacks, nor modules, nor the names of arguments, and programs are compressed least.

    Each takes a thirtieth of the tests' time. Nobody reads the first three here; the last are on disk for a session.
    """
    import zlib

    import flax
    from jax._src import api_util, compilation_cache
    from jax._src.lib import _jax

    if hasattr(_jax, "set_tracebacks_enabled"):
        _jax.set_tracebacks_enabled(False)
    flax.config.update("flax_profile", False)
    flatten = api_util.tracing_registry.flatten

    def unnamed(signature, args, kwargs, static_argnums, static_argnames) -> tuple[str, ...]:
        static = {number % len(args) for number in static_argnums if -len(args) <= number < len(args)}
        traced = [x for number, x in enumerate(args) if number not in static]
        traced += [x for name, x in kwargs.items() if name not in static_argnames]
        return ("argument",) * len(flatten(traced)[0])

    if metadata.version("jax").startswith("0.10."):  # private names, which other versions may not have
        api_util._non_static_arg_names = unnamed
    compilation_cache.compress_executable = lambda executable: zlib.compress(executable, 1)


MAX_MAPPINGS = 40_000
"""Linux lets a process have 65,530 mappings. jax 0.12 takes three for each kernel that it compiles, and dies beyond."""


def release_programs() -> None:
    """Forgets all compiled programs once the process has too many mappings; those needed again are on disk."""
    import jax

    mappings = Path("/proc/self/maps")
    if mappings.exists() and mappings.read_bytes().count(b"\n") > MAX_MAPPINGS:
        jax.clear_caches()


def skip_cleanup() -> None:
    """The process ends with its programs: jax would delete those of all tests one by one, which takes seconds."""
    from jax._src import api

    atexit.unregister(api.clean_up)


def keep_programs() -> None:
    """Keeps what this session compiled for the next one; more than 4 GiB are deleted first."""
    kept, programs = _kept_programs(), Path(os.environ[CACHES]) / "programs"
    if sum(path.stat().st_size for path in kept.glob("*")) > KEPT_BYTES:
        shutil.rmtree(kept)
    for path in programs.glob("*-cache"):
        if not path.is_symlink():
            kept.mkdir(parents=True, exist_ok=True)
            partial = kept / f"{path.name}.{os.getpid()}"
            shutil.move(path, partial)
            partial.rename(kept / path.name)


def _bring_programs(programs: Path) -> None:
    programs.mkdir()
    for path in _kept_programs().glob("*-cache"):
        (programs / path.name).symlink_to(path)


def _kept_programs() -> Path:
    """One folder for each kind of processor: a program may use any instruction of the one that it was compiled on."""
    flags = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("flags", "Features"))]
    return KEPT / hashlib.sha256("".join(flags[:1]).encode()).hexdigest()[:12]
