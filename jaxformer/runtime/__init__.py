"""The process and its machine: directories, files, standard streams, secrets, memory, compiled programs, exit codes.

Modules of this package know no config, and none imports jax at module level.
"""
