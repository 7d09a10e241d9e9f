"""Where arrays live: the mesh, and the one table from logical axis names to mesh axes."""
