"""Eight simulated devices, no accelerator, and a cache of the tests' own: set before anything imports jax."""

import atexit
import gc
import os
import shutil
import tempfile
from importlib import metadata

import shapes

os.environ["JAX_PLATFORMS"] = "cpu"
flags = ["--xla_force_host_platform_device_count=8"]
# Compiling is nearly all that small tests do: leave out the passes that only make large programs faster.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
if metadata.version("jaxlib").startswith("0.10."):
    # The older code generator compiles in half the time. Later versions no longer have it, and refuse unknown flags.
    flags.append("--xla_cpu_use_fusion_emitters=false")
# A lower instruction set than the processor's is the user's to choose: its committed losses are then compared with.
flags += [flag for flag in os.environ.get("XLA_FLAGS", "").split() if flag.startswith("--xla_cpu_max_isa=")]
os.environ["XLA_FLAGS"] = " ".join(flags)
if "PYTEST_XDIST_WORKER" not in os.environ:
    caches = tempfile.mkdtemp(prefix="jaxformer-tests-")
    atexit.register(shutil.rmtree, caches, ignore_errors=True)
    os.environ.setdefault("JAXFORMER_CACHE", f"{caches}/data")
    # A run that is stopped and resumed compiles the same programs again: once is enough, for all test processes.
    os.environ["JAX_COMPILATION_CACHE_DIR"] = f"{caches}/programs"
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
# Which line of Python an operation comes from is told to the compiler at every operation, and read by nobody here.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
# Tracing makes millions of objects that live on: looking through them for garbage is a tenth of the time.
gc.set_threshold(100_000, 50, 100)
shapes.install()
