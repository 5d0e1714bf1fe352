"""Private real servers for tests and benchmarks; `process` says how they are kept private. One module a kind."""
