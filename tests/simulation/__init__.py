"""The shipped session, lanes and waiting, run under a virtual clock by a scheduler that a seed decides."""
