"""Submits a run to SkyPilot as a managed job, which it starts anew after preemptions, on any cloud.

    python -m launch.sky --name=my-run --nodes=2 --accelerators=A100:8 --spot --volume=/shared=NAME \\
        -- --config=configs/NAME.py --workdir=/shared/runs/NAME

SkyPilot copies the current directory without what .gitignore names, and --setup, by default an installation from
requirements.lock, runs on every node. After the codes 143 and 75 the job starts anew, at most --max-restarts times, and
after others it ends. Preempted machines are replaced by SkyPilot itself, which counts them for itself. The workdir has
to lie in a --volume, not in a bucket: the nodes count their restarts there.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import launch
from launch import manifests, restarts, shell
from launch.programs import Programs, exit_code_of
from launch.restarts import FIRST_DELAY_SECONDS, MAX_DELAY_SECONDS

MAX_RESTARTS = 20
"""Default of --max-restarts."""

POLL_SECONDS = 10.0
"""Seconds before the log of a job is followed again."""

MAX_FOLLOWS = 100
"""A job whose log breaks off is followed again, at most so many times."""

NOT_FINISHED = 101
"""Exit code of sky: the log has ended before the job."""

CANCELLED = 103
"""Exit code of sky: the user has cancelled the job."""

SETUP = """\
python3 -m pip install --quiet --user uv
python3 -m uv venv --quiet --clear --python 3.12 .venv
python3 -m uv pip install --quiet --python .venv/bin/python -r requirements.lock
python3 -m uv pip install --quiet --python .venv/bin/python -c requirements.lock {extra}
python3 -m uv pip install --quiet --python .venv/bin/python --no-deps .
"""


def run_script(flags: argparse.Namespace) -> str:
    """The shell script of every node.

    SkyPilot does not count restarts after the exit codes that it is told to recover from. So each node counts its own,
    in the workdir, and returns 1 when they are used up.
    """
    if flags.accelerators.startswith("tpu"):
        value = "auto"
    else:
        value = f'"$(echo "$SKYPILOT_NODE_IPS" | head -n1):{launch.PORT}/$SKYPILOT_NUM_NODES/$SKYPILOT_NODE_RANK"'
    command = shlex.join(launch.train_command(flags, flags.python))
    text = f"{launch.DISTRIBUTED}={value}\nexport {launch.DISTRIBUTED}\n"
    if flags.doctor:
        return f"{text}exec {command}\n"
    first, most = int(FIRST_DELAY_SECONDS), int(MAX_DELAY_SECONDS)
    workdir = shlex.quote(launch.train_argument(flags, "workdir"))
    return f"""{text}{command} &
run=$!
{shell.wait_for("run")}if [ "$code" -ne {launch.PREEMPTED} ] && [ "$code" -ne {launch.STALLED} ]; then exit "$code"; fi
trap - TERM
mkdir -p {workdir} || exit 1
counter={workdir}/restarts-"$SKYPILOT_NODE_RANK"
count=$(cat "$counter" 2>/dev/null || echo 0)
if [ "$count" -ge {flags.max_restarts} ]; then
  echo "launch: {flags.max_restarts} restarts (--max-restarts) are used up; delete $counter for more" >&2
  exit {launch.CRASHED}
