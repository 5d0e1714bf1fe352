"""Benchmarks: dibs beside the raw driver and its peers, in one process group on one machine. See ``__main__``."""
