"""Families of the transformers library, one file each, as data: each file defines `FAMILY`."""
