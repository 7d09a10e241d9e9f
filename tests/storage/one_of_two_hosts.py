"""One of two processes that save and restore in a bucket without a shared disk. Started by `test_bucket_hosts.py`.

    python one_of_two_hosts.py FOLDER INDEX PORT

The bucket is a folder of TensorStore's, which honours conditional writes. `FOLDER/seen-INDEX.json` says what it saw.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

URL = "gs://bucket/runs/one"


def open_bucket(folder: Path):
    """Replaces buckets by folders of this disk."""
    import tensorstore as ts

    from jaxformer.runtime import lease, object_store

    def open_kvstore(address):
        path = folder / "bucket" / address.path
        path.mkdir(parents=True, exist_ok=True)
        return ts.KvStore.open({"driver": "file", "path": f"{path}/"}).result()

    object_store.open_kvstore = open_kvstore
    lease.GRACE_SECONDS = 0.0


def values(step: int, shape: tuple[int, ...]):
    import numpy as np

    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 100 * step


def write_first(folder: Path) -> None:
    """The checkpoint of step 0, by a run of one host."""
    import numpy as np

    from jaxformer import storage
    from jaxformer.checkpoint import Checkpoints
    from jaxformer.config import CheckpointConfig
    from jaxformer.types import TrainState

    open_bucket(folder)
    arrays = {
        name: values(0, shape) if name != "zeros" else np.zeros(shape, np.float32) for name, shape in SHAPES.items()
    }
    with storage.TrainingSession(URL) as session:
        checkpoints = Checkpoints(session.root, CheckpointConfig(keep_best=0))
        import jax

        state = TrainState(np.int32(0), arrays, {}, np.zeros(2, np.uint32), {})
        checkpoints.save(jax.tree.map(jax.numpy.asarray, state), {"position": 0}, {})
        checkpoints.close()


SHAPES = {"divided": (4, 3), "whole": (5,), "zeros": (2, 2)}


def main(folder: Path, index: int, port: str) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"
    os.environ["JAXFORMER_CACHE"] = str(folder / f"cache-{index}")
    os.environ["JAXFORMER_DISTRIBUTED"] = f"127.0.0.1:{port}/2/{index}"
    open_bucket(folder)
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    from jaxformer import storage
    from jaxformer.checkpoint import Checkpoints, list_steps
    from jaxformer.config import CheckpointConfig
    from jaxformer.parallel import distributed
    from jaxformer.train.lock import WorkdirLock
    from jaxformer.types import TrainState

    distributed.join()
    mesh = jax.make_mesh((2,), ("d",))
    divided, whole = NamedSharding(mesh, PartitionSpec("d")), NamedSharding(mesh, PartitionSpec())

    def array(content, sharding):
        return jax.make_array_from_callback(content.shape, sharding, lambda part: content[part])

    def state(step):
        params = {
            "divided": array(values(step, SHAPES["divided"]), divided),
            "whole": array(values(step, SHAPES["whole"]), whole),
            "zeros": array(np.zeros(SHAPES["zeros"], np.float32), divided),
        }
        return TrainState(array(np.int32(step), whole), params, {}, array(np.zeros(2, np.uint32), whole), {})

    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state(0))
    seen = {}
    config = CheckpointConfig(keep_last=2, keep_best=1, metric="loss")

    def opened(session):
        return Checkpoints(session.root, config, session.disks)

    with storage.TrainingSession(URL) as session, WorkdirLock(session.root, is_shared=False):
        checkpoints = opened(session)
        begun = checkpoints.restore(target)  # of one host, in another format of arrays
        seen["begun"] = [int(begun.state.step), *begun.state.params["divided"].addressable_shards[0].data[0].tolist()]
        for step, loss in ((1, 2.0), (2, 1.0), (3, 3.0)):
            checkpoints.save(state(step), {"position": step}, {"loss": loss})
        checkpoints.save(state(3), {"position": 33}, {"loss": 3.0}, force=True)
        checkpoints.close()
        seen["kept"] = sorted(list_steps(session.root / "checkpoints" / "last"))
        seen["own"] = sorted(str(p.relative_to(session.root)) for p in session.root.rglob("params.divided/[0-9]*"))
    distributed.barrier("saved")
    if index == 0:  # a chunk that only the other process needs
        chunk = folder / "bucket/runs/one/checkpoints/last/3/state/params.divided/1.0"
        chunk.write_bytes(chunk.read_bytes()[:-1] + b"x")
        seen["data"] = json.loads((chunk.parents[2] / "data" / "metadata").read_text())
    os.environ["JAXFORMER_CACHE"] = str(folder / f"cache-again-{index}")
    distributed.barrier("damaged")
    with storage.TrainingSession(URL) as session:
        checkpoints = opened(session)
        restored = checkpoints.restore(target)
        seen["step"], seen["position"] = int(restored.state.step), restored.data["position"]
        expected = state(2)
        seen["equal"] = all(
            np.array_equal(a.addressable_shards[0].data, b.addressable_shards[0].data)
            for a, b in zip(jax.tree.leaves(restored.state), jax.tree.leaves(expected), strict=True)
        )
        seen["damaged"] = [path.name for path in (session.root / "checkpoints/damaged").iterdir()]
        seen["fetched"] = sorted(p.name for p in (session.root / "checkpoints/last/2").rglob("params.divided/*"))
        checkpoints.save(state(4), {"position": 4}, {"loss": 0.5})
        checkpoints.close()
        jnp.zeros(1).block_until_ready()
    (folder / f"seen-{index}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
