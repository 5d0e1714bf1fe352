"""The shipped session, lanes, waiting and lock under a virtual clock, run by a scheduler that a seed decides.

``world`` is time and threads, ``network`` the store and what can go wrong on the way to it, ``programs`` what the
processes do and how a seed becomes a scenario, ``checker`` what may not happen, ``bugs`` the mistakes that must be
found. ``docs/explanation/simulation.md`` says what it can see and what it cannot.
"""