fi
echo $((count + 1)) > "$counter"
delay=$(({first} << (count < 5 ? count : 5)))
sleep $((delay < {most} ? delay : {most}))
exit "$code"
"""


def task(flags: argparse.Namespace) -> dict[str, Any]:
    """The task (SkyPilot's task YAML)."""
    kind = "[tpu]" if flags.accelerators.startswith("tpu") else "[cuda12]" if flags.accelerators else ""
    recovery = {"max_restarts_on_errors": 0, "recover_on_exit_codes": list(launch.RESTARTABLE)}
    return {
        "name": flags.name,
        "num_nodes": flags.nodes,
        "resources": {
            **({"infra": flags.infra} if flags.infra else {}),
            **({"accelerators": flags.accelerators} if flags.accelerators else {}),
            **({"image_id": f"docker:{flags.image}"} if flags.image else {}),
            **({"use_spot": True} if flags.spot else {}),
            "job_recovery": recovery,
        },
        "workdir": ".",
        **({"volumes": dict(volume.split("=", 1) for volume in flags.volume)} if flags.volume else {}),
        "setup": f"{flags.setup}\n" if flags.setup else "set -e\n" + SETUP.format(extra=shlex.quote(f"jax{kind}")),
        "run": run_script(flags),
    }


def exit_code(code: int) -> int:
    """The launcher's exit code for one of `sky jobs launch`: 0 if the job has succeeded, 1 if not."""
    return {0: 0, CANCELLED: launch.INTERRUPTED}.get(code, launch.CRASHED)


def submit(flags: argparse.Namespace, programs: Programs) -> int:
    """Submits the task and follows it to its end. Returns the exit code.

    Raises:
      Failure: there is no SkyPilot here.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / f"{flags.name}.yaml")
        Path(path).write_text(manifests.dump(task(flags)), encoding="utf-8")
        code = programs.run(launch_command(flags, path))
    for _ in range(MAX_FOLLOWS):
        if code != NOT_FINISHED:
            break
        programs.sleep(POLL_SECONDS)
        code = programs.run(["sky", "jobs", "logs", "--name", flags.name])
    return exit_code(code)


def launch_command(flags: argparse.Namespace, path: str) -> list[str]:
    """The command that submits the task in the file `path`."""
    return ["sky", "jobs", "launch", "--yes", "--name", flags.name, path]


def make_parser(program: str | None) -> argparse.ArgumentParser:
    """The parser of this launcher."""
    parser = launch.make_parser(__doc__, program)
    parser.add_argument("--name", required=True, help="name of the job")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--accelerators", default="", help="of a node, as SkyPilot takes it: A100:8, tpu-v5litepod-8")
    parser.add_argument("--infra", default="", help="cloud/region/zone, or k8s/CONTEXT [the cheapest]")
    parser.add_argument("--spot", action="store_true", help="machines that may be preempted")
    parser.add_argument("--image", default="", help="container image to run in")
    parser.add_argument("--volume", action="append", default=[], metavar="PATH=NAME", help="a volume of SkyPilot")
    parser.add_argument("--python", default=".venv/bin/python", help="interpreter on the nodes")
    parser.add_argument(
        "--setup", default="", help="shell command that installs, instead of the one that uses the lock"
    )
    restarts.add_flag(parser, MAX_RESTARTS)
    return parser


def check(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> None:
    """Exits with code 2 if flags are wrong or contradict each other."""
    launch.at_least(parser, flags, "nodes", 1)
    launch.at_least(parser, flags, "max-restarts", 0)
    launch.refuse_multiline(parser, [*flags.train, flags.setup])
    if not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", flags.name):
        parser.error(f"--name: got {flags.name!r}, expected a-z, 0-9 and -, the first a letter")
    for volume in flags.volume:
        if not re.fullmatch(r"/[^=]+=[^=]+", volume):
            parser.error(f"--volume: got {volume}, expected PATH=NAME with an absolute path")
    workdir = launch.train_argument(flags, "workdir")
    paths = [volume.split("=")[0].rstrip("/") for volume in flags.volume]
    if workdir and not any(f"{workdir}/".startswith(f"{path}/") for path in paths):
        why = (
            "the count of restarts is kept there" if launch.is_in_bucket(workdir) else "a node's own disk ends with it"
        )
        parser.error(f"--workdir: got {workdir}, expected a path below a --volume: {why}")


def main(argv: Sequence[str] | None = None, program: str | None = None, programs: Programs | None = None) -> int:
    """Runs the launcher and returns the exit code."""
    parser = make_parser(program)
    flags = launch.parse(parser, argv)
    check(parser, flags)
    if flags.dry_run:
        print(f"# {shlex.join(launch_command(flags, f'{flags.name}.yaml'))}\n{manifests.dump(task(flags))}", end="")
        return 0
    return exit_code_of(lambda: submit(flags, programs or Programs()))


if __name__ == "__main__":
    sys.exit(main())
