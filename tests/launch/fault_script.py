"""benchmarks/launch_faults.py as a module, loaded once for the tests of all launchers."""

import importlib.util
import sys
from pathlib import Path

NAME = "launch_faults"
_path = Path(__file__).resolve().parents[2] / "benchmarks" / f"{NAME}.py"
_spec = importlib.util.spec_from_file_location(NAME, _path)
sys.modules[NAME] = launch_faults = importlib.util.module_from_spec(_spec)  # its dataclasses look their module up
_spec.loader.exec_module(launch_faults)
