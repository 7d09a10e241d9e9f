"""From files to batches: sources (text), tokenizers, packing, and the pipeline that puts them on the devices."""
