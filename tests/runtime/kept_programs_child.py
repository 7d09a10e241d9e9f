"""Starts with kept programs in one process, which has one device. Prints JSON: name -> what was seen.

A start is a new `programs.jit` of the same function: it knows nothing but what lies in the folder.
"""

import contextlib
import functools
import json
import logging
import pathlib
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer import registry
from jaxformer.runtime import code_version, compilation, files, programs

compilation.ready_directory = pathlib.Path(sys.argv[1])
FOLDER = compilation.ready_directory / "ready"
SEEN = {}
said = []
logging.getLogger("jaxformer").addHandler(programs._Recorder(said))
X = np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4)
traces = []


def wave(x, scale=1, warn=False):
    traces.append(scale)
    if warn:
        warnings.warn("careful", stacklevel=1)
    return {"y": jnp.tanh(x @ x.T) * scale, "x": x}


def start(x=X, function=wave, depends_on="a", call=(), **options):
    """Number of traces, and result, of a start."""
    jax.clear_caches()  # jax knows what it traced in this process
    traces.clear()
    result = programs.jit(function, depends_on=depends_on, **options)(x, *call)
    return len(traces), np.asarray(result["y"])


def kept():
    return len(list(FOLDER.glob("*.program")))


def same(result):
    return bool(np.array_equal(result, np.asarray(jax.jit(wave)(X)["y"])))


first = start()
again = start()
SEEN["kept"] = [first[0], again[0], kept(), same(first[1]), same(again[1])]

edited = start(depends_on="b")
SEEN["same module"] = [edited[0], start(depends_on="b")[0], kept()]

other = functools.partial(wave, scale=3)
scaled = start(function=other, depends_on=("a", 3))
SEEN["other values"] = [
    scaled[0],
    bool(np.allclose(scaled[1], 3 * first[1])),
    start(function=other, depends_on=("a", 3))[0],
]

SEEN["shapes and dtypes"] = [
    start(X[:2])[0],
    start(X.astype(np.float16))[0],
    start(X.astype(np.int32))[0],
    start(X[:2])[0],
]

statics = dict(static_argnums=(1,), static_argnames=("warn",))
two, five = (start(call=(value,), **statics) for value in (2, 5))
SEEN["static values"] = [two[0], five[0], bool(np.allclose(five[1], 5 * first[1])), start(call=(5,), **statics)[0]]


class Scaled:
    @functools.partial(programs.jit, static_argnums=(0,), static_argnames=("power",), donate_argnames=("x",))
    def run(self, x, power=1):
        traces.append(power)
        return {"y": x * 2.0**power}

    def __repr__(self):
        return "Scaled()"


method = Scaled.__dict__["run"]
results = []
for _ in range(2):
    traces.clear()
    method._programs.clear()
    jax.clear_caches()
    given = jnp.asarray(X)
    results.append([float(Scaled().run(given, power=3)["y"][2, 3]), given.is_deleted(), len(traces)])
SEEN["method"] = results

count = kept()
for name, change in {"source": "digest of other code", "settings": None}.items():
    before = code_version.source_digest
    if change:
        code_version.source_digest = lambda *_, change=change: change
    else:
        jax.config.update("jax_default_matmul_precision", "highest")
    programs._environment.cache_clear()
    SEEN[name] = [start()[0], start()[0], kept() - count]
    code_version.source_digest = before
    jax.config.update("jax_default_matmul_precision", None)
    programs._environment.cache_clear()
SEEN["back"] = [start()[0]]

loud = functools.partial(wave, warn=True)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    SEEN["warns"] = [start(function=loud, depends_on="loud")[0] for _ in range(2)] + [len(caught)]
SEEN["address"] = [start(depends_on=object())[0] for _ in range(2)]

jaxs = len(list(FOLDER.parent.glob("jax/*-cache")))
start(depends_on="c", function=functools.partial(wave, scale=13))
SEEN["once on the disk"] = [len(list(FOLDER.parent.glob("jax/*-cache"))) - jaxs]


def calls(x):
    traces.append(0)
    return {"y": jax.pure_callback(np.cumsum, jax.ShapeDtypeStruct((12,), np.float32), x)}


count = kept()
SEEN["calls Python"] = [start(function=calls)[0], start(function=calls)[0], kept() - count]


@contextlib.contextmanager
def found_by_jax():
    yield
    jax.monitoring.record_event("/jax/compilation_cache/cache_hits")


before, anew, programs._compiled_anew = kept(), programs._compiled_anew, found_by_jax
by_jax = start(function=functools.partial(wave, scale=17), depends_on=17)
SEEN["of jax's cache"] = [kept() - before, bool(np.allclose(by_jax[1], 17 * first[1], rtol=1e-5))]
programs._compiled_anew = anew

registry._external_names.add("mine")
SEEN["external"] = [start()[0]]
registry._external_names.clear()

count, said[:] = kept(), []
names = sorted(FOLDER.glob("*.program"))
for path in names:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
damaged = start()
SEEN["damaged"] = [damaged[0], same(damaged[1]), "damaged" in said[0].getMessage() if said else False]
SEEN["mended"] = [start()[0], start()[0]]

for path in FOLDER.iterdir():
    path.unlink()
start()
mine = next(FOLDER.glob("*.program"))
start(function=other, depends_on=("a", 3))
theirs = next(path for path in FOLDER.glob("*.program") if path != mine)
mine.write_bytes(theirs.read_bytes())
foreign = start()
SEEN["foreign"] = [foreign[0], same(foreign[1])]

write, files.write_atomic = files.write_atomic, lambda *_: (_ for _ in ()).throw(OSError("read-only"))
unwritten = start(depends_on="nowhere"), start(function=functools.partial(wave, scale=7), depends_on="nowhere")
SEEN["read-only"] = [each[0] for each in unwritten] + [same(unwritten[0][1])]
files.write_atomic = write

made = []


def tree():
    made.append(0)
    return {"x": jax.ShapeDtypeStruct((2,), np.float32)}


trees = [programs.keep(tree, "shapes", depends_on) for depends_on in ("a", "a", "b")]
SEEN["values"] = [len(made), trees[1] == trees[0] == tree()]
path = sorted(FOLDER.glob("*.shapes"))[0]
path.write_bytes(path.read_bytes()[:-1] + b"?")
made.clear()
SEEN["damaged values"] = [programs.keep(tree, "shapes", "ab"[each % 2]) == trees[0] for each in range(4)] + [len(made)]

programs.MAX_BYTES = 0
start(function=functools.partial(wave, scale=11), depends_on=11)
SEEN["limit"] = [kept(), len(list(FOLDER.glob("*.shapes")))]
programs.MAX_BYTES = 2**30

programs.trusted_folder.cache_clear()
FOLDER.chmod(0o777)
SEEN["untrusted"] = [start()[0], start()[0], programs.trusted_folder() is None]
print(json.dumps(SEEN))
