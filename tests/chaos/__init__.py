"""Chaos: real servers, real processes and real faults on one time line, and a checker of what every client saw.

``tests/simulation`` runs the code above the stores under a clock of its own. What it cannot see is the stores' own
statements under concurrency, the drivers, the system's signals and a real network, which are all there here:

* *clients* (``client.py``) are processes of threads and tasks that lock, share, elect, hand over and break, cancel and
  fork, and write down what they ask, get and see before and after they do it (``history.py``);
* *faults* (``faults.py``) kill clients with -9, stop them for longer than their leases last, freeze and kill the
  server, and spoil the network between them (``proxy.py``): slow, cut, answers lost, requests that arrive late;
* what the clients work on is a *fenced resource* (``resource.py``): counters that refuse smaller tokens;
* the *checker* (``checker.py``) says afterwards which promise was broken, with the time line around it; or that it does
  not know, because too little was done or the faults did nothing. That is no pass.

``tests/test_chaos.py`` does so for some seconds on each store; ``python -m tests.chaos --seconds 600`` for longer.
"""
