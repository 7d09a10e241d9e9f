"""One architecture of the other library a file, as data: each defines `FAMILY`."""
